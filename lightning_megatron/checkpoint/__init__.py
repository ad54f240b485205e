"""Checkpoints of a run: ``*.ckpt`` directories in Megatron's distributed format, loadable at any layout.

A directory holds the shards with their table of contents, ``common.pt`` with state that is not sharded, one file per
rank with its random states, ``checksums.json``, and, written last, ``meta.pt`` with Lightning's state and the
description of the run.

What gives these files their meaning belongs here; when a run saves and loads does not (``run/``). Imports the engine
and storage, and never Lightning.
"""
