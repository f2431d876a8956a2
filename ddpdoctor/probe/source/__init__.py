"""The user's source code, read where a watcher has found something."""
