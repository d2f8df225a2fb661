"""A regular package: one that a dependency installs under this name would hide a folder."""
