"""Operator libraries: formats and kernels from outside this tree (docs/OPERATORS.md)."""
