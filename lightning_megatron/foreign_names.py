"""Translation of options of Accelerate, NeMo 2, Megatron-LM and transformers: the table ``foreign_names.csv``.

Used by ``config --from-accelerate``, by ``docs/from_accelerate.md``, and by errors of constructors and commands, which
suggest the equivalent option of this package.
"""

from __future__ import annotations

import csv
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_megatron.errors import ConfigError, require_kind

_Class = TypeVar("_Class", bound=type)

_SECTIONS = {
    "Trainer": "trainer",
    "MegatronStrategy": "trainer.strategy",
    "LoadFrom": "trainer.strategy.load_from",
    "MegatronModule": "model",
    "GPTTrainStep": "model.train_step",
    "BertTrainStep": "model.train_step",
    "LRSchedule": "model.lr_schedule",
    "OptimizerOptions": "model.optimizer",
    "GenerationOptions": "model.generation",
    "IndexedDataModule": "data",
    "MaskingOptions": "data.masking",
}
"""Section of LightningCLI's configuration with the options of each class."""


class ForeignName(NamedTuple):
    """A row of the table."""

    used_by: str
    """Sources of the name, separated by spaces: ``config`` (a key of Accelerate's file), ``plugin``, ``nemo``, ...;
    ``removed`` for a former option of this package."""
    theirs: str
    ours: str
    """``Class(option)``, or another name; empty if there is no equivalent."""
    value: str
    """How ``config --from-accelerate`` reads the value; empty if the key is ignored."""
    note: str

    @property
    def option(self) -> str | None:
        """Name of the option in ``Class(option)``; None for other names."""
        return match[1] if (match := re.fullmatch(r".*\((\w+)\)", self.ours)) else None

    @property
    def cli_name(self) -> str | None:
        """Dotted name of the option on the command line, e.g. ``trainer.strategy.tp``."""
        section = _SECTIONS.get(self.ours.split("(")[0])
        return f"{section}.{self.option}" if section and self.option else None


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """All rows of the table."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(ForeignName(**row) for row in csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE))


def advice(name: str, known: Iterable[str] | Mapping[str, str] = (), *, typed: bool = False) -> str:
    """Suggest a replacement for an unknown option.

    Args:
        name: The unknown option, as the user spelled it.
        known: Valid options, if known; a mapping gives the spelling of each.
        typed: Whether to spell options of other classes as on the command line.

    Returns:
        The suggestion; empty if there is none.
    """
    spellings = dict(known) if isinstance(known, Mapping) else {option: option for option in known}
    plain = name.lstrip("-").replace("-", "_").lower()
    rows = [row for row in foreign_names() if row.theirs.lower() == plain]
    row = next((row for row in rows if row.option in spellings), rows[0] if rows else None)
    if row is None or plain in spellings:
        for match in [plain] if plain in spellings else difflib.get_close_matches(plain, spellings, 1):
            return f"did you mean {spellings[match]}?"
        return f"choose from {', '.join(spellings.values())}" if spellings else ""
    if not row.ours:
        return f"leave it out: {row.note}"
    ours = f"--{row.cli_name}" if typed and row.cli_name else row.ours.replace(")", "=...)")
    return f"use {spellings.get(row.option or '', ours)}{row.note and f', {row.note}'}"


def explains_options(cls: _Class) -> _Class:
    """Class decorator: raise ``ConfigError`` for options that the constructor does not have, or of a wrong type."""
    construct: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = {name: str(each.annotation) for name, each in list(inspect.signature(construct).parameters.items())[1:]}

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"{type(self).__name__} has no option {name!r}; {advice(name, list(known))}")
            require_kind(name, value, known[name])
        construct(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
