"""Where the ranks' calls differ, and why."""
