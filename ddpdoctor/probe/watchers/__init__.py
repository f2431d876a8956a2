"""One package per question; none imports another but `manual_sync`."""
