"""Programs that run: the training loop, its threads, and how long each part takes."""
