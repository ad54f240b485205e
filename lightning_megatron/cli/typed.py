"""What did the user type? Paths as a shell would have read them, and messages in the words of the command line."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

_PATH_METAVARS = ("PATH", "DIR", "FILE", "PREFIX")
"""By which the parsers tell options that name something on the disk."""


def expand_home(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Replace ``~`` at the beginning of every path; shells leave it in ``--option=~/folder``.

    Args:
        parser: Whose options with the metavars of paths are meant.
        parsed: Changed in place.
    """
    for action in parser._actions:
        if action.metavar in _PATH_METAVARS and hasattr(parsed, action.dest):
            setattr(parsed, action.dest, _expanded(getattr(parsed, action.dest)))


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    if isinstance(value, (str, Path)) and str(value).startswith("~"):
        return type(value)(os.path.expanduser(value))  # as it is where no user has that name
    return value


def in_typed_words(message: str, parser: argparse.ArgumentParser) -> str:
    """The message with options named as they are typed: ``top_k=3`` becomes ``--top-k 3``.

    A name of one word is replaced only before ``=``: ``seed`` may be English.

    Args:
        message: Of an error raised by what the command calls, which knows the options by their names in Python.
        parser: The command's; an option's ``dest`` is that name.
    """
    for action in parser._actions:
        flag = next((each for each in action.option_strings if each.startswith("--")), None)
        if flag is not None and flag != "--help":
            message = _renamed(message, action.dest, flag, is_switch=action.nargs == 0)
    return message


def _renamed(message: str, name: str, flag: str, *, is_switch: bool) -> str:
    begin = r"(?<![\w./=-])"  # not within a path or another name
    if is_switch:
        message = re.sub(rf"{begin}{name}=True\b", flag, message)
    message = re.sub(rf"{begin}{name}=(?=\S)", f"{flag} ", message)
    if "_" in name:
        message = re.sub(rf"{begin}{name}(?![\w/=]|\.\w)", flag, message)
    return message
