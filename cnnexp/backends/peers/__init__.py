"""Frameworks to compare with, as backends."""
