"""The settings of a run that ``config`` writes: ``run_settings.yaml`` with other values."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError

Settings = dict[str, Any]
"""Values by their places, as options on the command line are named: ``trainer.strategy.tp``."""

_LINE = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: (?P<default>.+?))?(?: #(?P<optional>\??) (?P<meaning>.*))?")
_YES_OR_NO = {"yes": True, "no": False, "true": True, "false": False, "y": True, "n": False, "1": True, "0": False}
_CHOICES: dict[str, dict[str, Any]] = {
    "bool": _YES_OR_NO,
    "recompute": {"selective": "selective", "full": "full", "no": None}
    | {"yes": "selective", "true": "selective", "false": None, "none": None},
    "precision": {"bf16": "bf16-mixed", "fp16": "16-mixed", "no": "32-true"}
    | {name: name for name in ("bf16-mixed", "16-mixed", "32-true")}
    | {"true": "16-mixed", "false": "32-true"},
    "accelerator": {"gpu": "gpu", "cpu": "cpu", "true": "cpu", "false": "gpu"},
    "positions": {"true": "rotary", "false": None},
}


@functools.cache
def _lines() -> tuple[tuple[str, str, re.Match[str] | None], ...]:
    """Each line of the file with its place and parts; empty and None where there is no setting."""
    lines: list[tuple[str, str, re.Match[str] | None]] = []
    above: list[tuple[int, str]] = []
    for text in Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8").splitlines()[1:]:
        match = _LINE.fullmatch(text)
        if match is not None:
            depth = len(match["indent"])
            above = [*(each for each in above if each[0] < depth), (depth, match["name"])]
        is_setting = match is not None and match["default"] is not None
        place = ".".join(name for _, name in above if name != "init_args")
        lines.append((place if is_setting else "", text, match if is_setting else None))
    return tuple(lines)


def setting(place: str) -> tuple[str, str]:
    """How a setting is ``read``, and what it is for."""
    match = next(match for each, _, match in _lines() if each == place)
    assert match is not None
    kind = match["name"] if match["name"] in _CHOICES else type(yaml.safe_load(match["default"])).__name__
    return kind, str(match["meaning"])


def read(kind: str, value: Any) -> Any:
    """A value as it is meant, whether it was typed or stands in a file as a number, a word or a string.

    Raises:
        ConfigError: If it is none of this kind: what was expected, and what was given.
    """
    text = str(value).strip()
    choices = _CHOICES.get(kind)
    if choices is not None and text.lower() in choices:
        return choices[text.lower()]
    if choices is not None:
        shown = {meant: word for word, meant in reversed(choices.items())}
        raise ConfigError(f"expected {' or '.join(reversed(shown.values()))}, got {text!r}")
    if kind in ("text", "str", "dict"):
        return text
    least = 1 if kind == "int" else 0
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        number = -1
    if not number >= least:  # NaN is neither
        raise ConfigError(f"expected {'an integer' if kind == 'int' else 'a number'} of at least {least}, got {text!r}")
    return number


def layout(settings: Mapping[str, Any]) -> ParallelConfig:
    """How the model is split, as far as ``settings`` say; checked against the number of processes.

    Raises:
        ConfigError: If the sizes do not fit together.
    """
    given = {
        field.name: settings.get(f"trainer.strategy.{field.name}", field.default) for field in fields(ParallelConfig)
    }
    parallel = ParallelConfig(**given)
    devices = settings.get("trainer.devices")
    if isinstance(devices, int):
        parallel.data_parallel_size(devices * settings["trainer.num_nodes"])
    return parallel


def as_yaml(settings: Mapping[str, Any]) -> str:
    """The YAML for ``fit``, each line with its meaning."""
    lines = []
    for place, text, match in _lines():
        if match is None or (place not in settings and not match["optional"]):
            lines.append(text)
        elif place in settings:
            shown = yaml.safe_dump([settings[place]], default_flow_style=True, width=10**6, allow_unicode=True)
            comment = match["meaning"] and f" # {match['meaning']}"
            lines.append(f"{match['indent']}{match['name']}: {shown.strip()[1:-1]}{comment or ''}")
    return "\n".join(lines) + "\n"
