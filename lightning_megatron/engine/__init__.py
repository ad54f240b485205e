"""How does it run? Everything that drives Megatron-Core; nothing here imports Lightning."""
