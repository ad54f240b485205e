"""Errors in options and YAML files of LightningCLI's commands: jsonargparse's reason, where it is, and a suggestion."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import yaml
from lightning.pytorch import callbacks, loggers

import lightning_megatron
from lightning_megatron.cli.config import PRECISIONS
from lightning_megatron.errors import one_line, user_error
from lightning_megatron.foreign_names import suggest_option

_KEY = re.compile(r'Parser key "(\S+)":')
_REFUSED = re.compile(
    r"^( *)(?:- )?Problem with given class_path '([\w.]+)':\n((?:\1 .*\n?|\n)*)",
    flags=re.MULTILINE,
)
"""A class, and why it refuses its arguments; such a reason is indented further than those of other types."""
_UNKNOWN_OPTION = re.compile(r"(?:[Oo]ption '|arguments: (?:--)?)([\w./-]+)")
_UNKNOWN_CLASS = re.compile(r"dot import path string: (\S+)")
_WORDINGS = {
    r"(?s:.*)Subtypes: \[(.*)\](?s:.*)Given value: (.*)": r"expected one of \1, got '\2'",
    r"Expected a (.*)\. Got value: ?(.*)": r"expected a \1, got '\2'",
}
"""Shorter wordings of reasons of jsonargparse."""


class _Mistake(NamedTuple):
    """What a message of jsonargparse says."""

    option: str
    """Dotted name of the option with a wrong value; empty for mistakes in names of options and in files."""
    refused_by: str
    """Dotted name of the class whose arguments are wrong; empty for options of no class."""
    reason: str


def explain(
    error: Exception,
    arguments: Sequence[str],
    options: Collection[str],
) -> str:
    """Explain an error of jsonargparse in one line, with file and line, and a suggestion.

    Args:
        error: The exception.
        arguments: The typed arguments.
        options: All options of the command.
    """
    typed = [word for argument in arguments for word in argument.split("=", 1)]
    files = [
        Path(value)
        for name, value in pairwise(typed)
        if name in ("-c", "--config") and Path(value).is_file()
    ]
    for file in filter(_is_of_accelerate, files):
        fix = f"convert it with lightning-megatron config --from-accelerate {file}"
        return f"--config {file} is a configuration of Accelerate; {fix}"
    if isinstance(error, UnicodeDecodeError):
        names = ", ".join(map(str, files))
        return f"--config {names} is not UTF-8 text ({error.reason}); give a YAML file"
    if explanation := user_error(error):
        return explanation
    mistake = _mistake(str(error))
    message = mistake.reason
    for theirs, ours in _WORDINGS.items():
        message = re.sub(theirs, ours, message)
    if mistake.option:
        message = f"{mistake.option}: {message}"
    path, hint = _suggestion(mistake, options)
    if not files and "arguments are required" in message:
        hint = "give --config FILE, or model and data as options: see --help"
    if hint:
        message += f"; {hint}"
    is_typed = any(word.startswith(f"--{path}") for word in typed)
    if not path or not is_typed:
        message = _locate(path, files) + message
    return one_line(message)


def _is_of_accelerate(file: Path) -> bool:
    """Whether a YAML or JSON file is a configuration of Accelerate."""
    key = r"""^\s*["']?distributed_type["']?\s*:"""
    text = file.read_text(errors="replace")
    return re.search(key, text, flags=re.MULTILINE) is not None


def _mistake(text: str) -> _Mistake:
    """Take a message apart.

    For an option of several types, jsonargparse says why the value has none of them. If it is one of a class, the
    reason of that class is the relevant one.
    """
    option = ".".join(dict.fromkeys(_KEY.findall(text)))
    refused_by = ""
    while match := _REFUSED.search(text):
        refused_by = match[2]
        text = match[3]
    reason = _KEY.split(text)[-1]
    return _Mistake(option, refused_by, reason.strip())


def _suggestion(mistake: _Mistake, options: Collection[str]) -> tuple[str, str]:
    """Dotted name of the key that is wrong, and what may have been meant; empty if nothing is close."""
    option, refused_by, reason = mistake
    if option == "trainer.precision":
        meant = PRECISIONS.get(reason.rpartition("Given value: ")[2])
        return option, f"did you mean {meant}?" if meant else ""
    if unknown_class := _UNKNOWN_CLASS.search(reason):
        classes = [*lightning_megatron.__all__, *callbacks.__all__, *loggers.__all__]
        return option, _closest(unknown_class[1], classes)
    unknown_option = _UNKNOWN_OPTION.search(reason)
    if unknown_option is None:
        return option, ""
    wrong = unknown_option[1]
    if wrong.endswith((".yaml", ".yml")):
        return wrong, f"did you mean --config {wrong}?"
    hint = suggest_option(wrong.rpartition(".")[2], typed=True)
    if not refused_by:
        return wrong, hint or _closest(f"--{wrong}", options)
    if group := re.search(r"Group '(\w+)'", reason):
        wrong = f"{group[1]}.{wrong}"
    module, _, name = refused_by.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return f"{option}.{wrong}", hint or _closest(wrong, list(_options_of(cls)))


def _options_of(cls: type) -> Iterator[str]:
    """Options of a constructor, and ``option.field`` for those that are dataclasses."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    for name in inspect.signature(cls).parameters:
        yield name
        for kind in filter(is_dataclass, (hints[name], *get_args(hints[name]))):
            yield from (f"{name}.{field.name}" for field in fields(kind))


def _closest(wrong: str, known: Collection[str]) -> str:
    """Suggest the closest known name; for a dotted name one in the same section, or else the section."""
    section = wrong.partition(".")[0]
    sections = {name.partition(".")[0] for name in known}
    if section in sections:
        close = difflib.get_close_matches(wrong, known, n=1)
    else:
        close = difflib.get_close_matches(section, sections, n=1)
    if not close or close[0] == wrong:
        return ""
    return f"did you mean {close[0]}?"


def _locate(path: str, files: list[Path]) -> str:
    """``FILE:LINE: `` of invalid YAML, or of the key that matches most of the dotted ``path``."""
    location = ""
    most_found = 0
    for file in files:
        try:
            node = yaml.compose(file.read_text(), Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = 1 if mark is None else mark.line + 1
            return f"{file}:{line}: "
        if not isinstance(node, yaml.MappingNode):
            return f"{file}:1: "
        num_found, line = _find_key(node, path.split("."))
        if num_found and num_found >= most_found:  # a later file overrides
            most_found = num_found
            location = f"{file}:{line}: "
    return location


def _find_key(node: Any, names: list[str]) -> tuple[int, int]:
    """Number of ``names`` found, also below ``init_args`` and in items of lists, and the line of the last one."""
    best = (0, 0)
    if not names:
        return best
    if isinstance(node, yaml.SequenceNode):
        return max((_find_key(item, names) for item in node.value), default=best)
    if not isinstance(node, yaml.MappingNode):
        return best
    for key, value in node.value:
        if key.value == names[0]:
            num_found, line = _find_key(value, names[1:])
            best = max(best, (1 + num_found, line or key.start_mark.line + 1))
        elif key.value == "init_args":
            best = max(best, _find_key(value, names))
    return best
