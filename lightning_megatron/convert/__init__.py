"""Conversion between checkpoint formats through a live model; Hugging Face families as tables."""
