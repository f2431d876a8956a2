"""How this process runs and ends: exits, signals, exceptions, files."""
