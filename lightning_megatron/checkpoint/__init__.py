"""Checkpoints of a run: ``*.ckpt`` directories in Megatron's distributed format, loadable at any layout.

A directory holds Megatron's table of contents and data files, one file per rank with its random states,
``checksums.json``, and ``meta.pt`` with everything that is not sharded, written last.
"""
