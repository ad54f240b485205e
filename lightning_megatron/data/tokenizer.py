"""Train a byte-level BPE tokenizer, load any transformers tokenizer, and encode texts in batches."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_megatron.data.documents import (
    PLAIN_TEXT_KEY,
    BadDocuments,
    cut_into_pieces,
    find_files,
    read_documents,
)
from lightning_megatron.errors import ConfigError, DataError, require_choice
from lightning_megatron.files import staged
from lightning_megatron.hub import local_folder

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a document; it is the tokenizer's beginning-of-sequence token too, as in GPT-2."""

NUM_SENTINELS = 100
"""Of a T5: as many as the released models have."""

LARGEST_VOCABULARY = 1 << 24
"""Far beyond any model's, of which the largest have some 2**20 entries."""

ModelKind: TypeAlias = Literal["gpt", "bert", "t5"]

ROLES: dict[ModelKind, dict[str, str]] = {
    "gpt": {"bos": END_OF_TEXT, "eos": END_OF_TEXT},
    "bert": {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "t5": {"pad": "<pad>", "eos": "</s>"},
}
"""Special tokens of each kind of model by their roles, named as its released tokenizers name them."""


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingOptions:
    """What ``train_tokenizer`` reads, learns and writes."""

    input: Sequence[str | Path]
    """Files, folders (searched recursively, without links to folders) and quoted patterns: .jsonl (one JSON object a
    line), .parquet, and text files of one document each; also .gz and .zst of JSON lines and text."""
    vocab_size: int
    """Tokens, the 256 bytes and the special tokens included."""
    output: str | Path
    """Folder to save the transformers tokenizer to."""
    kind: ModelKind = "gpt"
    """The model whose special tokens it gets: <|endoftext|>; [PAD] [CLS] [SEP] [MASK]; <pad> </s> and 100 sentinels
    <extra_id_N>."""
    json_key: str = PLAIN_TEXT_KEY
    """Key of a JSON line, or column, that holds the text."""
    on_error: Literal["skip", "fail"] = "fail"
    """End at the first line, row or file that is no document, or report it, leave it out and count it."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If ``vocab_size`` cannot hold all bytes or is beyond reason, or ``output`` is a file or cannot
                be made.
        """
        require_choice("kind", self.kind, ROLES)
        least = 256 + len(special_tokens(self.kind))
        if not least <= self.vocab_size <= LARGEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size} must be from {least}, which 256 bytes and the special tokens of"
                f" kind={self.kind!r} need, to {LARGEST_VOCABULARY}: memory is taken for all entries at once"
            )
        # Known before hours of training; what else may be wrong is met when it is saved.
        there = next(each for each in (Path(self.output), *Path(self.output).parents) if os.path.lexists(each))
        if not os.fspath(self.output) or not os.path.isdir(there) or not os.access(there, os.W_OK):
            raise ConfigError(_cannot_be_written(self.output, f"{there} is no folder that can be written"))


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingResult:
    """What ``train_tokenizer`` did."""

    vocab_size: int
    """Entries of the tokenizer; fewer than asked for if the text has no more pairs to merge."""
    documents: int
    """Documents read."""
    skipped: int
    """Lines, rows and files that are no documents."""
    bytes: int
    """Bytes of input, as stored."""


def special_tokens(kind: ModelKind) -> list[str]:
    """The special tokens of a kind of model, in the order of their ids, from 0."""
    sentinels = [f"<extra_id_{number}>" for number in range(NUM_SENTINELS)] if kind == "t5" else []
    return [*dict.fromkeys(ROLES[kind].values()), *sentinels]


