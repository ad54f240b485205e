"""Caches of generation, and the report of what fills the engine's slots."""
