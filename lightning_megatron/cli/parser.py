"""Parsers of commands, built from the signatures and docstrings of the functions behind them.

jsonargparse, which parses the commands of LightningCLI, cannot build these: it reads values as YAML, so that the prompt
``Are you: human?`` would become a mapping; its lists are ``[a,b]`` instead of ``a b``; its flags need a value.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle, parse, parse_from_object

from lightning_megatron.errors import LARGEST_SEED, ConfigError
from lightning_megatron.foreign_names import suggest_option


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without its usage.

    Options may be written with underscores, and unknown ones are reported with those to use instead.
    """

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> list[argparse.Action]:
        """Everything that starts with a dash, ``--help`` included."""
        return [action for action in self._actions if action.option_strings]

    def with_hyphens(self, words: Sequence[str]) -> list[str]:
        """Spell options with hyphens, as in ``--output-prefix``, where they were typed with underscores.

        Unknown options stay as they are: they may belong to another tool.
        """
        flags = self._flags()
        spelled = []
        for word in _before_separator(words):
            flag, equals, value = word.partition("=")
            hyphenated = flag.replace("_", "-")
            if flag.startswith("--") and _is_known(hyphenated, flags):
                word = f"{hyphenated}{equals}{value}"
            spelled.append(word)
        return spelled + list(words[len(spelled) :])

    def refuse_unknown_options(self, words: Sequence[str], command: str) -> None:
        """Refuse options that the command does not have, with those to use instead.

        Args:
            words: Arguments of the command.
            command: Its name.

        Raises:
            ConfigError: If there are any.
        """
        unknown = self._unknown_options(words)
        if not unknown:
            return
        spellings = {action.dest: action.option_strings[-1] for action in self.options}
        explained = []
        for flag, typed in unknown.items():
            hint = suggest_option(flag, spellings, tool=command)
            hint = hint.partition("choose from")[0]  # --help lists those to choose from
            if len(unknown) == 1:
                explained += [" ".join(typed), hint]
            else:  # one line for all, without reasons
                replacement = re.split("[,:?]", hint.removeprefix("did you mean "))[0]
                explained.append(f"{flag}: {replacement or 'unknown'}")
        self.error(f"unrecognized arguments: {'; '.join(filter(None, explained))}")

    def with_flags(self, message: str) -> str:
        """Replace Python names of options by their flags in a message: ``top_k=3`` becomes ``--top-k 3``.

        A name of one word is replaced only before ``=``: ``seed`` may be plain English.

        Args:
            message: Message of an error raised by the functions behind the command.
        """
        start = r"(?<![\w./=-])"  # not within a path or another name
        for action in self.options:
            name = action.dest
            flag = next(flag for flag in action.option_strings if flag.startswith("--"))
            if flag == "--help":
                continue
            if action.nargs == 0:
                message = re.sub(rf"{start}{name}=True\b", flag, message)
            message = re.sub(rf"{start}{name}=(?=\S)", f"{flag} ", message)
            message = re.sub(rf"\bcorrect {name}$", f"correct {flag}", message)
            if "_" in name:
                message = re.sub(rf"{start}{name}(?![\w/=]|\.\w)", flag, message)
        return message

    def _flags(self) -> list[str]:
        return [flag for action in self.options for flag in action.option_strings]

    def _unknown_options(self, words: Sequence[str]) -> dict[str, list[str]]:
        """Unknown options, each with the words from it to the next option."""
        flags = self._flags()
        unknown: dict[str, list[str]] = {}
        typed: list[str] | None = None
        for word in _before_separator(words):
            flag = word.partition("=")[0]
            if flag.startswith("--"):
                typed = None
                if not _is_known(flag, flags):
                    typed = unknown.setdefault(flag, [])
            if typed is not None:
                typed.append(word)
        return unknown


_Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


def _before_separator(words: Sequence[str]) -> list[str]:
    """Words that may be options: those before a ``--``."""
    return list(itertools.takewhile(lambda word: word != "--", words))


def _is_known(flag: str, flags: Sequence[str]) -> bool:
    """Whether a flag is one of ``flags``, or the beginning of one, which argparse accepts."""
    return any(known.startswith(flag) for known in flags)


def add_command(
    commands: _Commands,
    name: str,
    function: Callable[..., None],
) -> None:
    """Add a command whose options are the parameters of ``function``, or the fields of its dataclass parameters.

    Help is taken from docstrings: summary, description and examples of the function, and its ``Args:`` or the docstring
    below each field. Parameters that can be positional become positional arguments. A field's metadata ``flag``
    overrides the name of its option; "" leaves the field out.

    Args:
        commands: Commands of the program.
        name: Name of the command.
        function: What it runs; the parsed arguments have a method ``run`` that calls it with them.
    """
    parser = _add_parser(commands, name, function)
    option_classes: dict[str, Any] = {
        parameter: hint
        for parameter, hint in get_type_hints(function).items()
        if dataclasses.is_dataclass(hint)
    }
    if not option_classes:
        construct = _add_options(parser, function)
        parser.set_defaults(run=construct)
        return
    constructors = {
        parameter: _add_options(parser, option_class)
        for parameter, option_class in option_classes.items()
    }

    def run(parsed: argparse.Namespace) -> None:
        function(**{parameter: construct(parsed) for parameter, construct in constructors.items()})

    parser.set_defaults(run=run)


