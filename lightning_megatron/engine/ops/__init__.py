"""PyTorch and Triton implementations of the parts of Megatron-Core that Transformer Engine or Apex usually provide."""
