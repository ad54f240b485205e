"""Where does each split come from: is one source divided, or has each its own?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from lightning_megatron.data.samples import SplitName
from lightning_megatron.errors import ConfigError

_T = TypeVar("_T")


def paths_of_splits(data_path: _T | None, own: Mapping[SplitName, _T | None]) -> dict[SplitName, _T] | None:
    """The paths of single splits; None if ``data_path`` is to be split.

    Args:
        data_path: Where all splits come from.
        own: Where each split alone comes from.

    Raises:
        ConfigError: If there are none, or two answers to where a split comes from.
    """
    given: dict[SplitName, _T] = {name: path for name, path in own.items() if path is not None}
    names = ", ".join(f"{name}_data_path" for name in given)
    if data_path is None and not given:
        raise ConfigError("data_path=None leaves nothing to read; give data_path, or train_data_path and others")
    if data_path is not None and given:
        raise ConfigError(
            f"data_path={data_path} and {names} both say where samples come from; give data_path with split, or only"
            " paths of single splits"
        )
    return given or None
