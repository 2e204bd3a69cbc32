"""How fast the CPU backends train, beside PyTorch, Keras and JAX on the same cores and the machine's own limit.

`python -m benchmarks` is the program. Every contestant is a process of its own, `worker`; `runner` lets them take
turns, so that what the machine does meanwhile falls on all alike.
"""
