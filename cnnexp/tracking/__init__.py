"""The record of runs: journal, pipe, store, figures."""
