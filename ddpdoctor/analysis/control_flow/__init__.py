"""The statements around a line of the user's code: branches, loops, jumps, handlers."""
