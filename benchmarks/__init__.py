"""How fast is it? Training speed of whole runs: ``python -m benchmarks --list``."""
