"""What loaders delivered to each rank, compared across ranks."""
