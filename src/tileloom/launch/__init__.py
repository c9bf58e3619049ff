"""Compiling kernels ahead of time and launching them, on every Triton from 3.6 to 3.9."""
