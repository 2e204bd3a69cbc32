"""Vectors and LLVM: from kernels written in Python to machine code that is called; knows no layer."""
