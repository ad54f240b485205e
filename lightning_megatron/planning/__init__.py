"""Arithmetic on a model's shape and layout: parameters, FLOPs, memory, step time, and the layouts that fit.

Nothing here runs a model. Imports ``models`` and the engine's settings.
"""
