"""Which sub-commands make an indexed dataset out of text, and what does each take?

Only the standard library is imported before a command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_megatron.cli.failure import DONE


def add_corpus_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of this file to those of the program."""
    _add_train_tokenizer(commands)
    _add_preprocess(commands)


def _add_train_tokenizer(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "train a byte-level BPE tokenizer on text"
    parser = commands.add_parser("train-tokenizer", help=summary, description=summary)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="PATH",
        help="text files, JSON lines, or folders of text files",
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, special tokens included")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder to save the transformers tokenizer to"
    )
    parser.set_defaults(run=_train_tokenizer)


def _add_preprocess(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "turn text into an indexed dataset (.bin/.idx)"
    parser = commands.add_parser(
        "preprocess",
        help=summary,
        description=f"{summary}. Writes P_<key>_document.bin and .idx.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        metavar="PATH",
        help="JSON lines, text files (one document each), or folders of text files",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="P", help="path that the names of the files begin with"
    )
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="folder of a transformers tokenizer")
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a JSON line to tokenize (default: text)",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-text token")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    parser.add_argument(
        "--dataset-impl",
        choices=("mmap", "cached", "lazy"),
        default="mmap",
        help="format: mmap for Megatron-Core and IndexedDataModule; cached and lazy, two names of one format,"
        " for Megatron 1.x and 2.x (default: mmap)",
    )
    parser.set_defaults(run=_preprocess)


def _train_tokenizer(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.corpus.tokenizer import TokenizerTrainingOptions, train_tokenizer

    result = train_tokenizer(
        TokenizerTrainingOptions(input=parsed.input, vocab_size=parsed.vocab_size, output=parsed.output)
    )
    print(f"{parsed.output}: {result.vocab_size:,} entries from {result.documents:,} documents, {result.bytes:,} bytes")
    return DONE


def _preprocess(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.corpus.preprocess import PreprocessOptions, preprocess

    result = preprocess(
        PreprocessOptions(
            input=parsed.input,
            output_prefix=parsed.output_prefix,
            tokenizer=parsed.tokenizer,
            json_keys=parsed.json_keys,
            append_eod=parsed.append_eod,
            workers=parsed.workers,
            dataset_impl=parsed.dataset_impl,
        )
    )
    names = ", ".join(result.prefixes)
    print(f"{names}: {result.documents:,} documents, {result.tokens:,} tokens from {result.bytes:,} bytes")
    return DONE
