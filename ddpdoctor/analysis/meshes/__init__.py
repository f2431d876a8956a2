"""Models of DTensors on a device mesh: which ranks hold copies, and which need equal inputs."""
