"""Models, forwards, backwards and optimizer steps."""
