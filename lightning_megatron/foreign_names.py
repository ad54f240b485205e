"""Options of Accelerate, NeMo 2, Megatron-LM and transformers by our names: the table ``foreign_names.csv``.

``config --from-accelerate`` translates by it, ``docs/from_accelerate.md`` shows it, and the errors of constructors and
commands name our option for one of theirs.
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
"""Where LightningCLI has the options of a class."""


class ForeignName(NamedTuple):
    """A row of the table."""

    used_by: str
    """Whose name it is, one word or several: ``config`` (a key of Accelerate's file), ``plugin``, ``nemo``, ...;
    ``removed`` for an option that this package had."""
    theirs: str
    ours: str
    """``Class(option)``, or a name without options; empty where there is nothing to set."""
    value: str
    """How ``config --from-accelerate`` reads it; empty if it does not take it over."""
    note: str

    @property
    def option(self) -> str | None:
        """Of ``Class(option)``."""
        return match[1] if (match := re.fullmatch(r".*\((\w+)\)", self.ours)) else None

    @property
    def place(self) -> str | None:
        """The option's name on the command line: ``trainer.strategy.tp``."""
        section = _SECTIONS.get(self.ours.split("(")[0])
        return f"{section}.{self.option}" if section and self.option else None


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """All rows of the table."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(ForeignName(**row) for row in csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE))


def advice(name: str, known: Iterable[str] | Mapping[str, str] = (), *, typed: bool = False) -> str:
    """What to write in place of the option ``name``, which there is none of.

    Args:
        name: As it was written.
        known: The options that there are, if it is known, and how each is written.
        typed: Whether an option elsewhere is named as on the command line.

    Returns:
        Empty if nothing is known.
    """
    written = dict(known) if isinstance(known, Mapping) else {each: each for each in known}
    plain = name.lstrip("-").replace("-", "_").lower()
    rows = [row for row in foreign_names() if row.theirs.lower() == plain]
    row = next((each for each in rows if each.option in written), rows[0] if rows else None)
    if row is None or plain in written:
        for meant in [plain] if plain in written else difflib.get_close_matches(plain, written, 1):
            return f"did you mean {written[meant]}?"
        return f"choose from {', '.join(written.values())}" if written else ""
    if not row.ours:
        return f"leave it out: {row.note}"
    ours = f"--{row.place}" if typed and row.place else row.ours.replace(")", "=...)")
    return f"here it is {written.get(row.option or '', ours)}{row.note and f', {row.note}'}"


def explains_options(cls: _Class) -> _Class:
    """Let the constructor answer an option that it does not have, or of another kind, with ``ConfigError``."""
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