def _add_parser(
    commands: _Commands,
    name: str,
    function: Callable[..., None],
) -> CommandParser:
    doc = parse(function.__doc__ or "", DocstringStyle.GOOGLE)
    summary = (doc.short_description or "").rstrip(".")
    description = filter(None, (doc.short_description, doc.long_description))
    examples = "\n".join(dedent(example.description or "") for example in doc.examples)
    return commands.add_parser(
        name,
        help=summary[:1].lower() + summary[1:],
        description="\n\n".join(description),
        epilog=f"examples:\n{indent(examples, '  ')}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_options(parser: CommandParser, owner: Any) -> Callable[[argparse.Namespace], Any]:
    """Add the parameters of a function or dataclass; returns what calls it with the parsed ones."""
    doc = parse_from_object(owner, DocstringStyle.GOOGLE)
    help_of = {each.arg_name: each.description or "" for each in doc.params}
    fields: Mapping[str, Any] = getattr(owner, "__dataclass_fields__", {})
    hints = get_type_hints(owner)
    names = []
    for name, parameter in inspect.signature(owner).parameters.items():
        flag = None
        if name in fields:
            flag = fields[name].metadata.get("flag")
        if flag != "":
            names.append(name)
            _add_argument(parser, parameter, flag, hints[name], help_of.get(name, ""))
    return lambda parsed: owner(**{name: getattr(parsed, name) for name in names})


def _add_argument(
    parser: CommandParser,
    parameter: inspect.Parameter,
    flag: str | None,
    hint: Any,
    text: str,
) -> None:
    default = parameter.default
    details: dict[str, Any] = {"help": _as_help(text)}
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
        name = parameter.name
    else:
        name = flag or f"--{parameter.name.replace('_', '-')}"
        details["dest"] = parameter.name
        details["required"] = default is parameter.empty
    types = _leaf_types(hint)
    if types == {bool}:
        action = "store_true" if hint is bool else argparse.BooleanOptionalAction
        parser.add_argument(name, action=action, **details)
        return
    choices = [value for kind in types if get_origin(kind) is Literal for value in get_args(kind)]
    if choices:
        details["choices"] = choices
    else:
        details |= _conversion(types, parameter.name)
    origins = [get_origin(part) for part in (hint, *get_args(hint))]
    if Sequence in origins or tuple in origins:
        details["nargs"] = "+"
    if default is not parameter.empty:
        shown = str(default)
        if isinstance(default, tuple):
            shown = " ".join(default)
            default = list(default)
        details["default"] = default
        if default is not None and shown:
            details["help"] += f" (default: {shown})"
    parser.add_argument(name, **details)


def _as_help(text: str) -> str:
    """A sentence of a docstring as argparse shows it; ``%`` would begin a placeholder."""
    text = " ".join(text.split()).rstrip(".")
    text = text.replace("``", "").replace("%", "%%")
    starts_with_name = text[1:2].isupper() or text.startswith("Hugging Face")
    return text if starts_with_name else text[:1].lower() + text[1:]


def _conversion(types: set[Any], name: str) -> dict[str, Any]:
    """Argparse's ``type`` and ``metavar`` for an option of these types."""
    if Path in types:
        # Shells do not expand the ~ of --option=~/directory.
        expand = _expanded_path if types == {Path} else os.path.expanduser
        return {"type": expand, "metavar": "PATH"}
    if types == {int}:
        return {"type": _integer, "metavar": "N"}
    if types == {float}:
        return {"type": float, "metavar": "X"}
    last_word = name.rpartition("_")[2]
    return {"type": str, "metavar": last_word.rstrip("s").upper()}


def _expanded_path(text: str) -> Path:
    return Path(text).expanduser()


def _integer(text: str) -> int:
    """An integer of 64 bits; larger ones overflow in torch, NumPy and file formats."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if not -(2**63) <= number <= LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected an integer of at most 64 bits, got {text}")
    return number


def _leaf_types(hint: Any) -> set[Any]:
    """Types of a value, or of its items, without None."""
    parts = get_args(hint)
    if not parts or get_origin(hint) is Literal:
        return {hint} - {type(None), Ellipsis}
    return {kind for part in parts for kind in _leaf_types(part)}
