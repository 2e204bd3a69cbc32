"""Hydra plugin: hyper-parameter search."""
