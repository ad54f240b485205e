"""Limits on YAML before anything is built from it: aliases make a small text large."""

from __future__ import annotations

import yaml

from lightning_megatron.errors import ConfigError

_MAX_VALUES = 100_000
_MAX_DEPTH = 100


def check_yaml_size(text: str, name: str) -> None:
    """Check the size that YAML has with its aliases written out, and its depth.

    Args:
        text: The YAML.
        name: What it is, for messages.

    Raises:
        ConfigError: If either is beyond what a configuration needs.
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
        elif isinstance(event, yaml.NodeEvent):
            size += 1
        if size > _MAX_VALUES or len(parents) > _MAX_DEPTH:
            raise ConfigError(
                f"{name}: expected at most {_MAX_VALUES:,} values, nested {_MAX_DEPTH} deep, got more "
                "(aliases are expanded); write the values out"
            )
