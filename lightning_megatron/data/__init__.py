"""Data: corpora to indexed files, indexed files and records to samples, samples to batches on every rank."""
