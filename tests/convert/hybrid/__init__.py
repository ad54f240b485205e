"""Checkpoints of Megatron-Core's ``HybridModel``, and how they were made."""
