"""The recorder and what every watcher needs: hooks, patching, code locations, sampling."""
