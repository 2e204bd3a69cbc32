"""Algorithms that compute a convolution, with the ReLU and the max-pool after it."""
