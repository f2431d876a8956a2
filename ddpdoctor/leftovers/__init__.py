"""Reads what a run without the doctor left behind: flight-recorder dumps, error files, logs."""
