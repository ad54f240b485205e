"""Drives Megatron-Core: process groups, pipeline schedule, optimizer, patches, and in ``ops/`` what layers are made of.

How something is computed belongs here, whatever the model and the objective: what they are is in ``models/`` and
``steps/``. Imports errors and names of options, for types too nothing else of this package, and never Lightning.
"""
