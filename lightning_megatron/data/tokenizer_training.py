"""Train a byte-level BPE tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_megatron.data.documents import (
    BadDocuments,
    check_encoding,
    cut_into_pieces,
    read_documents,
)
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.input_files import PLAIN_TEXT_KEY, find_files, input_progress
from lightning_megatron.data.tokenizer import first_line
from lightning_megatron.errors import DataError, require_choice, require_number
from lightning_megatron.storage.publish import staged

END_OF_TEXT = "<|endoftext|>"
"""Special token that ends a document; it is the beginning-of-sequence token too, as in GPT-2."""

NUM_SENTINELS = 100
"""Sentinels of a T5 tokenizer, as in the released models."""

ModelKind: TypeAlias = Literal["gpt", "bert", "t5"]

ROLES: dict[ModelKind, dict[str, str]] = {
    "gpt": {"bos": END_OF_TEXT, "eos": END_OF_TEXT},
    "bert": {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "t5": {"pad": "<pad>", "eos": "</s>"},
}
"""Special tokens of each kind of model by role, as in its released tokenizers."""

_LARGEST = 2**24
"""Largest vocabulary to train; the trainer allocates memory for it at once."""


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingOptions:
    """Settings of ``train_tokenizer``."""

    input: Sequence[str | Path]
    """Files, directories (searched recursively, without links to directories) and quoted patterns: .jsonl (one JSON
    object per line), .parquet, and text files of one document each; JSON lines and text also as .gz and .zst."""
    vocab_size: int
    """Size of the vocabulary, including the 256 bytes and the special tokens."""
    output: str | Path
    """Directory to save the transformers tokenizer to."""
    kind: ModelKind = "gpt"
    """Kind of model, which determines the special tokens: <|endoftext|>; [PAD] [CLS] [SEP] [MASK]; <pad> </s> and 100
    sentinels <extra_id_N>."""
    json_key: str = PLAIN_TEXT_KEY
    """Key of the JSON objects, or column, that holds the text."""
    on_error: Literal["skip", "fail"] = "fail"
    """End at the first line, row or file that is not a valid document, or report it, skip it and count it."""
    encoding: str = "utf-8"
    """Encoding of text files and JSON lines in Python's names: utf-8, latin-1, cp1252; utf-16 for text files only."""
    errors: Literal["strict", "replace"] = "strict"
    """What is done with bytes that are not of that encoding: ``strict`` treats the document as bad (see on_error), with
    the first such byte; ``replace`` makes them U+FFFD and counts them."""
    max_document_bytes: int | None = None
    """Refuse longer documents. By default a plain file may hold one of its own size; a compressed one or a table one of
    20 times its size, at least 1 MiB and at most 1 GiB, as a few kilobytes can decompress to gigabytes."""

    def __post_init__(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigError: If ``vocab_size`` cannot hold all bytes and special tokens.
        """
        require_choice("kind", self.kind, ROLES)
        TextEncoding(name=self.encoding, errors=self.errors)
        require_number(
            "vocab_size",
            self.vocab_size,
            at_least=256 + len(special_tokens(self.kind)),
            at_most=_LARGEST,
        )
        if self.max_document_bytes is not None:
            require_number("max_document_bytes", self.max_document_bytes, at_least=1)


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingResult:
    """Result of ``train_tokenizer``."""

    vocab_size: int
    """Size of the vocabulary; smaller than requested if the text has no more pairs to merge."""
    documents: int
    """Documents read."""
    skipped: int
    """Lines, rows and files skipped because they are not valid documents."""
    replaced: int
    """Characters that were not of the encoding, and became U+FFFD."""
    bytes: int
    """Bytes of input as stored on disk."""


def special_tokens(kind: ModelKind) -> list[str]:
    """Special tokens of a kind of model, in the order of their ids from 0."""
    tokens = list(dict.fromkeys(ROLES[kind].values()))
    if kind == "t5":
        tokens += [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)]
    return tokens


def train_tokenizer(options: TokenizerTrainingOptions) -> TokenizerTrainingResult:
    """Train a byte-level BPE on the inputs and save it; it encodes and decodes every text without loss.

    Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, on bytes as in GPT-2 (Radford et al. 2019, 2.2),
    with GPT-2's rule for cutting text into words.

    Raises:
        DataError: If an input is missing, unreadable or malformed, or there is no text in it; before hours of training,
            if ``output`` has a tokenizer or cannot be written.
    """
    # Imported here: only training needs the library.
    from tokenizers import ByteLevelBPETokenizer

    existing = Path(options.output, "tokenizer.json")
    if existing.exists():  # datasets may depend on it
        raise DataError(
            f"output={options.output} would overwrite {existing}; choose another or remove it"
        )
    files = find_files(options.input)
    check_encoding(files, TextEncoding(name=options.encoding, errors=options.errors))
    tokenizer = ByteLevelBPETokenizer()
    counts = Counter[str]()
    # No reader may ever find a half-written tokenizer.json.
    with staged(
        Path(options.output), "tokenizer.json", last=("tokenizer.json",), error=DataError
    ) as hidden:
        tokenizer.train_from_iterator(
            _texts_with_progress(files, options, counts),
            options.vocab_size,
            min_frequency=0,
            special_tokens=special_tokens(options.kind),
        )
        if not counts["characters"]:
            raise DataError(f"the {len(files)} input files hold no text; give files with text")
        _save(tokenizer, options.kind, hidden)
    return TokenizerTrainingResult(
        vocab_size=tokenizer.get_vocab_size(),
        documents=counts["documents"],
        skipped=counts["skipped"],
        replaced=counts["replaced"],
        bytes=sum(path.stat().st_size for path in files),
    )


def _texts_with_progress(
    files: Sequence[Path], options: TokenizerTrainingOptions, counts: Counter[str]
) -> Iterator[str]:
    decoder = Decoder(TextEncoding(name=options.encoding, errors=options.errors))
    with input_progress(files, "Reading text") as bar:
        bad = BadDocuments(options.on_error, bar)
        for piece in cut_into_pieces(
            files, [options.json_key], max_document_bytes=options.max_document_bytes
        ):
            documents, messages = read_documents(piece, [options.json_key], decoder)
            bad.add(messages)
            for (text,) in documents:
                counts["documents"] += 1
                counts["characters"] += len(text)
                yield text
            bar.update(piece.num_bytes)
        counts["skipped"] = bad.count
        counts["replaced"] = decoder.num_replaced


def _save(tokenizer: Any, kind: ModelKind, folder: Path) -> None:
    # transformers' import takes seconds.
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    roles = {f"{role}_token": token for role, token in ROLES[kind].items()}
    trained = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), **roles
    )
    try:
        trained.save_pretrained(folder)
    except Exception as error:  # on a full disk the Rust library does not raise OSError
        raise OSError(first_line(error)) from error
