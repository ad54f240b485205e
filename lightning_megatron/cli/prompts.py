"""Which texts does ``generate`` continue? Those of the command line, of a file, or of another program's output."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_megatron.errors import ConfigError

_STDIN = Path("-")
_COPY_OF_STDIN = "LIGHTNING_MEGATRON_PROMPTS"
"""Environment variable: the file in which the first process has left its input to those that it starts."""


def read_prompts(texts: Sequence[str] | None, file: Path | None, num_processes: int) -> list[str]:
    """The texts, or the lines of the file; empty lines are no prompts.

    Args:
        texts: Of the command line.
        file: Instead of them; ``-`` for standard input.
        num_processes: How many will read the same.

    Raises:
        ConfigError: If the file cannot be read, has no text, or a text is not UTF-8.
    """
    if file is None:
        return [_checked(text) for text in texts or []]
    content = _standard_input(num_processes) if file == _STDIN else _content(file)
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file {file} cannot be read: it is not UTF-8; give a text file") from None
    prompts = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {file} has no text; write a prompt on each line")
    return prompts


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        reason = f"{error.strerror}; give a text file, or - for standard input"
        raise ConfigError(f"--prompt-file {file} cannot be read: {reason}") from None


def _standard_input(num_processes: int) -> bytes:
    """All of it. It can be read once: whoever starts other processes leaves it to them in a file.

    Raises:
        ConfigError: If another program has started them.
    """
    if _COPY_OF_STDIN in os.environ:
        return Path(os.environ[_COPY_OF_STDIN]).read_bytes()
    if num_processes > 1 and "LOCAL_RANK" in os.environ:
        raise ConfigError(
            f"--prompt-file - is read by one process, and {num_processes} were started already; give a file"
        )
    content = sys.stdin.buffer.read()
    if num_processes > 1:
        descriptor, name = tempfile.mkstemp(prefix="prompts-")
        atexit.register(Path(name).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as copy:
            copy.write(content)
        os.environ[_COPY_OF_STDIN] = name
    return content


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that Python has kept as halves of characters
        raise ConfigError(f"--prompt {text!r} is not UTF-8; write it so") from None
    return text
