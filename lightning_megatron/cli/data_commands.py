"""Commands for corpora, datasets and checkpoints; options and help are generated from signatures and docstrings.

Slow imports are inside the functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.convert import ConvertOptions, Format
from lightning_megatron.data.preprocess import PreprocessOptions
from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions
from lightning_megatron.storage.paths import readable_size

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


def merge(*, input: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Merge several indexed datasets into one.

    Keeps the given order, documents and tokens; writes the mmap format, with the smallest dtype that holds all tokens.
    Checks all of each index first.

    Args:
        input: Datasets to read (mmap, cached, lazy), without .bin.
        output_prefix: Dataset to write, without .bin; must not exist.
    """
    from lightning_megatron.data.indexed_writer import merge_datasets

    _print_merged(merge_datasets([str(prefix) for prefix in input], str(output_prefix)), input)


def _print_merged(merged: IndexedDataset, sources: Sequence[str | Path]) -> None:
    print(
        f"{merged.prefix}: {merged.num_documents:,} documents, {len(merged.lengths):,} sequences, "
        f"{len(merged.tokens):,} tokens ({merged.dtype}) from {', '.join(map(str, sources))}"
    )


def convert(options: ConvertOptions) -> None:
    """Convert a checkpoint to another format or layout.

    Reads and writes weights through the model, without a GPU. The input format is detected:

      Hugging Face model directories    safetensors or .bin, in one file or several; or a name on the hub, org/name
      *.ckpt                            of MegatronStrategy, at any layout
      torch_dist                        Megatron-Core's distributed checkpoints
      mp_rank_*/model_optim_rng.pt      Megatron-LM's of any version, and NVIDIA's .zip of one
      directories of iterations         with latest_checkpointed_iteration.txt, or iter_* and release

    A single process holds the whole model in memory; under torchrun each of tp x pp processes holds its shard.
    --save-path appears only when it is complete. No code in a checkpoint is run.

    Examples:
        lightning-megatron convert --load-path gpt2 --save-path gpt2.ckpt --to megatron
        lightning-megatron convert --load-path last.ckpt --save-path trained --to hf --dtype bf16 --max-shard-size 2GB
        lightning-megatron convert --load-path llama --save-path legacy --to megatron-legacy --tp 4 --pp 2
    """
    _print_converted(options, ())


def average(
    *,
    load_path: Sequence[Path],
    save_path: Path,
    to: Format = "megatron",
    dtype: str | None = None,
    tokenizer: Path | None = None,
    base: Path | None = None,
) -> None:
    """Write the mean of the weights of several checkpoints of one model.

    The average of the last checkpoints of a run is often better than the last one (stochastic weight averaging). Sums
    are fp32 (of fp64 weights fp64); the weights keep the dtypes of the first checkpoint unless --dtype is given. The
    two matrices of a LoRA adapter are averaged one by one. Reads what convert reads.

    Args:
        load_path: Checkpoints to average, in any format.
        save_path: Checkpoint to write; must not exist, or be an empty directory.
        to: Output format, as for convert.
        dtype: fp32, fp16 or bf16 for the weights.
        tokenizer: Tokenizer to save with the weights (default: that of the first checkpoint).
        base: Base model of adapters, or its name on the hub (default: the one that they name, if it is on this host).

    Example:
        lightning-megatron average --load-path runs/a/step=8000.ckpt runs/a/step=9000.ckpt --save-path mean.ckpt
    """
    options = ConvertOptions(
        load_path=load_path[0],
        save_path=save_path,
        to=to,
        dtype=dtype,
        tokenizer=tokenizer,
        base=base,
    )
    _print_converted(options, load_path[1:])


def _print_converted(options: ConvertOptions, average_with: Sequence[Path]) -> None:
    from lightning_megatron.convert.convert import convert
    from lightning_megatron.storage.publish import exit_on_sigterm

    start = time.monotonic()
    with exit_on_sigterm():
        kind = convert(options, average_with)
    seconds = max(time.monotonic() - start, 1e-9)
    if int(os.environ.get("RANK", 0)) > 0:  # set by torchrun
        return
    sizes = [file.stat().st_size for file in options.save_path.rglob("*") if file.is_file()]
    sources = ", ".join(map(str, (options.load_path, *average_with)))
    print(
        f"{options.save_path}: {len(sizes):,} files, {readable_size(sum(sizes))}, from {kind} {sources}, in "
        f"{seconds:.1f} s ({readable_size(sum(sizes) / seconds)}/s)"
    )
    if options.to == "megatron":
        print(
            f"It holds weights only: start a run with MegatronStrategy(load_from={str(options.save_path)!r})"
        )
    elif options.to == "megatron-legacy":
        print("It holds weights only: Megatron-LM loads it as a release, and starts at iteration 0")


def doctor() -> None:
    """Show versions, devices, what implements each op of the engine, and optional packages."""
    from lightning_megatron.cli.doctor import report_installation

    print(report_installation())
