"""Which sub-commands work on indexed datasets that exist already, and what does each take?

Only the standard library is imported before a command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.cli.failure import DONE

if TYPE_CHECKING:
    from lightning_megatron.data.merge import MergedDataset


def add_dataset_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of this file to those of the program."""
    _add_convert_dataset(commands)
    _add_merge(commands)
    _add_inspect(commands)


def _add_convert_dataset(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "turn an indexed dataset of Megatron 1.x or 2.x (cached, lazy) into mmap"
    parser = commands.add_parser(
        "convert-dataset",
        help=summary,
        description=f"{summary}. Checks all of the old index; documents and tokens stay as they are.",
    )
    parser.add_argument("--input", required=True, metavar="PREFIX", help="dataset to read, without .bin")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="dataset to write, without .bin; must not exist"
    )
    parser.set_defaults(run=_convert_dataset)


def _add_merge(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "write several indexed datasets as one"
    parser = commands.add_parser(
        "merge",
        help=summary,
        description=f"{summary}, in the order given, in the mmap format. Keeps documents and tokens; the type of tokens"
        " is the smallest that holds those of all inputs. Checks all of each index first.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="datasets to read (mmap, cached, lazy), without .bin",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="dataset to write, without .bin; must not exist"
    )
    parser.set_defaults(run=_merge)


def _add_inspect(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "describe a dataset (documents, tokens, lengths) or a checkpoint (tensors, model, layout)"
    parser = commands.add_parser(
        "inspect",
        help=summary,
        description=f"{summary}. Reads and checks all of a dataset's index, not all of its tokens; reads no weight of a"
        " checkpoint, and runs no code of it.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        help="prefix of a dataset, or its .bin or .idx; a *.ckpt, a checkpoint of Megatron-Core (torch_dist) or of"
        " Megatron-LM, or a Hugging Face model directory",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="decode the first documents with this transformers tokenizer"
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="show the beginning of the first N documents (default: 3 with --tokenizer, else 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_inspect)


def _convert_dataset(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.merge import convert_dataset

    _print_rewritten(convert_dataset(parsed.input, parsed.output_prefix), parsed.input)
    return DONE


def _merge(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.merge import merge_datasets

    _print_rewritten(merge_datasets(parsed.input, parsed.output_prefix), ", ".join(parsed.input))
    return DONE


def _print_rewritten(result: MergedDataset, source: str) -> None:
    print(
        f"{result.prefix}: {result.documents:,} documents, {result.sequences:,} sequences, {result.tokens:,} tokens"
        f" from {source}"
    )
    for note in result.notes:
        print(f"note: {note}")


def _inspect(parsed: argparse.Namespace) -> int:
    from lightning_megatron.cli.inspection import InspectOptions, inspect, show

    report = inspect(
        InspectOptions(
            path=parsed.path,
            json=parsed.json,
            tokenizer=parsed.tokenizer,
            documents=parsed.documents,
        )
    )
    show(report)
    return DONE
