"""How does a wrong setting print one line, though Lightning has told of seeds and devices before it is found?

What Lightning logs and warns of while a Trainer is configured is held back until everything has been checked: then it
is shown, or, if the user has made a mistake, dropped.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lightning_megatron.cli.failure import users_mistake

_LOGGERS = ("", "lightning", "lightning.fabric", "lightning.pytorch")


class HeldMessages:
    """A context in which log records and warnings wait for ``release()``."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._handlers: list[logging.Handler] = []
        self._holds = False

    def __enter__(self) -> HeldMessages:
        self._handlers = [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]
        for handler in self._handlers:
            handler.addFilter(_Holder(self._waiting, handler))
        self._showwarning = warnings.showwarning
        warnings.showwarning = self._hold_warning
        self._holds = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and users_mistake(error) is not None:
            self._waiting.clear()
        self.release()

    def release(self) -> None:
        """Show what has waited, in order, and hold back nothing more."""
        if self._holds:
            self._holds = False
            warnings.showwarning = self._showwarning
            for handler in self._handlers:
                for held in [each for each in handler.filters if isinstance(each, _Holder)]:
                    handler.removeFilter(held)
            for show in self._waiting:
                show()
            self._waiting.clear()

    def _hold_warning(self, *args: Any, **keywords: Any) -> None:
        # The signature of warnings.showwarning, which is called by position and by keyword.
        show = self._showwarning
        self._waiting.append(lambda: show(*args, **keywords))


class _Holder(logging.Filter):
    """Keeps the records of one handler instead of letting them pass."""

    def __init__(self, waiting: list[Callable[[], object]], handler: logging.Handler) -> None:
        super().__init__()
        self._waiting = waiting
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record; nothing is shown now."""
        self._waiting.append(lambda: self._handler.handle(record))
        return False