def train_tokenizer(options: TokenizerTrainingOptions) -> TokenizerTrainingResult:
    """Train a byte-level BPE on the inputs and save it; every text can be encoded and decoded without loss.

    Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, on bytes as in GPT-2 (Radford et al. 2019, 2.2),
    with GPT-2's rule for cutting text into words.

    Raises:
        DataError: If an input is missing, unreadable or malformed, or there is no text in it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    files = find_files(options.input)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=special_tokens(options.kind),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    counts = Counter[str]()
    tokenizer.train_from_iterator(_texts_with_progress(files, options, counts), trainer=trainer)
    if not counts["characters"]:
        raise DataError(f"the {len(files)} input files hold no text; give files with text to train the tokenizer on")
    _save(tokenizer, options.kind, Path(options.output))
    return TokenizerTrainingResult(
        vocab_size=tokenizer.get_vocab_size(),
        documents=counts["documents"],
        skipped=counts["skipped"],
        bytes=sum(path.stat().st_size for path in files),
    )


def load_tokenizer(folder: str | Path) -> Any:
    """The transformers tokenizer saved in ``folder``, or of that name on the Hugging Face hub (``org/name``).

    Raises:
        DataError: If there is no tokenizer in ``folder``.
        ConfigError: If it is neither a folder nor a tokenizer of the hub that can be had.
    """
    folder = local_folder(folder, "tokenizer")
    if not os.path.isdir(folder):
        raise DataError(f"tokenizer folder {folder} does not exist; train one with train-tokenizer --output {folder}")
    from transformers import AutoTokenizer

    try:
        # Without a word on it, a tokenizer with code of its own has transformers ask on the terminal.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind: what is in the files decides which library meets it, and how
        raise DataError(
            f"{folder} holds no tokenizer that transformers can load ({_first_line(error)});"
            " it needs tokenizer.json and tokenizer_config.json, as train-tokenizer writes them"
        ) from error


def largest_id(tokenizer: Any) -> int:
    """The largest id that ``tokenizer`` can give; some leave gaps, so that it is not the number of entries."""
    ids: list[int] = list(tokenizer.get_vocab().values())
    return max(len(tokenizer) - 1, *ids)


def check_vocabulary(tokenizer: Any, source: object, vocab_size: int) -> None:
    """Raise if the tokenizer ``source`` gives ids that a model with ``vocab_size`` tokens does not have.

    Raises:
        ConfigError: With the largest id.
    """
    if (largest := largest_id(tokenizer)) >= vocab_size:
        raise ConfigError(
            f"tokenizer={source} gives ids up to {largest}, and the model has vocab_size={vocab_size}; give the "
            "tokenizer that it was trained with"
        )


def batch_encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Token ids of each text, whole and without special tokens; by the Rust library itself where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python, or around SentencePiece
        return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    # A saved tokenizer may carry the limits of its last use; a corpus is never cut.
    backend.no_truncation()
    backend.no_padding()
    # The one that skips the positions of tokens in the text, which cost as much as the ids.
    return lambda texts: [item.ids for item in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _texts_with_progress(
    files: Sequence[Path], options: TokenizerTrainingOptions, counts: Counter[str]
) -> Iterator[str]:
    from tqdm import tqdm

    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Reading text", mininterval=0.5) as bar:
        bad = BadDocuments(options.on_error, lambda line: bar.write(line, file=sys.stderr))
        for piece in cut_into_pieces(files, [options.json_key]):
            found = read_documents(piece, [options.json_key], options.on_error == "fail")
            bad.add(found)
            for (text,) in found.documents:
                counts["documents"] += 1
                counts["characters"] += len(text)
                yield text
            bar.update(piece.num_bytes)
        counts["skipped"] = bad.count


def _save(tokenizer: Any, kind: ModelKind, output: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    roles = {f"{role}_token": token for role, token in ROLES[kind].items()}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    try:
        # A reader must never meet half a tokenizer.json.
        with staged(output, "tokenizer.json", error=DataError) as hidden:
            wrapped.save_pretrained(hidden)
    except DataError:
        raise
    except Exception as error:  # a full disk is no OSError where the Rust library meets it
        raise DataError(_cannot_be_written(output, _first_line(error))) from error


def _cannot_be_written(output: str | Path, reason: str | None) -> str:
    return f"output={output} cannot be written ({reason}); give a folder that can be written and has room"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
