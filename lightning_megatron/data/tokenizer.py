"""Train a byte-level BPE tokenizer, load any transformers tokenizer, encode texts in batches, and recognize words.

Tokenizers mark words in one of three ways, recognized from the vocabulary: WordPiece marks the pieces that continue a
word (``##``); SentencePiece (Unigram, BPE) and byte-level BPE mark those that begin one (U+2581, and the letters that
represent the bytes of white space). In scripts without spaces each piece is a word, as it is for WordPiece. If no piece
has a mark, each is a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.documents import (
    PLAIN_TEXT_KEY,
    BadDocuments,
    check_encoding,
    cut_into_pieces,
    find_files,
    progress_bar,
    read_documents,
)
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.tokenizer_files import (
    check_growth,
    panics_as_errors,
    without_printed_panics,
)
from lightning_megatron.errors import ConfigError, DataError, require_choice, require_number
from lightning_megatron.storage.hub import local_folder
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
    sentinels = [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)] if kind == "t5" else []
    return [*dict.fromkeys(ROLES[kind].values()), *sentinels]


def train_tokenizer(options: TokenizerTrainingOptions) -> TokenizerTrainingResult:
    """Train a byte-level BPE on the inputs and save it; it encodes and decodes every text without loss.

    Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, on bytes as in GPT-2 (Radford et al. 2019, 2.2),
    with GPT-2's rule for cutting text into words.

    Raises:
        DataError: If an input is missing, unreadable or malformed, or there is no text in it; before hours of training,
            if ``output`` has a tokenizer or cannot be written.
    """
    from tokenizers import ByteLevelBPETokenizer

    if (existing := Path(options.output, "tokenizer.json")).exists():  # datasets may depend on it
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
        texts, special = _texts_with_progress(files, options, counts), special_tokens(options.kind)
        tokenizer.train_from_iterator(
            texts, options.vocab_size, min_frequency=0, special_tokens=special
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


def load_tokenizer(folder: str | Path) -> Any:
    """Load the transformers tokenizer in a directory, or of a name on the Hugging Face hub (``org/name``).

    Raises:
        DataError: If the directory does not exist, or has no tokenizer that transformers can load.
        ConfigError: If ``folder`` is the name of a tokenizer that is not available from the hub.
    """
    folder = local_folder(folder, "tokenizer")
    if os.path.isfile(folder):
        raise DataError(
            f"tokenizer: expected a directory, got the file {folder}; give the directory that contains it"
        )
    if not os.path.isdir(folder):
        raise DataError(
            f"tokenizer directory {folder} is missing; train one with train-tokenizer --output {folder}"
        )
    from transformers import AutoTokenizer

    check_growth(Path(folder))
    _check_counts(Path(folder))
    try:
        with panics_as_errors(folder), without_printed_panics():
            # Without trust_remote_code=False, transformers asks on the terminal whether to run a tokenizer's own code.
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            tokenizer.encode("")  # some settings are first read here
            with contextlib.suppress(Exception):  # a vocabulary need not have these words
                tokenizer.decode(tokenizer.encode(_PROBE))
        return tokenizer
    except DataError:
        raise
    except (
        Exception
    ) as error:  # of any type, depending on the files and the library that reads them
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({_first_line(error)})"
        ) from error


_PROBE = "A word, 2 w\u00f6rds\n \u4e16 \U0001f642"
"""Text that uses all parts of a tokenizer: a panic is found before hours of work."""


def largest_id(tokenizer: Any) -> int:
    """Largest token id of ``tokenizer``; ids may have gaps, so it is not the size of the vocabulary.

    Raises:
        DataError: If the gaps are so large that a table of all ids would be a waste of memory.
    """
    ids: list[int] = list(tokenizer.get_vocab().values())
    largest = max(len(tokenizer) - 1, *ids)
    if largest > _MAX_GAPS * len(ids) + _MIN_LARGEST_ID:
        raise DataError(
            f"{tokenizer.name_or_path} gives ids up to {largest} to {len(ids)} entries: tables of that size would be "
            "built; correct tokenizer.json"
        )
    return largest


_MIN_LARGEST_ID = 1 << 24
_MAX_GAPS = 16
"""Ids beyond 16 per entry and 16 million are refused."""
_MAX_COUNTS = {"num_labels": 500_000}
_MAX_COUNT = 100_000
_COUNTS = re.compile("layer|label|extra_ids|madeup|offset|(^|_)num_")
"""Settings for which transformers builds lists, of at most ``_MAX_COUNT`` items or the number in ``_MAX_COUNTS``."""


def _check_counts(folder: Path) -> None:
    """Check the counts in the settings of a tokenizer and its model, for each of which transformers builds a list.

    Raises:
        DataError: If one is larger than in any tokenizer.
    """
    for file in (folder / "tokenizer_config.json", folder / "config.json"):
        try:
            nodes = [json.loads(file.read_bytes())] if file.is_file() else []
        except (OSError, ValueError, RecursionError):
            continue  # reported when transformers reads it
        while nodes:
            node = nodes.pop()
            if not isinstance(node, dict):
                continue
            nodes += node.values()
            for name, value in node.items():
                largest = _MAX_COUNTS.get(name, _MAX_COUNT)
                if isinstance(value, int) and value > largest and _COUNTS.search(name):
                    raise DataError(f"{file}: {name}={value} is more than {largest}; correct it")


def check_vocabulary(tokenizer: Any, source: object, vocab_size: int) -> None:
    """Check that the tokenizer ``source`` gives no ids beyond the ``vocab_size`` of a model.

    Raises:
        ConfigError: If it does, with the largest id.
    """
    if (largest := largest_id(tokenizer)) >= vocab_size:
        raise ConfigError(
            f"tokenizer={source} gives ids up to {largest}, the model's vocab_size is {vocab_size}"
        )


def batch_encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Function from texts to token ids, without truncation or special tokens; calls the Rust library if there is one.

    It raises ``DataError`` if the library cannot encode a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # implemented in Python or on SentencePiece
        return lambda texts: (
            tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        )
    source = tokenizer.name_or_path
    # A saved tokenizer may truncate and pad as in its last use; a corpus is never truncated.
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            # The fast variant skips the offsets of tokens in the text, which cost as much as the ids.
            with panics_as_errors(source):
                return [
                    item.ids for item in backend.encode_batch_fast(texts, add_special_tokens=False)
                ]
        except DataError:
            raise
        except Exception as error:  # the library's only type, e.g. for a word that a vocabulary without [UNK] lacks
            raise DataError(
                f"{source} cannot encode a text ({error}); use another tokenizer"
            ) from error

    return encode


def _texts_with_progress(
    files: Sequence[Path], options: TokenizerTrainingOptions, counts: Counter[str]
) -> Iterator[str]:
    decoder = Decoder(TextEncoding(name=options.encoding, errors=options.errors))
    with progress_bar(files, "Reading text") as bar:
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
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    roles = {f"{role}_token": token for role, token in ROLES[kind].items()}
    trained = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), **roles
    )
    try:
        trained.save_pretrained(folder)
    except Exception as error:  # on a full disk the Rust library does not raise OSError
        raise OSError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# ---- special tokens and words ---------------------------------------------------------------------------------------

_CONTINUES = "##"
_SENTENCE_PIECE = "\u2581"
_BYTE_LEVEL = "\u0120"
_WHITE_SPACE_BYTES = tuple(chr(0x100 + byte) for byte in b" \n\r\t\v\f")
_SENTINEL = re.compile(rf"({_SENTENCE_PIECE}?)<extra_id_(\d+)>")
_KNOWN_ROLES = ("cls", "sep", "mask", "pad", "bos", "eos")

_WITHOUT_SPACES = (
    "CJK",
    "HIRAGANA",
    "KATAKANA",
    "BOPOMOFO",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
    "TIBETAN",
)
"""First words of the Unicode names of letters in scripts that put no spaces between words."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizerFacts:
    """Facts about a tokenizer that masking needs."""

    source: str
    """Directory of the tokenizer, for messages."""
    special: Mapping[str, int]
    """Ids of ``cls``, ``sep``, ``mask``, ``pad``, ``bos`` and ``eos``, as far as they exist."""
    sentinels: tuple[int, ...] = ()
    """Ids of ``<extra_id_0>``, ``<extra_id_1>``, ..., which stand for masked spans."""
    begins_word: NDArray[np.bool_] = field(repr=False)
    """Whether each id begins a word: [largest id + 1]; special tokens do."""
    ids: NDArray[np.int64] = field(repr=False)
    """All ids in ascending order, any of which may replace a masked token."""

    @classmethod
    def of(cls, tokenizer: Any, source: str) -> TokenizerFacts:
        """Facts of a transformers tokenizer.

        Args:
            tokenizer: A transformers tokenizer, with or without a Rust backend.
            source: Its directory, for messages.
        """
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        largest_id(tokenizer)  # checks it
        ids = np.unique(np.fromiter(vocabulary.values(), np.int64, len(vocabulary)))
        begins = np.ones(int(ids[-1]) + 1, dtype=np.bool_)
        pieces = list(vocabulary)
        begins[[vocabulary[piece] for piece in pieces]] = _begins_word(pieces)
        begins[[*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids]] = True
        sentinels = _sentinels(vocabulary)
        begins[list(sentinels)] = True
        roles = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _KNOWN_ROLES}
        special = {role: token for role, token in roles.items() if token is not None}
        return cls(source=source, special=special, sentinels=sentinels, begins_word=begins, ids=ids)

    @property
    def size(self) -> int:
        """Largest id plus one."""
        return len(self.begins_word)

    @property
    def padding_token(self) -> int:
        """Id that pads rows and is not attended to; 0 if the tokenizer has no padding token."""
        return self.special.get("pad", 0)

    @cached_property
    def maskable(self) -> NDArray[np.bool_]:
        """Whether each id may be masked: [largest id + 1]; the unknown token may, other special tokens may not."""
        maskable = np.ones(self.size, dtype=np.bool_)
        maskable[[*self.special.values(), *self.sentinels]] = False
        return maskable

    def require(self, roles: Sequence[str], user: str) -> tuple[int, ...]:
        """Ids of the special tokens ``roles``.

        Args:
            roles: Keys of ``special``.
            user: What needs them, for the message.

        Raises:
            ConfigError: If the tokenizer lacks one of them.
        """
        missing = [f"{role}_token" for role in roles if role not in self.special]
        if missing:
            raise ConfigError(
                f"the tokenizer {self.source} has no {', no '.join(missing)}, which {user} needs"
            )
        return tuple(self.special[role] for role in roles)


