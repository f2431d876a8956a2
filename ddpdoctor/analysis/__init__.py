"""Questions that checks ask of a run: pure functions, for every check and for plug-ins."""
