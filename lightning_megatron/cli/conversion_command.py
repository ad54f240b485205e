"""What does ``convert`` take, and what does it say when it is done?

Only the standard library is imported before the command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_megatron.cli.failure import DONE

_DESCRIPTION = """\
Write the weights of a checkpoint in another format or layout, in one process and without a GPU.

Read are (the format is detected):
  Hugging Face model directories    safetensors or .bin, in one file or several; or their names on the hub, org/name
  *.ckpt                            of MegatronStrategy, at any layout
  torch_dist                        Megatron-Core's distributed checkpoints
  mp_rank_*/model_optim_rng.pt      Megatron-LM's of any version, and NVIDIA's .zip of one
  folders of iterations             with latest_checkpointed_iteration.txt, or iter_* and release
"""
_EPILOG = """\
examples:
  {prog} --load-path gpt2 --save-path gpt2.ckpt --to megatron
  {prog} --load-path last.ckpt --save-path trained --to hf --dtype bf16 --max-shard-size 2GB
  {prog} --load-path llama --save-path legacy --to megatron-legacy --tp 4 --pp 2

Memory stays below twice the largest file of weights. Nothing stands under the name of --save-path before all of it
is written. Files are data: no code in a checkpoint is run."""


def add_convert_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of this file to those of the program."""
    parser = commands.add_parser(
        "convert",
        help="turn a checkpoint into one of another format or layout",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.epilog = _EPILOG.format(prog=parser.prog)
    parser.add_argument("--load-path", type=Path, required=True, metavar="PATH", help="checkpoint to read, or org/name")
    parser.add_argument(
        "--save-path", type=Path, required=True, metavar="PATH", help="what to write; must not exist, or be empty"
    )
    parser.add_argument(
        "--to",
        choices=("hf", "megatron", "megatron-legacy"),
        required=True,
        help="a Hugging Face model directory; a *.ckpt, which MegatronStrategy and Megatron-Core read; or Megatron-LM's"
        " files of each rank",
    )
    parser.add_argument("--dtype", metavar="NAME", help="fp32, fp16 or bf16 for the weights (default: as they are)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer to put beside the weights")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="which of a folder of iterations (default: the last one saved)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a Hugging Face config.json for checkpoints that do not say what their model is",
    )
    _add_layout(parser)
    parser.set_defaults(run=_convert)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    hugging_face = parser.add_argument_group("with --to hf")
    hugging_face.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest weight file, e.g. 200MB (default: 5GB)"
    )
    megatron = parser.add_argument_group("with --to megatron and megatron-legacy")
    megatron.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel size (default: 1)")
    megatron.add_argument(
        "--pp", type=int, default=1, metavar="N", help="pipeline stages; layers need not divide evenly (default: 1)"
    )
    megatron.add_argument("--vpp", type=int, metavar="N", help="model chunks of each stage (default: 1)")
    megatron.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="the vocabulary is padded to a multiple of this times tp (default: 128)",
    )


def _convert(parsed: argparse.Namespace) -> int:
    from lightning_megatron.convert.conversion import convert
    from lightning_megatron.convert.options import ConvertOptions
    from lightning_megatron.data.indexed import exit_on_sigterm

    options = {name: value for name, value in vars(parsed).items() if name != "run"}
    with exit_on_sigterm():
        done = convert(ConvertOptions(**options))
    sys.stdout.write(
        f"{done.path}: {done.target} ({done.num_files:,} files, {_size(done.num_bytes)}) from {done.source}"
        f" {parsed.load_path}, in {done.seconds:.1f} s ({_size(done.num_bytes / max(done.seconds, 1e-9))}/s)\n"
    )
    if parsed.to == "megatron":
        sys.stdout.write(f"It holds weights only: begin a run with MegatronStrategy(load_from={str(done.path)!r})\n")
    elif parsed.to == "megatron-legacy":
        sys.stdout.write("It holds weights only: Megatron-LM takes it as a release, and begins at iteration 0\n")
    return DONE


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.2f} MB"
