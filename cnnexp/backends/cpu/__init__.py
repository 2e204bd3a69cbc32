"""Backends of Numba loops on the CPU, layer by layer."""
