"""Kernels that the emulator's tests run: each `main()` returns a result and what it should be."""
