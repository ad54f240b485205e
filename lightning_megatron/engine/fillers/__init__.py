"""PyTorch implementations for the places of Megatron-Core that Transformer Engine or Apex usually fill."""
