"""The epoch loop, the baseline that is timed beside it, checkpoints and learning-rate schedules."""
