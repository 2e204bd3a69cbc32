"""The algorithms: a file for each name that `backend.explain=true` prints, and what several of them share.

A file states its gain: cycles an image of all kernels, `python -m benchmarks.kernels --algorithms`, Zen 3 (AVX2).
"""
