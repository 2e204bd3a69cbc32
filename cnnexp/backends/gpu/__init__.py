"""Backends of Numba CUDA kernels. docs/gpu.md says what a GPU has run of them."""
