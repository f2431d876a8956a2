"""What DDP's graph is made of: unused parameters, bypassed wrappers, devices."""
