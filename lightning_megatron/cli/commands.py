"""Which sub-commands are there, and what does each take?

Only the standard library is imported before a command runs, so that help and wrong arguments answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lightning_megatron.cli.dataset_commands import add_dataset_commands
from lightning_megatron.cli.failure import DONE, UsageError, report, users_mistake
from lightning_megatron.cli.help_text import TRAINER_COMMANDS, trainer_help

PROG = "lightning-megatron"


class _OneLineErrorParser(argparse.ArgumentParser):
    """argparse without the usage dump: wrong arguments are one line like every other mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0 done, 2 wrong arguments or settings. Anything else that fails keeps its traceback (code 1).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in TRAINER_COMMANDS:
            return _run_trainer_command(arguments)
        parsed = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = parsed.run
        return run(parsed)
    except Exception as error:
        message = users_mistake(error)
        if message is None:
            raise
        return report(message)


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineErrorParser(
        prog=PROG,
        description="Train language models with tensor, pipeline and sequence parallelism on PyTorch Lightning.",
        epilog=f"{PROG} COMMAND --help describes a command. Exit codes: 0 done, 1 failed, 2 wrong arguments.",
    )
    # The parsers of the sub-commands are of the same class, so they report errors in the same way.
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in TRAINER_COMMANDS.items():
        commands.add_parser(name, help=summary)  # for the list in --help; main() runs them
    _add_train_tokenizer(commands)
    _add_preprocess(commands)
    add_dataset_commands(commands)
    _add_doctor(commands)
    return parser


def _add_train_tokenizer(commands: argparse._SubParsersAction[_OneLineErrorParser]) -> None:
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


def _add_preprocess(commands: argparse._SubParsersAction[_OneLineErrorParser]) -> None:
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


def _add_doctor(commands: argparse._SubParsersAction[_OneLineErrorParser]) -> None:
    summary = "show versions, devices, and what fills each slot of the engine"
    parser = commands.add_parser("doctor", help=summary, description=summary)
    parser.set_defaults(run=_doctor)


def _run_trainer_command(arguments: list[str]) -> int:
    command, options = arguments[0], arguments[1:]
    if any(option in ("-h", "--help") for option in options):
        print(trainer_help(PROG, command))
        return DONE
    from lightning_megatron.cli.messages import hide_known_warnings

    hide_known_warnings()  # before the imports that cause some of them
    # As with `python -m`: a configuration may name classes in the user's own files.
    sys.path.insert(0, os.getcwd())
    from lightning_megatron.cli.training import run

    run([command, *("--help" if option == "--help-all" else option for option in options)])
    return DONE


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


def _doctor(parsed: argparse.Namespace) -> int:
    from lightning_megatron.cli.doctor import report_installation

    print(report_installation())
    return DONE
