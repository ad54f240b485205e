"""Random tokens as training data: rows in memory, which take no time to read, or an indexed dataset."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.cases import Case
from benchmarks.measurement import is_first_rank
from lightning_megatron import IndexedDataModule
from lightning_megatron.data.indexed import token_dtype
from lightning_megatron.data.indexed_writer import dataset_writers
from lightning_megatron.models.config import ModelConfig

_DISTINCT_ROWS = 256
_EPOCH_ROWS = 1 << 16
_MASKED_SHARE = 0.15
"""Fraction of masked tokens for BERT (Devlin et al. 2018)."""


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """A few rows of uniformly random tokens, repeated; the same in every process and on every device."""

    def __init__(self, case: Case, model: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(0)

        def tokens(length: int) -> torch.Tensor:
            return torch.randint(0, model.vocab_size, (_DISTINCT_ROWS, length), generator=generator)

        self._columns = {"input_ids": tokens(case.seq_length)}
        if model.architecture == "bert":
            not_masked = (
                torch.rand(_DISTINCT_ROWS, case.seq_length, generator=generator) >= _MASKED_SHARE
            )
            self._columns["labels"] = tokens(case.seq_length).masked_fill(not_masked, -100)
            self._columns["token_type_ids"] = torch.zeros(
                _DISTINCT_ROWS, case.seq_length, dtype=torch.long
            )
            self._columns["token_type_ids"][:, case.seq_length // 2 :] = 1
            self._columns["next_sentence_label"] = torch.randint(
                0, 2, (_DISTINCT_ROWS,), generator=generator
            )
        if model.architecture == "t5":
            self._columns["labels"] = tokens(case.decoder_seq_length)

    def __len__(self) -> int:
        return _EPOCH_ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index % _DISTINCT_ROWS] for name, column in self._columns.items()}


def loader(case: Case, model: ModelConfig, rows: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Create a DataLoader with ``rows`` rows per batch; Lightning shards it over data-parallel ranks."""
    return DataLoader(RandomRows(case, model), batch_size=rows)


SENTENCE_TOKENS = 25
LEAST_TOKEN = 106
"""Smallest token id after the special tokens and sentinels."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")


def write_corpus(
    prefix: str, vocab_size: int, num_tokens: int, document_tokens: int, in_sentences: bool
) -> None:
    """Write a dataset of random tokens, in documents of ``document_tokens`` on average."""
    random = np.random.default_rng(0)
    with dataset_writers(prefix, token_dtype(vocab_size)) as (writer,):
        for _ in range(max(1, num_tokens // document_tokens)):
            length = int(random.integers(document_tokens // 2, 3 * document_tokens // 2)) + 1
            tokens = random.integers(LEAST_TOKEN, vocab_size, size=length).astype(
                token_dtype(vocab_size)
            )
            sentences = -(-length // SENTENCE_TOKENS) if in_sentences else 1
            lengths = [len(sentence) for sentence in np.array_split(tokens, sentences)]
            writer.add_documents(tokens.tobytes(), lengths, [sentences])


def save_tokenizer(folder: str, vocab_size: int) -> None:
    """Save a WordPiece tokenizer in which one piece in three continues a word, with 100 sentinels."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL, *(f"<extra_id_{number}>" for number in range(100))]
    pieces += [
        f"{'##' if number % 3 == 0 else ''}w{number}" for number in range(vocab_size - len(pieces))
    ]
    model = models.WordPiece(
        {piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"
    )
    roles = zip(("pad", "unk", "cls", "sep", "mask", "eos"), SPECIAL, strict=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), **{f"{role}_token": piece for role, piece in roles}
    )
    tokenizer.save_pretrained(folder)


def indexed_data(case: Case, model: ModelConfig, num_workers: int) -> IndexedDataModule:
    """Create a data module of a case's samples; the first rank writes the dataset to a temporary directory if missing.

    Raises:
        TimeoutError: If the dataset is not written within 120 s.
    """
    folder = Path(tempfile.gettempdir(), f"lightning-megatron-{case.name}-{os.getuid()}")
    if is_first_rank() and not (folder / "corpus.idx").exists():
        save_tokenizer(str(folder / "tokenizer"), model.vocab_size)
        write_corpus(
            str(folder / "corpus"), model.vocab_size, 20_000_000, 1000, model.architecture != "gpt"
        )
    deadline = time.monotonic() + 120
    while not (folder / "corpus.idx").exists():  # with torchrun all ranks start at the same time
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder}/corpus.idx has not been written within 120 s")
        time.sleep(0.2)
    return IndexedDataModule(
        str(folder / "corpus"),
        split="1",
        seq_length=case.seq_length,
        seq_length_decoder=case.decoder_seq_length or 128,
        micro_batch_size=case.micro_batch_size,
        tokenizer=str(folder / "tokenizer"),
        num_workers=num_workers,
    )
