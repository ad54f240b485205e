"""Warnings and log lines that code under test writes, for tests to read."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded_warnings(part: str = "") -> Iterator[list[str]]:
    """Messages of the block's warnings that contain ``part``, complete at its end."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            messages += [text for each in caught if part in (text := str(each.message))]


@contextmanager
def recorded_log(name: str) -> Iterator[io.StringIO]:
    """What the logger writes in the block."""
    log = logging.getLogger(name)
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    log.addHandler(handler)
    try:
        yield text
    finally:
        log.removeHandler(handler)
