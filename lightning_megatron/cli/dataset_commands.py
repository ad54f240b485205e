"""Which sub-commands work on indexed datasets that exist already, and what does each take?

Only the standard library is imported before a command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
from typing import Any

from lightning_megatron.cli.failure import DONE


def add_dataset_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of this file to those of the program."""
    _add_convert_dataset(commands)


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


def _convert_dataset(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.formats.convert import convert_dataset

    result = convert_dataset(parsed.input, parsed.output_prefix)
    print(
        f"{result.prefix}: {result.documents:,} documents, {result.sequences:,} sequences, {result.tokens:,} tokens"
        f" from {parsed.input}"
    )
    return DONE
