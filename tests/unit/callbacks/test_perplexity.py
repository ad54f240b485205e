"""Does the report say what the validations measured?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.callbacks import PerplexityReport
from tests.unit.callbacks.toy import ToyModule, loader, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def _fit(folder: Path, report: PerplexityReport, val_losses: list[float], **options: Any) -> Any:
    trainer = toy_trainer(folder, [report], val_check_interval=2, check_val_every_n_epoch=None, **options)
    module = ToyModule([1.0] * 20, val_losses)
    trainer.fit(module, loader(4), loader(3))
    return trainer


def test_the_line_has_perplexity_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(tmp_path, PerplexityReport(), [math.log(4187.2), 6.0, 5.0, math.log(61.3)], num_sanity_val_steps=-1)
    assert "validation perplexity: 4187.2 before, 61.3 after 6 steps\n" in capsys.readouterr().out


def test_a_partial_validation_before_training_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _fit(tmp_path, PerplexityReport(), [math.log(50.0), 3.0, 3.0, math.log(8.0)], num_sanity_val_steps=2)
    assert "perplexity: 50.0 before (on the first batches only), 8.0 after 6 steps" in capsys.readouterr().out


def test_a_resumed_run_still_knows_the_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": -1}
    trainer = toy_trainer(tmp_path, [PerplexityReport()], **options)
    trainer.fit(ToyModule([1.0] * 20, [math.log(900.0), 4.0, 4.0, 4.0]), loader(4), loader(3))
    checkpoint = tmp_path / "last.ckpt"
    trainer.save_checkpoint(checkpoint)
    assert torch.load(checkpoint, weights_only=True)["callbacks"]
    resumed = toy_trainer(tmp_path, [PerplexityReport()], max_steps=10, **options)
    resumed.fit(ToyModule([1.0] * 20, [3.0, math.log(7.0)]), loader(4), loader(3), ckpt_path=checkpoint)
    assert "validation perplexity: 900.0 before, 7.0 after 10 steps" in capsys.readouterr().out


def test_the_same_callback_in_a_new_run_forgets_the_old_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = PerplexityReport()
    _fit(tmp_path, report, [1.0, 1.0, 1.0, 1.0], num_sanity_val_steps=-1)
    toy_trainer(tmp_path, [report]).fit(ToyModule([1.0] * 6), loader(6))
    assert "no validation logged val_loss" in capsys.readouterr().out.splitlines()[-1]
