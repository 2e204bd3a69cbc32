"""Backends in Python and NumPy alone."""
