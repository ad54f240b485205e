"""Where are tokenized instructions kept, so that neither another rank nor a later run tokenizes them again?

A folder's name covers what its content depends on: sizes and times of the files, what the tokenizer does, all options.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np

from lightning_megatron.data.corpus.tokenizer import load_tokenizer
from lightning_megatron.data.samples.built_once import SampleOrder, build_once, open_array
from lightning_megatron.data.samples.instructions import InstructionOptions, Instructions, read_instructions
from lightning_megatron.data.samples.records import record_files

_LAYOUT = 1
"""Of the files in a folder, and of the rules by which they come about; a change makes the old folders unknown."""

_ARRAYS = ("tokens", "is_answer", "starts")


def cached_instructions(options: InstructionOptions, index_cache: str | None) -> Instructions:
    """All samples in the order of the files; mapped into memory, so that the ranks of a machine share it.

    Args:
        options: Which samples.
        index_cache: Folder for them; None to tokenize in memory.

    Raises:
        DataError: As ``read_instructions``; if the folder cannot be written.
    """
    if index_cache is None:
        return read_instructions(options)
    folder = os.path.join(os.path.abspath(index_cache), f"instructions-{_identity(options)}")

    def write(staging: str) -> SampleOrder:
        made = read_instructions(options)
        for name in _ARRAYS:
            np.save(os.path.join(staging, f"{name}.npy"), getattr(made, name))
        np.save(os.path.join(staging, "padding_token.npy"), made.padding_token)
        return SampleOrder(num_samples=len(made), fingerprint=made.fingerprint)

    build_once(folder, write, options.path)
    tokens, is_answer, starts = (open_array(folder, name) for name in _ARRAYS)
    return Instructions(
        tokens=tokens,
        is_answer=is_answer,
        starts=starts,
        seq_length=options.seq_length,
        padding_token=int(open_array(folder, "padding_token")),
    )


def _identity(options: InstructionOptions) -> str:
    tokenizer = load_tokenizer(options.tokenizer)
    files = [(os.path.realpath(file), os.stat(file)) for file in record_files(options.path)]
    content = (
        _LAYOUT,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files],
        (options.seq_length, options.answers, options.separator),
        (tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "", tokenizer.chat_template),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]
