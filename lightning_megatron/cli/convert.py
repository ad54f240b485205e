"""The commands ``convert`` and ``average`` for checkpoints.

Slow imports are inside the functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.convert import ConvertOptions, Format
from lightning_megatron.errors import ConfigError
from lightning_megatron.storage.paths import readable_size
from lightning_megatron.storage.publish import exit_on_sigterm


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
        lightning-megatron convert --load-path last.ckpt --save-path averaged --to hf --ema
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

    Raises:
        ConfigError: If there are not at least two checkpoints, or they cannot be averaged.
    """
    if len(load_path) < 2:
        raise ConfigError(
            f"load_path={load_path[0]}: expected at least two checkpoints, got one; give the others, or use convert"
        )
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

    start = time.monotonic()
    with exit_on_sigterm():
        kind = convert(options, average_with)
    seconds = max(time.monotonic() - start, 1e-9)
    if int(os.environ.get("RANK", 0)) > 0:  # set by torchrun
        return
    files = [file for file in options.save_path.rglob("*") if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files)
    sources = ", ".join(map(str, (options.load_path, *average_with)))
    print(
        f"{options.save_path}: {len(files):,} files, {readable_size(num_bytes)}, from {kind} {sources}, in "
        f"{seconds:.1f} s ({readable_size(num_bytes / seconds)}/s)"
    )
    if options.to == "megatron":
        print(
            f"It holds weights only: start a run with MegatronStrategy(load_from={str(options.save_path)!r})"
        )
    elif options.to == "megatron-legacy":
        print("It holds weights only: Megatron-LM loads it as a release, and starts at iteration 0")
