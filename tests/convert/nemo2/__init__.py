"""A checkpoint of NeMo 2, and how it was made."""
