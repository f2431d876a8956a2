"""The checks: one file each, in the families of the catalogue, loaded by the registry."""
