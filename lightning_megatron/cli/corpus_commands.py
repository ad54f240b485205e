"""Which sub-commands make an indexed dataset out of text, and what does each take?

Only the standard library is imported before a command runs, as in ``commands.py``.
"""

from __future__ import annotations

import argparse
from typing import Any

from lightning_megatron.cli.failure import DONE

_INPUTS = (
    "files, folders (searched recursively, without links to folders) and quoted patterns: .jsonl (one JSON object a"
    " line), .parquet, and text files of one document each; also .gz and .zst of JSON lines and text"
)


def add_corpus_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parsers of this file to those of the program."""
    _add_train_tokenizer(commands)
    _add_preprocess(commands)


def _add_train_tokenizer(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "train a byte-level BPE tokenizer on text"
    parser = commands.add_parser("train-tokenizer", help=summary, description=summary)
    _add_inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, special tokens included")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to save the transformers tokenizer to")
    parser.add_argument(
        "--kind",
        choices=("gpt", "bert", "t5"),
        default="gpt",
        help="the model whose special tokens it gets: <|endoftext|>; [PAD] [CLS] [SEP] [MASK]; <pad> </s> and 100"
        " sentinels <extra_id_N> (default: gpt)",
    )
    parser.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="key of a JSON line, or column, that holds the text (default: text)",
    )
    _add_on_error(parser)
    parser.set_defaults(run=_train_tokenizer)


def _add_preprocess(commands: argparse._SubParsersAction[Any]) -> None:
    summary = "turn text into an indexed dataset (.bin/.idx)"
    parser = commands.add_parser(
        "preprocess",
        help=summary,
        description=f"{summary}. Writes P_<key>_document.bin and .idx, or P_<key>_sentence with --split-sentences;"
        " nothing under these names before all of it is complete, then it replaces what is there. The order of the"
        " inputs is kept.",
        epilog="example: lightning-megatron preprocess --input 'corpus/*.jsonl.gz' --output-prefix data/corpus"
        " --tokenizer path/to/tokenizer --append-eod --workers 8",
    )
    _add_inputs(parser)
    parser.add_argument(
        "--output-prefix", required=True, metavar="P", help="path that the names of the files begin with"
    )
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="transformers tokenizer, or org/name")
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a JSON line, or columns, to tokenize; each becomes a dataset, and document i is the same in all"
        " of them: an empty text becomes a document without tokens (default: text)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document that is not empty with the end-of-text token"
    )
    _add_sentences(parser)
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that tokenize, at one core each; the output does not depend on N (default: 1)",
    )
    _add_on_error(parser)
    parser.set_defaults(run=_preprocess)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=_INPUTS)


def _add_on_error(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="end at the first line, row or file that is no document, or report it, leave it out and count it"
        " (default: fail)",
    )


def _add_sentences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence of its document, as BERT's and T5's samples need it",
    )
    parser.add_argument(
        "--language", default="en", metavar="CODE", help="of the sentences: en, de, ja, ... (ISO 639; default: en)"
    )
    parser.add_argument(
        "--keep-newlines",
        action="store_true",
        help="leave the white space between two sentences at the end of the first; otherwise it is dropped",
    )


def _train_tokenizer(parsed: argparse.Namespace) -> int:
    from lightning_megatron.data.corpus.tokenizer import TokenizerTrainingOptions, train_tokenizer

    result = train_tokenizer(
        TokenizerTrainingOptions(
            input=parsed.input,
            vocab_size=parsed.vocab_size,
            output=parsed.output,
            kind=parsed.kind,
            json_key=parsed.json_key,
            on_error=parsed.on_error,
        )
    )
    print(f"{parsed.output}: {result.vocab_size:,} entries from {result.documents:,} documents, {result.bytes:,} bytes")
    if result.skipped:
        print(_skipped(result.skipped))
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
            split_sentences=parsed.split_sentences,
            language=parsed.language,
            keep_newlines=parsed.keep_newlines,
            workers=parsed.workers,
            on_error=parsed.on_error,
        )
    )
    names = ", ".join(result.prefixes)
    print(
        f"{names}: {result.documents:,} documents, {result.tokens:,} tokens from {result.bytes:,} bytes"
        f" at {result.bytes / 1e6 / result.seconds:.2f} MB/s"
    )
    if result.empty_documents:
        print(f"{result.empty_documents:,} texts without a token, which are documents without a sequence")
    if result.skipped:
        print(_skipped(result.skipped))
    return DONE


def _skipped(count: int) -> str:
    return f"{count:,} lines, rows or files were skipped, which are no documents"
