"""The algorithms: a file for each name that `backend.explain=true` prints, and what several of them share.

A file states its algorithm's gain: cycles an image for all kernels, by `python -m benchmarks.kernels --algorithms` on
Zen 3 (AVX2) unless it says otherwise.
"""
