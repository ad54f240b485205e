"""Load any transformers tokenizer, and encode texts in batches."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_megatron.data.tokenizer_files import (
    check_growth,
    panics_as_errors,
    without_printed_panics,
)
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.rank_zero import rank_zero_warn
from lightning_megatron.storage.hub import local_folder


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
    # transformers' import takes seconds.
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
    # Of any type, depending on the files and the library that reads them.
    except Exception as error:
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({first_line(error)})"
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
            nodes = []
            if file.is_file():
                nodes.append(json.loads(file.read_bytes()))
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
    largest = largest_id(tokenizer)
    if largest >= vocab_size:
        raise ConfigError(
            f"tokenizer={source} gives ids up to {largest}, the model's vocab_size is {vocab_size}"
        )


def warn_of_missing_beginning(tokenizer: Any) -> None:
    """Say that documents get no beginning-of-sequence token, if the tokenizer puts one before texts by default.

    transformers' own examples train with it.
    """
    beginning = tokenizer.bos_token_id
    if beginning is not None and tokenizer.encode("a")[:1] == [beginning]:
        rank_zero_warn(
            f"{tokenizer.name_or_path} puts {tokenizer.bos_token} before texts, and documents get none; write it into "
            "the texts if the model is to see it"
        )


def batch_encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Function from texts to token ids, without truncation or special tokens; calls the Rust library if there is one.

    It raises ``DataError`` if the library cannot encode a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # implemented in Python or on SentencePiece

        def encode_in_python(texts: list[str]) -> list[list[int]]:
            if not texts:
                return []
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
            return encoded["input_ids"]  # type: ignore[no-any-return]

        return encode_in_python
    source = tokenizer.name_or_path
    # A saved tokenizer may truncate and pad as in its last use; a corpus is never truncated.
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        try:
            # The fast variant skips the offsets of tokens in the text, which cost as much as the ids.
            with panics_as_errors(source):
                encoded = backend.encode_batch_fast(texts, add_special_tokens=False)
                return [item.ids for item in encoded]
        except DataError:
            raise
        except Exception as error:  # the library's only type, e.g. for a word that a vocabulary without [UNK] lacks
            raise DataError(
                f"{source} cannot encode a text ({error}); use another tokenizer"
            ) from error

    return encode


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of what a tokenizer makes of texts: vocabulary, end of sequence, merges or scores, and tokens of some texts.

    Not of its files: other versions of the libraries write the same tokenizer in another way.
    """
    entries = sorted(tokenizer.get_vocab().items())
    pieces = [piece for piece, _ in entries]
    facts = (entries, tokenizer.eos_token_id, _merges_or_scores(tokenizer))
    digest = hashlib.sha256(repr(facts).encode("utf-8", "replace"))
    encode = batch_encoder(tokenizer)
    # The rules before and after the vocabulary: normalizers, white space, bytes.
    for text in (_PROBE, *pieces[:: len(pieces) // _MAX_PIECES + 1]):
        tokens: list[list[int]] | None = None
        with contextlib.suppress(DataError):  # a vocabulary need not have these words
            tokens = encode([text])
        digest.update(repr(tokens).encode())
    return digest.hexdigest()[:16]


_MAX_PIECES = 1000
"""How many entries of a vocabulary are encoded as texts."""


def _merges_or_scores(tokenizer: Any) -> list[Any]:
    """Merges of BPE, in order, or entries of Unigram with their scores; empty for others and without a Rust backend."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    model = json.loads(backend.to_str())["model"]
    if isinstance(model.get("vocab"), list):
        return list(model["vocab"])
    # Older versions write a merge as one text.
    merges = model.get("merges") or []
    return [each if isinstance(each, str) else " ".join(each) for each in merges]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].rstrip(".")
