"""Refuse YAML that expands without end, and name the file, the line and the likely meaning of a mistake in one."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from jsonargparse import get_loader, set_loader

from lightning_megatron.cli.failure import users_mistake
from lightning_megatron.engine.dtypes import PrecisionName
from lightning_megatron.errors import ConfigError

_MOST_VALUES = 100_000
_load = get_loader("yaml")


def refuse_yaml_without_end() -> None:
    """Have jsonargparse refuse YAML whose aliases expand to more than any configuration holds."""
    set_loader("yaml", _load_checked, (yaml.YAMLError,))


def _load_checked(text: str, path: str = "") -> Any:
    # jsonargparse gives the path, if there is one, to a loader that has a parameter of this name.
    what = path or f"the YAML that begins with {text[:40]!r}"
    try:
        node = yaml.compose(text, Loader=yaml.CSafeLoader)
        if node is not None and _expanded_size(node, {}) > _MOST_VALUES:
            raise ConfigError(
                f"{what}: expected at most {_MOST_VALUES:,} values, got more by its aliases; write out what is meant"
            )
        return _load(text)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply; make it flatter") from None


def _expanded_size(node: Any, sizes: dict[int, float]) -> float:
    """How many values a node and all below it are once aliases are copies; infinite if it contains itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes) for child in _children(node))
    return sizes[id(node)]


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def explained(error: Exception, arguments: Sequence[str], options: Iterable[str], classes: Iterable[str]) -> str:
    """What jsonargparse says of a mistake, with the file and line of it, and what may have been meant.

    Args:
        error: That it raised.
        arguments: What was typed.
        options: All options of the command.
        classes: Short names of classes.
    """
    files = [Path(value) for name, value in _pairs(arguments) if name in ("-c", "--config")]
    if isinstance(error, UnicodeDecodeError):
        return f"--config {', '.join(map(str, files))} is no text in UTF-8 ({error.reason}); give a YAML file"
    # The place within a string is that within the file, which is told below.
    message = re.sub(r' in "<\w+ string>", line \d+, column \d+', "", users_mistake(error) or str(error))
    if not files and "arguments are required" in message:
        return f"{message}; give --config FILE, or model and data as options: see --help"
    keys = re.match(r"([\w.]+):", message)
    path, hint = keys[1] if keys else "", ""
    if message.startswith("Unexpected config:"):
        message = f"expected a YAML mapping with trainer, model and data, got {message[19:]!r}"
    elif message.startswith("trainer.precision: Expected"):
        message = f"trainer.precision: expected one of {', '.join(get_args(PrecisionName))}"
    elif match := re.match(r"unrecognized arguments: (\S+)", message):
        if Path(match[1]).suffix in (".yaml", ".yml"):
            return f"{match[1]} stands alone; did you mean --config {match[1]}?"
        hint = _meant_option(match[1].partition("=")[0], options)
    elif match := re.search(r"class_path '([\w.]+)': Option '([^']+)' is not accepted", message):
        path = f"{path}.{match[2]}"
        module, _, name = match[1].rpartition(".")
        hint = _meant(match[2], inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    elif match := re.search(r"class_path '[\w.]+': unrecognized arguments: --([\w.]+)", message):
        path = f"{path}.{match[1]}"  # of a group of options within a class
    elif match := re.search(r"does not accept option '([^']+)'", message):
        path, hint = match[1], _meant_option(f"--{match[1]}", options)
    elif match := re.search(r"Expected a dot import path string: (\w+)", message):
        hint = _meant(match[1], classes)
    is_told = "; here it is " in message or "; leave it out" in message  # the name is another tool's
    return _where(path, files, arguments) + message + ("" if is_told else hint)


def _meant_option(wrong: str, options: Iterable[str]) -> str:
    sections, section = {each.partition(".")[0] for each in options}, wrong.partition(".")[0]
    return _meant(wrong, options) if section in sections else _meant(section, sections)


def _meant(wrong: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _pairs(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Options with the word after them, or behind their ``=``."""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, separator, value = argument.partition("=")
        yield name, value if separator else after


def _where(path: str, files: list[Path], arguments: Sequence[str]) -> str:
    """``FILE:LINE: `` of a key that no option sets, or of what is no YAML at all."""
    if any(name == f"--{path}" for name, _ in _pairs(arguments)):
        return ""
    for file in reversed(files):
        try:
            node = yaml.compose(file.read_text(), Loader=yaml.CSafeLoader)
        except (OSError, RecursionError):
            continue
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            return f"{file}:{mark.line + 1}: " if mark else f"{file}: "
        if line := _line(node, path.split(".")):
            return f"{file}:{line}: "
        if not isinstance(node, yaml.MappingNode):
            return f"{file}: "
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
