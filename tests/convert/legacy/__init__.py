"""Legacy Megatron-LM checkpoints."""