def _begins_word(pieces: Sequence[str]) -> list[bool]:
    counts = {
        mark: sum(piece.startswith(mark) for piece in pieces)
        for mark in (_CONTINUES, _SENTENCE_PIECE, _BYTE_LEVEL)
    }
    # The marks of other tokenizers occur in most large vocabularies, but not at the beginning of many pieces.
    mark = max(counts, key=lambda mark: counts[mark])
    if counts[mark] == 0:
        return [True] * len(pieces)
    if mark == _CONTINUES:
        return [not piece.startswith(_CONTINUES) for piece in pieces]
    if mark == _SENTENCE_PIECE:
        return [piece.startswith(_SENTENCE_PIECE) or _has_no_spaces(piece) for piece in pieces]
    # The bytes E3 to E9 begin kana and ideographs in UTF-8; byte-level BPE represents them by letters of that code.
    return [
        piece.startswith(_WHITE_SPACE_BYTES) or "\u00e3" <= piece[:1] <= "\u00e9"
        for piece in pieces
    ]


def _has_no_spaces(piece: str) -> bool:
    """Whether the first letter belongs to a script without spaces."""
    return piece > "\u0e00" and unicodedata.name(piece[0], "").startswith(_WITHOUT_SPACES)


def _sentinels(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of sentinels in the order of their numbers, which is that of descending ids for T5, of ascending for others.

    The vocabulary of mT5 spells them with SentencePiece's mark. If both spellings exist, the one with the smaller ids
    was there when the model was trained.
    """
    spellings: dict[str, dict[int, int]] = {}
    for piece, token in vocabulary.items():
        if match := _SENTINEL.fullmatch(piece):
            spellings.setdefault(match[1], {})[int(match[2])] = token
    if not spellings:
        return ()
    numbered = min(spellings.values(), key=lambda spelling: min(spelling.values()))
    return tuple(numbered[number] for number in sorted(numbered))
