"""Find models and tokenizers of the Hugging Face hub in its local cache, and download missing files.

A name is ``org/name`` or ``org/name@revision``; an existing path takes precedence. Cached files are used without a
request, so that all ranks see the same ones. Missing files are downloaded by the first process of a host that needs
them, under a file lock in the cache, and are then found by the others: no process group is needed.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from lightning_megatron.errors import ConfigError
from lightning_megatron.storage.stores import download

Needed = Literal["config", "tokenizer", "model"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""Globs of the files that transformers' tokenizers save; never their code, as copies of it would be trusted."""

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@((?!\S*\.\.)\w\S*))?")
"""``org/name@revision``; a revision with ``..`` would lead out of the cache."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+]+):/+(.*)", re.DOTALL)
"""Address of an object store; ``Path`` collapses its two slashes."""
_ANY_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/|.*(://|::)", re.IGNORECASE | re.DOTALL)
"""Everything that some library would open as an address, also chained ones (``simplecache::s3://``)."""
_FILE_SUFFIXES = (".ckpt", ".json", ".yaml", ".yml", ".pt", ".zip", ".bin", ".safetensors")
"""Suffixes that tell the path of a file from the name of a model."""
_SHARD = re.compile(r'"((?:model|pytorch_model)-[\w-]+\.(?:safetensors|bin))"')
"""Name of a shard in an index of weights; a damaged index is reported when it is loaded."""
_CONFIGS = ("config.json", "generation_config.json")
WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""File of all weights, and index of sharded ones; pickles are used only for a model without safetensors."""
_SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
_TOKENIZER_PATTERNS = (*TOKENIZER_FILES, "additional_chat_templates/*", "config.json")
_PATTERNS: dict[Needed, tuple[str, ...]] = {
    "config": _CONFIGS,
    "tokenizer": _TOKENIZER_PATTERNS,
    "model": (*_CONFIGS, *_TOKENIZER_PATTERNS, *_SAFETENSORS),
}


def local_folder(name: str | Path, needed: Needed) -> Path:
    """Resolve a path or the name of a hub model to a local path, downloading missing files to the hub's cache.

    A directory on an object store (``s3://bucket/model``) is downloaded to a temporary copy.

    Raises:
        ConfigError: If it is not a path, and a needed file is neither cached nor downloadable; names the file.
    """
    address = _ADDRESS.fullmatch(str(name))
    if address is not None:
        protocol, rest = address.groups()
        return Path(f"/{rest}") if protocol == "file" else download(f"{protocol}://{rest}")
    match = _hub_name(name)
    if match is None:
        return Path(os.path.expanduser(name))
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # costs a second

    repo, revision = match.groups()
    folder = _find_cached(repo, revision, needed)
    missing = _missing_file(folder, needed)
    reason = "HF_HUB_OFFLINE is set"
    if missing is not None and not constants.HF_HUB_OFFLINE:
        locks = Path(constants.HF_HUB_CACHE, ".locks", f"models--{repo.replace('/', '--')}")
        try:
            locks.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(locks / "lightning_megatron.lock"):
                folder = _find_cached(repo, revision, needed)
                if _missing_file(folder, needed) is not None:
                    folder = _download(repo, revision, needed)
            missing = _missing_file(folder, needed)
            reason = "and the hub does not have it"
        except Exception as error:  # any type: of huggingface_hub, or of its HTTP client
            reason = first_line(error)
    if missing is not None or folder is None:
        raise ConfigError(
            f"{name}: expected a path that exists or a model of the Hugging Face hub, got neither: its {missing} is "
            f"not in the cache {constants.HF_HUB_CACHE} ({reason}); correct the path, give a folder, or run "
            f"`{_download_command(repo, revision)}` where there is a connection"
        )
    return folder


def named_folder(name: str, needed: Needed, option: str) -> Path:
    """Resolve what a file names, without any request: a path, or the name of a hub model that is in the cache.

    Args:
        name: The name in the file; relative paths are relative to the working directory.
        needed: The files that are needed.
        option: Option by which the user can give a name, which may be an address or be downloaded, for messages.

    Raises:
        ConfigError: If it is an address, or a hub model that is not in the cache.
    """
    if _ANY_ADDRESS.match(name):
        raise ConfigError(
            f"{name}: expected a path or a model in the hub's cache, as a file names it, got an address, which only "
            f"you may give: {option}={name}"
        )
    match = _hub_name(name)
    if match is None:
        return Path(os.path.expanduser(name))
    repo, revision = match.groups()
    folder = _find_cached(repo, revision, needed)
    missing = _missing_file(folder, needed)
    if missing is not None or folder is None:
        raise ConfigError(
            f"{name}: expected a path that exists or a model in the hub's cache, got neither: its {missing} is not in "
            f"{constants.HF_HUB_CACHE}, and what a file names is not downloaded; run "
            f"`{_download_command(repo, revision)}`, or give {option}={name}"
        )
    return folder


def _hub_name(name: str | Path) -> re.Match[str] | None:
    """Match of the name of a hub model; None if it is a path."""
    path = Path(os.path.expanduser(name))
    if path.suffix in _FILE_SUFFIXES or path.exists():
        return None
    return _NAME.fullmatch(str(name))


def _download_command(repo: str, revision: str | None) -> str:
    command = f"hf download {repo}"
    if revision:
        command += f" --revision {revision}"
    return command


def _find_cached(
    repo: str,
    revision: str | None,
    needed: Needed,
) -> Path | None:
    from huggingface_hub import snapshot_download  # its HTTP client costs a second

    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_PATTERNS[needed]),
            local_files_only=True,
        )
    except (OSError, ValueError) as error:  # not or only partly cached, or an invalid name
        if not constants.HF_HUB_OFFLINE or not hasattr(error, "snapshot_path"):
            return None
        folder = error.snapshot_path  # a partial snapshot may do: it may lack optional files only
    return Path(folder)


def _download(repo: str, revision: str | None, needed: Needed) -> Path:
    """Download a snapshot, with progress bars; called under the lock."""
    from huggingface_hub import snapshot_download  # its HTTP client costs a second

    patterns = list(_PATTERNS[needed])
    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    if needed == "model" and _missing_file(folder, needed) == "model.safetensors":
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=_PICKLES))
    return folder


def _missing_file(folder: Path | None, needed: Needed) -> str | None:
    """Name of a needed file that is missing in ``folder``; None if it is complete."""
    expected = "tokenizer.json" if needed == "tokenizer" else "config.json"
    if folder is None:
        return expected
    names = {file.name for file in folder.iterdir() if file.is_file()}
    if needed == "tokenizer":
        globs = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
        is_there = any(fnmatchcase(name, glob) for name in names for glob in globs)
    else:
        is_there = expected in names
    if not is_there:
        return expected
    if needed != "model":
        return None
    for single, index in WEIGHT_FILES:
        if single in names:
            return None
        if index in names:
            text = (folder / index).read_text(encoding="utf-8")
            shards = set(_SHARD.findall(text))
            return min(shards - names, default=None)
    return "model.safetensors"


def first_line(error: BaseException) -> str:
    """First line of an exception's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
