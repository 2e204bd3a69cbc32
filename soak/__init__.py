"""What is tried for hours, by `make soak`: kills, faults, damaged files, random networks and configs, long runs."""
