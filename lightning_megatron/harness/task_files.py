"""Task YAMLs of a user as data: what they say, and what in them would run code or open an address.

A YAML can name Python functions (``!function``), classes and metrics that Hugging Face's evaluate would load as code.
Those of lm_eval itself are trusted; those of other files run only if the user says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.errors import ConfigError, type_of
from lightning_megatron.storage.yaml_limits import load_yaml

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class _Function:
    """A Python function that a YAML names."""

    name: str
    file: Path


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """A task YAML with what it includes."""

    path: Path
    config: Mapping[str, Any]
    functions: Sequence[_Function]
    """Functions that it and its includes name, whether or not one overrides another."""

    def check_trusted(self, shipped: Path, metrics: Sequence[str]) -> None:
        """Refuse code, unless it is lm_eval's own.

        Args:
            shipped: Directory of lm_eval's tasks.
            metrics: Names of lm_eval's own metrics.

        Raises:
            ConfigError: If the file names code.
        """
        fix = "read it, and give --trust-task-code if it may run"
        for function in self.functions:
            if shipped not in function.file.parents:
                raise ConfigError(f"{function.file} names code, !function {function.name}; {fix}")
        if shipped in self.path.parents:
            return
        for entry in self.config.get("metric_list") or ():
            metric = entry.get("metric") if isinstance(entry, Mapping) else entry
            is_foreign = isinstance(metric, str) and metric not in metrics
            if is_foreign or (isinstance(entry, Mapping) and entry.get("hf_evaluate")):
                raise ConfigError(
                    f"{self.path}: metric {metric} is none of lm_eval's, and would be loaded as code; {fix}"
                )


def is_task_path(name: str) -> bool:
    """Whether a task is given as a path rather than a name."""
    return Path(name).suffix in _SUFFIXES


def read_task_file(path: Path) -> TaskFile:
    """Read a task YAML and what it includes, without importing anything.

    Raises:
        ConfigError: If a file cannot be read, is no YAML of a mapping, or includes itself.
    """
    functions: list[_Function] = []
    config = _read(path.expanduser().resolve(), functions, ())
    return TaskFile(path=path.expanduser().resolve(), config=config, functions=functions)


def _read(path: Path, functions: list[_Function], above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        raise ConfigError(
            f"{above[0]} includes {path}, which includes it again; remove one include"
        )

    class Loader(yaml.SafeLoader):
        """Constructs functions as their names."""

    def construct(loader: yaml.SafeLoader, node: Any) -> _Function:
        function = _Function(name=str(loader.construct_scalar(node)), file=path)
        functions.append(function)
        return function

    Loader.add_constructor("!function", construct)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"task {path}: expected a YAML file, got none; correct its path")
        text = path.read_text(encoding="utf-8")
        load = partial(yaml.load, Loader=Loader)
        config = load_yaml(text, f"task {path}", load)
    except OSError as error:
        raise ConfigError(
            f"task {path} cannot be read: {error.strerror}; give a YAML file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"task {path} cannot be read as YAML: {reason}; correct it") from None
    if not isinstance(config, dict):
        raise ConfigError(f"task {path}: expected a mapping, got {type_of(config)}; correct it")
    includes = config.pop("include", [])
    merged: dict[str, Any] = {}
    for include in [includes] if isinstance(includes, str) else includes:
        merged |= _read((path.parent / str(include)).resolve(), functions, (*above, path))
    return merged | config


def check_addresses(name: str, value: Any) -> None:
    """Refuse addresses in the fields of a task that say where its dataset is.

    Args:
        name: Task and field, for messages.
        value: The field.

    Raises:
        ConfigError: If there is one.
    """
    for text in _texts(value, set()):
        if "://" in text:
            raise ConfigError(
                f"{name}: expected data on this disk, got {text}; download it, and give its path"
            )


def _texts(value: Any, seen: set[int]) -> Iterator[str]:
    """Texts in a value; each collection once, as aliases of YAML may repeat it without end."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, Sequence)) and id(value) not in seen:
        seen.add(id(value))
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item, seen)
