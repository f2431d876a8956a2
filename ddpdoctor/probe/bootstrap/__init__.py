"""When this process becomes a rank, and the installing of every watcher."""
