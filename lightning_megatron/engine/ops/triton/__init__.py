"""Triton kernels, imported only where Triton is installed.

Each reads and writes every element once, where torch's operators or compiled graphs pass over memory several times;
measurements are in the docstring of each file. Kernels have no type annotations, because Triton evaluates them.
"""
