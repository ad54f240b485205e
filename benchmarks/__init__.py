"""Benchmarks: training, checkpoints, generation and data. ``python -m benchmarks --list``."""
