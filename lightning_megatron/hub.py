"""Find models and tokenizers of the Hugging Face hub in its cache, download what is missing, and upload a model.

A name is ``org/name`` or ``org/name@revision``. A path that exists wins over it. What is in the cache is taken without
a request, so that all ranks see the same files; the first process of a host to miss some downloads them under a lock of
huggingface_hub in the cache, and the others then find them: there need not be a process group.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from lightning_megatron.errors import ConfigError
from lightning_megatron.files import download

Needed = Literal["config", "tokenizer", "model"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)
"""Globs of what transformers' tokenizers save. Never their code: a copy would be trusted like what it was made of."""

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")
_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/+")
"""``Path`` makes one slash of two."""
_OF_FILES = (".ckpt", ".json", ".yaml", ".yml", ".pt", ".zip", ".bin", ".safetensors")
"""What the name of a model does not end with, and a path does."""
_SHARD = re.compile(r'"((?:model|pytorch_model)-[\w-]+\.(?:safetensors|bin))"')
"""A file in an index; whoever reads a damaged one says so."""
_CONFIGS = ("config.json", "generation_config.json")
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""The file with all weights, or the index of several; the second ones are taken where a model has none of the first."""
_SAFETENSORS, _PICKLES = ((single.replace(".", "*."), index) for single, index in WEIGHT_FILES)
_TOKENIZER_PATTERNS = (*TOKENIZER_FILES, "additional_chat_templates/*", "config.json")
_PATTERNS: dict[Needed, tuple[str, ...]] = {
    "config": _CONFIGS,
    "tokenizer": _TOKENIZER_PATTERNS,
    "model": (*_CONFIGS, *_TOKENIZER_PATTERNS, *_SAFETENSORS),
}


def local_folder(name: str | Path, needed: Needed) -> Path:
    """The path ``name``, or the folder in the cache with what is needed of the model of that name on the hub.

    Of an address (``s3://bucket/model``), a copy that lasts as long as the program.

    Raises:
        ConfigError: If it is neither a path nor in the cache and cannot be downloaded; it says which file is missing.
    """
    if (address := _ADDRESS.match(str(name))) is not None:
        return download(f"{address[1]}://{str(name)[address.end() :]}")
    path = Path(os.path.expanduser(name))
    named = _NAME.fullmatch(str(name))
    if named is None or path.suffix in _OF_FILES or path.exists():
        return path
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    repo, revision = named.groups()
    folder = _cached(repo, revision, needed)
    missing, reason = _missing(folder, needed), "HF_HUB_OFFLINE is set"
    if missing is not None and not constants.HF_HUB_OFFLINE:
        locks = Path(constants.HF_HUB_CACHE, ".locks", f"models--{repo.replace('/', '--')}")
        try:
            locks.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(locks / "lightning_megatron.lock"):
                folder = _cached(repo, revision, needed)
                if _missing(folder, needed) is not None:
                    folder = _downloaded(repo, revision, needed)
            missing, reason = _missing(folder, needed), "nor did the hub give it"
        except Exception as error:  # of any kind: huggingface_hub's own, or its HTTP client's
            reason = first_line(error)
    if missing is not None or folder is None:
        at = f" --revision {revision}" if revision else ""
        raise ConfigError(
            f"{name}: expected a path that exists or a model of the Hugging Face hub, got neither: its {missing} is "
            f"not in the cache {constants.HF_HUB_CACHE} ({reason}); correct the path, give a folder, or run "
            f"`hf download {repo}{at}` where there is a connection"
        )
    return folder


def _cached(repo: str, revision: str | None, needed: Needed) -> Path | None:
    from huggingface_hub import constants, snapshot_download

    try:
        patterns = list(_PATTERNS[needed])
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True))
    except (OSError, ValueError) as error:  # nothing of it, or not all; or no name that the hub allows
        # All of it is better, but some optional file may never have been fetched.
        return Path(error.snapshot_path) if constants.HF_HUB_OFFLINE and hasattr(error, "snapshot_path") else None


def _downloaded(repo: str, revision: str | None, needed: Needed) -> Path:
    """Shows its progress; only one process of a host is here at a time."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(_PATTERNS[needed])))
    if needed == "model" and _missing(folder, needed) == "model.safetensors":
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=list(_PICKLES)))
    return folder


def _missing(folder: Path | None, needed: Needed) -> str | None:
    """The first file that ``folder`` lacks; None if it has all."""
    names = set() if folder is None else {each.name for each in folder.iterdir() if each.is_file()}
    if needed == "tokenizer":
        vocabularies = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
        return None if any(fnmatchcase(name, glob) for name in names for glob in vocabularies) else "tokenizer.json"
    if folder is None or "config.json" not in names or needed == "config":
        return None if "config.json" in names else "config.json"
    for single, index in WEIGHT_FILES:
        if single in names:
            return None
        if index in names:
            shards = set(_SHARD.findall((folder / index).read_text(encoding="utf-8")))
            return min(shards - names, default=None)
    return "model.safetensors"


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
