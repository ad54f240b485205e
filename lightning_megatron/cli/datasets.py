"""The commands ``train-tokenizer``, ``preprocess``, ``convert-dataset`` and ``merge``: from text to datasets.

Slow imports are inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.data.preprocess import PreprocessOptions
from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions

if TYPE_CHECKING:
    from lightning_megatron.data.indexed import IndexedDataset


def train_tokenizer(options: TokenizerTrainingOptions) -> None:
    """Train a byte-level BPE tokenizer on text."""
    from lightning_megatron.data import tokenizer_training

    result = tokenizer_training.train_tokenizer(options)
    entries = f"{result.vocab_size:,} entries"
    if result.vocab_size < options.vocab_size:
        entries += f" (not {options.vocab_size:,}: the text has no more pairs of tokens to merge)"
    print(
        f"{options.output}: {entries} from {result.documents:,} documents, {result.bytes:,} bytes"
    )
    _print_skipped(result.skipped, result.replaced)


def preprocess(options: PreprocessOptions) -> None:
    """Turn text into an indexed dataset (.bin/.idx).

    Writes P_<key>_document.bin and .idx, or P_<key>_sentence with --split-sentences. The files appear under these
    names once all are complete, and replace none. The order of the inputs is kept.

    Example:
        lightning-megatron preprocess --input 'corpus/*.jsonl.gz' --output-prefix data/corpus
          --tokenizer path/to/tokenizer --append-eod --workers 8
    """
    from lightning_megatron.data import preprocess

    result = preprocess.preprocess(options)
    print(
        f"{', '.join(result.prefixes)}: {result.documents:,} documents, {result.tokens:,} tokens from"
        f" {result.bytes:,} bytes at {result.bytes / 1e6 / result.seconds:.2f} MB/s"
    )
    if result.empty_documents:
        print(
            f"{result.empty_documents:,} texts without a token, written as documents without a sequence"
        )
    _print_skipped(result.skipped, result.replaced)


def _print_skipped(num_skipped: int, num_replaced: int) -> None:
    if num_skipped:
        print(f"{num_skipped:,} lines, rows or files that are no documents were skipped")
    if num_replaced:
        print(f"{num_replaced:,} characters that are not of the encoding were replaced by U+FFFD")


def convert_dataset(*, input: str | Path, output_prefix: str | Path) -> None:
    """Convert an indexed dataset of Megatron 1.x or 2.x (cached, lazy) to mmap.

    Checks all of the old index; documents and tokens are unchanged.

    Args:
        input: Dataset to read, without .bin.
        output_prefix: Dataset to write, without .bin; must not exist.
    """
    from lightning_megatron.data.indexed_writer import convert_dataset

    _print_merged(convert_dataset(str(input), str(output_prefix)), [input])


def merge(
    *,
    input: Sequence[str | Path],
    output_prefix: str | Path,
) -> None:
    """Merge several indexed datasets into one.

    Keeps the given order, documents and tokens; writes the mmap format, with the smallest dtype that holds all tokens.
    Checks all of each index first.

    Args:
        input: Datasets to read (mmap, cached, lazy), without .bin.
        output_prefix: Dataset to write, without .bin; must not exist.
    """
    from lightning_megatron.data.indexed_writer import merge_datasets

    prefixes = [str(prefix) for prefix in input]
    _print_merged(merge_datasets(prefixes, str(output_prefix)), input)


def _print_merged(merged: IndexedDataset, sources: Sequence[str | Path]) -> None:
    print(
        f"{merged.prefix}: {merged.num_documents:,} documents, {len(merged.lengths):,} sequences, "
        f"{len(merged.tokens):,} tokens ({merged.dtype}) from {', '.join(map(str, sources))}"
    )
