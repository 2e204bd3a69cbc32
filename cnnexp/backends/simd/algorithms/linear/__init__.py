"""Algorithms that compute a linear layer, with the ReLU after it."""
