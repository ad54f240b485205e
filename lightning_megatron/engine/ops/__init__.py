"""PyTorch and Triton implementations of the parts of Megatron-Core that Transformer Engine or Apex usually provide.

One file an op; ``patches.py`` and the layer specs of ``models/`` put them into Megatron-Core. Kernels of Triton are in
``triton/``, imported on GPUs only. Imports settings and errors.
"""
