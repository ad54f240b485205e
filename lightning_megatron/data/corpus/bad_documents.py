"""What happens to lines that are no documents: does the run end, or are they counted and left out?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lightning_megatron.data.corpus.documents import BadDocument
from lightning_megatron.errors import DataError

MAX_REPORTED = 20
"""Bad documents of a run that are reported one by one; the others are counted."""


class BadDocuments:
    """Takes the bad documents of all pieces in input order.

    Workers number lines from the beginning of their piece: where that is in a file, only who sees all pieces can tell.

    Args:
        on_error: "fail" ends the run at the first one, "skip" leaves it out.
        report: Prints a line.
    """

    def __init__(self, on_error: Literal["skip", "fail"], report: Callable[[str], None]) -> None:
        self.count = 0
        """How many were left out."""
        self._on_error = on_error
        self._report = report
        self._reported = 0
        self._path = ""
        self._units_before = 0

    def add(self, path: str, described: Sequence[BadDocument], count: int, num_units: int) -> None:
        """Take those of the next piece.

        Args:
            path: The file of the piece; of several text files, any one.
            described: The first bad documents in it.
            count: How many are bad.
            num_units: Its lines or rows.

        Raises:
            DataError: For the first one, with its place, if ``on_error`` is "fail".
        """
        if path != self._path:
            self._path, self._units_before = path, 0
        for bad in described:
            message = self._describe(bad)
            if self._on_error == "fail":
                raise DataError(message)
            if self._reported < MAX_REPORTED:
                self._report(f"skipped: {message}")
                self._reported += 1
                if self._reported == MAX_REPORTED:
                    self._report("skipped: more of them are only counted")
        self.count += count
        self._units_before += num_units

    def _describe(self, bad: BadDocument) -> str:
        place = "" if bad.unit == "file" else f", {bad.unit} {self._units_before + bad.number}"
        return f"{bad.path}{place} {bad.problem}; {bad.fix}"
