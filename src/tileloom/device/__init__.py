"""What kernels call on the device: barriers, layouts, and Gluon names that differ by version."""
