"""Translation of options of Accelerate, NeMo 2, Megatron-LM and transformers: the table ``foreign_names.csv``.

Used by ``config --from-accelerate``, by ``docs/from_accelerate.md``, and by errors of constructors and commands, which
suggest the equivalent option of this package.
"""

from __future__ import annotations

import builtins
import csv
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lightning_megatron.errors import ConfigError, options_object, require_kind

_Class = TypeVar("_Class", bound=type)

PROG = "lightning-megatron"

_SECTIONS = {
    "Trainer": "trainer",
    "Trainer.fit": "",
    "MegatronStrategy": "trainer.strategy",
    "LoadFrom": "trainer.strategy.load_from",
    "MegatronModule": "model",
    "GPTTrainStep": "model.train_step",
    "BertTrainStep": "model.train_step",
    "LRSchedule": "model.lr_schedule",
    "LoRA": "model.lora",
    "OptimizerOptions": "model.optimizer",
    "GenerationOptions": "model.generation",
    "IndexedDataModule": "data",
    "InstructionDataModule": "data",
    "DatasetDataModule": "data",
    "MaskingOptions": "data.masking",
}
"""Section of LightningCLI's configuration with the options of each class; empty for those of the command itself."""
_COMMANDS = {"convert", "generate", "preprocess"}
"""Values of ``used_by`` that are commands of this package: the names of tools that do the same."""


class ForeignName(NamedTuple):
    """A row of the table."""

    used_by: str
    """Sources of the name, separated by spaces: ``config`` (a key of Accelerate's file), ``plugin``, ``nemo``, ...;
    ``removed`` for a former option of this package."""
    theirs: str
    ours: str
    """``Class(option)``, ``lightning-megatron COMMAND --option``, or another name; empty if there is no equivalent."""
    value: str
    """How ``config --from-accelerate`` reads the value; empty if the key is ignored."""
    note: str

    @property
    def option(self) -> str | None:
        """Name of the option of a class or of a command of this package; None for other names."""
        match = re.fullmatch(rf".*\((\w+)\)|{PROG} [\w-]+ --([\w-]+)", self.ours)
        if match is None:
            return None
        of_class, of_command = match.groups()
        return str(of_class or of_command.replace("-", "_"))

    @property
    def cli_name(self) -> str | None:
        """Dotted name of the option on the command line, e.g. ``trainer.strategy.tp``."""
        section = _SECTIONS.get(self.ours.split("(")[0])
        if section is None or self.option is None:
            return None
        return f"{section}.{self.option}".lstrip(".")


@functools.cache
def foreign_names() -> tuple[ForeignName, ...]:
    """All rows of the table."""
    table = Path(__file__).with_suffix(".csv")
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE)
        return tuple(ForeignName(**row) for row in rows)


def suggest_option(
    name: str,
    known: Iterable[str] | Mapping[str, str] = (),
    *,
    typed: bool = False,
    tool: str = "",
) -> str:
    """Suggest a replacement for an unknown option.

    Args:
        name: The unknown option, as the user spelled it.
        known: Valid options, if known; a mapping gives the spelling of each.
        typed: Whether to spell options of other classes as on the command line.
        tool: The command of this package that has been called; names in tools like it come first.

    Returns:
        The suggestion; empty if there is none.
    """
    spellings: dict[str | None, str] = {}
    if isinstance(known, Mapping):
        spellings.update(known)
    else:
        spellings.update((option, option) for option in known)
    plain = name.lstrip("-").replace("-", "_").lower()
    rows = _rows_of(plain, tool)
    if plain in spellings:
        return f"did you mean {spellings[plain]}?"
    if not rows:
        close = difflib.get_close_matches(plain, filter(None, spellings), 1)
        if close:
            return f"did you mean {spellings[close[0]]}?"
        return f"choose from {', '.join(spellings.values())}" if spellings else ""
    row = next((row for row in rows if row.option in spellings), rows[0])
    if not row.ours:
        return f"leave it out: {row.note}"
    ours = row.ours.replace(")", "=...)")
    if typed and row.cli_name:
        ours = f"--{row.cli_name}"
    hint = f"use {spellings.get(row.option, ours)}"
    if row.note:
        hint += f", {row.note}"
    return hint


def _rows_of(theirs: str, tool: str) -> list[ForeignName]:
    """Rows for a name: those of tools like ``tool``, else those of constructors, else all."""
    rows = [row for row in foreign_names() if row.theirs.lower() == theirs]
    in_command = [row for row in rows if tool in row.used_by.split()]
    elsewhere = [row for row in rows if row.used_by not in ("config", *_COMMANDS)]
    return in_command or elsewhere or rows


def checks_options(cls: _Class) -> _Class:
    """Class decorator: raise ``ConfigError`` for options that the constructor does not have, or of a wrong type."""
    construct: Callable[..., None] = cls.__init__  # type: ignore[misc]
    _, *parameters = inspect.signature(construct).parameters.values()
    annotations = {each.name: str(each.annotation) for each in parameters}

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in annotations:
                hint = suggest_option(name, annotations.keys())
                raise ConfigError(f"{type(self).__name__} has no option {name!r}; {hint}")
        # Too many positional ones are a TypeError of the constructor.
        positional = dict(zip(annotations, args, strict=False))
        for name, value in (positional | options).items():
            require_kind(name, value, annotations[name])
            _require_options_object(name, value, annotations[name], construct.__globals__)
        construct(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _require_options_object(
    name: str, value: object, annotation: str, scope: Mapping[str, Any]
) -> None:
    """Check an option whose annotation names a class of options, such as ``Heartbeat`` or ``LoRA | str | None``.

    Args:
        name: Name of the option.
        value: Its value.
        annotation: Annotation of the parameter.
        scope: Global names of the module with the annotation.

    Raises:
        ConfigError: If the value is none of the annotated types, nor a mapping of the fields.
    """
    names = annotation.split(" | ")
    kinds = [scope.get(each, getattr(builtins, each, None)) for each in names]
    options = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
    if options is None or (value is None and "None" in names):
        return
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    if not isinstance(value, (Mapping, *classes)):
        expected = options_object(options)  # type: ignore[arg-type]
        if "None" in names:
            expected += ", or None"
        raise ConfigError(f"{name}={value!r}: expected {expected}, got {type(value).__name__}")
