"""Data: corpora to indexed files, indexed files and records to samples, samples to batches on every rank.

Files of tokens and texts, tokenizers, samplers and loaders belong here. Imports ``storage`` and the engine, and never
Lightning.
"""
