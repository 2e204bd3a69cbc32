"""Backends of Numba CUDA kernels. None of them has met a GPU yet."""
