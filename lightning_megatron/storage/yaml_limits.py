"""Limits on YAML before anything is built from it: aliases make a small text large, and a long number takes hours."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from lightning_megatron.errors import ConfigError

_MAX_VALUES = 100_000
_MAX_DEPTH = 100
_LONG_NUMBER = re.compile(r"[-+\s\d_:.]{1001,}")
"""YAML 1.1 has numbers to base 60, 1:30:00, whose digits PyYAML adds up in quadratic time."""


def load_yaml(
    text: str,
    name: str,
    load: Callable[[str], Any],
) -> Any:
    """Build what YAML holds, within limits.

    Args:
        text: The YAML.
        name: What it is, for messages.
        load: Builds it.

    Raises:
        ConfigError: If it is beyond the limits, or a value does not have its type: a date that does not exist, or
            ``!!bool maybe``, for which PyYAML raises errors of many kinds.
        yaml.YAMLError: If it is no YAML.
    """
    check_yaml_size(text, name)
    try:
        return load(text)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: expected values of the types that their tags or forms say, got {error!r}; correct it"
        ) from error


def check_yaml_size(text: str, name: str) -> None:
    """Check the size that YAML has with its aliases written out, its depth, and the length of its numbers.

    Args:
        text: The YAML.
        name: What it is, for messages.

    Raises:
        ConfigError: If one is beyond what a configuration needs.
        yaml.YAMLError: If it is no YAML.
    """
    sizes: dict[str | None, float] = {}
    parents: list[tuple[str | None, float]] = []
    size = 0.0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes[event.anchor] = _MAX_VALUES  # if it contains itself
            parents.append((event.anchor, size))
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, outer_size = parents.pop()
            sizes[anchor] = size
            size += outer_size
        elif isinstance(event, yaml.AliasEvent):
            size += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size += 1
            if _LONG_NUMBER.fullmatch(event.value):
                raise ConfigError(
                    f"{name}: expected numbers of at most 1,000 characters, got one of {len(event.value):,}; correct it"
                )
        if size > _MAX_VALUES or len(parents) > _MAX_DEPTH:
            raise ConfigError(
                f"{name}: expected at most {_MAX_VALUES:,} values, nested {_MAX_DEPTH} deep, got more "
                "(aliases are expanded); write the values out"
            )
