"""The checks: one file each, in the families of the catalogue. Loaded by `ddpdoctor.registry`."""
