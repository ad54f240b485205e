"""Does the line fit into the terminal, and does a file get few of them?"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_megatron.callbacks import ProgressLine
from tests.unit.callbacks.toy import ToyModule, loader, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class _Verbose(ToyModule):
    def on_train_batch_end(self, *_: object) -> None:
        for number in range(9):
            self.log(f"quantity_{number}", 12345.678 if number else 0.5, prog_bar=True)


def _fit(folder: Path, line: ProgressLine) -> None:
    trainer = toy_trainer(folder, [line], enable_progress_bar=True, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(_Verbose([1.0] * 20, [1.0] * 9), loader(4), loader(3))


def test_on_a_terminal_it_is_one_row_that_does_not_wrap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _fit(tmp_path, ProgressLine())
    rows = re.split(r"[\r\n]", capsys.readouterr().out.replace("\x1b[K", ""))
    assert max(map(len, rows)) == 59
    assert rows[-2].startswith("step 6/6, 00:00, 00:00 left, quantity_0 0.5, quantity_1")


def test_a_file_gets_the_first_and_the_last_step_and_some_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(tmp_path, ProgressLine())
    steps = [row.split(",")[0] for row in capsys.readouterr().out.splitlines() if row.startswith("step")]
    assert steps == ["step 1/6", "step 6/6", "step 6/6"]
    _fit(tmp_path, ProgressLine(every_seconds=0))
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(",")[0] for row in rows if row.startswith("step")] == [
        f"step {n}/6" for n in (1, 2, 3, 4, 5, 6, 6)
    ]
    assert "validate: batch 3" in rows
