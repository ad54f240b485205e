"""Refuse YAML that expands without end, and name the file, the line and the likely meaning of a mistake in one."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import get_loader, set_loader

from lightning_megatron.cli.failure import users_mistake
from lightning_megatron.engine.dtypes import PrecisionName
from lightning_megatron.errors import ConfigError

_MOST_VALUES = 100_000
_DEEPEST = 100
_OF_CLASS = re.compile(
    r"class_path '([\w.]+)\.(\w+)': "
    r"(?:Group '(\w+)' does not accept option '|Option '|unrecognized arguments: --)([\w.]+)"
)
"""How jsonargparse says that a class has no such option."""
_load = get_loader("yaml")


def refuse_yaml_without_end() -> None:
    """Have jsonargparse refuse YAML that expands to more, or is deeper, than any configuration."""
    set_loader("yaml", _load_checked, (yaml.YAMLError,))


def _load_checked(text: str, path: str = "") -> Any:
    # jsonargparse gives the path, if there is one, to a loader that has a parameter of this name.
    sizes: dict[str | None, float] = {}
    above: list[tuple[str | None, float]] = []
    size = 0.0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes[event.anchor] = _MOST_VALUES  # if it contains itself
            above.append((event.anchor, size))
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            sizes[anchor] = size
            size += before
        elif isinstance(event, yaml.NodeEvent):
            size += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if size > _MOST_VALUES or len(above) > _DEEPEST:
            raise ConfigError(
                f"{path or text[:40]}: expected at most {_MOST_VALUES:,} values, {_DEEPEST} in each other, got more "
                "(aliases are counted as what they stand for); write out what is meant"
            )
    return _load(text)


def explained(error: Exception, arguments: Sequence[str], options: Iterable[str], classes: Iterable[str]) -> str:
    """What jsonargparse says of a mistake, with the file and line of it, and what may have been meant.

    Args:
        error: That it raised.
        arguments: What was typed.
        options: All options of the command.
        classes: Names that a class may be given by.
    """
    typed = [word for each in arguments for word in each.split("=", 1)]
    files = [Path(value) for name, value in pairwise(typed) if name in ("-c", "--config") and Path(value).is_file()]
    if isinstance(error, UnicodeDecodeError):
        return f"--config {', '.join(map(str, files))} is no text in UTF-8 ({error.reason}); give a YAML file"
    # The place within a string is that within the file, which is told below.
    message = re.sub(r' in "<\w+ string>", line \d+, column \d+', "", users_mistake(error) or str(error))
    if not files and "arguments are required" in message:
        return f"{message}; give --config FILE, or model and data as options: see --help"
    path, hint = message.partition(":")[0], ""
    if path == "trainer.precision":
        message = f"{path}: expected one of {', '.join(get_args(PrecisionName))}"
    elif match := re.match(r"unrecognized arguments: (\S+)", message):
        if Path(match[1]).suffix in (".yaml", ".yml"):
            return f"{match[1]} stands alone; did you mean --config {match[1]}?"
        hint = _meant(match[1].partition("=")[0], options)
    elif match := _OF_CLASS.search(message):
        module, name, group, option = match.groups()
        option = f"{group}.{option}" if group else option
        path = f"{path}.{option}"
        hint = _meant(option, _options_of(getattr(importlib.import_module(module), name)))
    elif match := re.search(r"import path string: (\w+)$", message):
        hint = _meant(match[1], classes)
    elif match := re.search(r"does not accept option '([^']+)'", message):
        path, hint = match[1], _meant(f"--{match[1]}", options)
    is_told = "; here it is " in message or "; leave it out" in message  # the name is another tool's
    is_typed = any(each.startswith(f"--{path}") for each in typed)
    return ("" if is_typed else _where(path, files)) + message + ("" if is_told else hint)


def _options_of(cls: type) -> Iterator[str]:
    """What a constructor takes, and ``option.field`` for what is grouped."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    for name in inspect.signature(cls).parameters:
        yield name
        for kind in (hints[name], *get_args(hints[name])):
            if is_dataclass(kind):
                yield from (f"{name}.{field.name}" for field in fields(kind))


def _meant(wrong: str, known: Iterable[str]) -> str:
    """The known name that is nearest; of names with dots the one of the same section, or else the section."""
    known = list(known)
    sections, section = {each.partition(".")[0] for each in known}, wrong.partition(".")[0]
    names = known if section in sections else sections
    close = difflib.get_close_matches(wrong if names is known else section, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _where(path: str, files: list[Path]) -> str:
    """``FILE:LINE: `` of a key, or of what is no YAML, or not what a configuration is."""
    for file in reversed(files):
        try:
            node = yaml.compose(file.read_text(), Loader=yaml.CSafeLoader)
            line = _line(node, path.split(".")) if isinstance(node, yaml.MappingNode) else 1
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
        if line:
            return f"{file}:{line}: "
    return ""


def _line(node: Any, names: list[str]) -> int | None:
    """Line of the key that ``names`` lead to, through ``init_args`` and the items of lists."""
    if isinstance(node, yaml.SequenceNode):
        return next((line for each in node.value if (line := _line(each, names))), None)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == names[0]:
            return (names[1:] and _line(value, names[1:])) or key.start_mark.line + 1
        if key.value == "init_args" and (line := _line(value, names)):
            return line
    return None
