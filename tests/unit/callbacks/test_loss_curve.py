"""Does the curve have the losses that were logged, over resumes, in bounded memory?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_megatron.callbacks import LossCurve
from lightning_megatron.callbacks.loss_curve import Curve
from lightning_megatron.errors import ConfigError
from tests.unit.callbacks.toy import ToyModule, loader, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

LOSSES = [8.0, 7.0, 6.5, 6.25, 6.0, 5.75, 5.5, 5.25, 5.0, 4.75]
EVERY_THIRD_STEP = {"val_check_interval": 3, "check_val_every_n_epoch": None}
PNG = b"\x89PNG\r\n"


def test_points_are_the_logged_losses_at_their_steps(tmp_path: Path) -> None:
    curve = LossCurve(every_n_steps=2)
    trainer = toy_trainer(tmp_path, [curve], **EVERY_THIRD_STEP, num_sanity_val_steps=-1)
    trainer.fit(ToyModule(LOSSES, [9.0, 6.0, 5.0]), loader(3), loader(2))
    assert curve.train.points == [(1, 8.0), (2, 7.0), (4, 6.25), (6, 5.75)]
    assert curve.validation.points == [(0, 9.0), (3, 6.0), (6, 5.0)]


def test_a_validation_of_a_few_batches_only_is_no_point(tmp_path: Path) -> None:
    curve = LossCurve()
    trainer = toy_trainer(tmp_path, [curve], **EVERY_THIRD_STEP, num_sanity_val_steps=1)
    trainer.fit(ToyModule(LOSSES, [9.0, 6.0, 5.0]), loader(3), loader(2))
    assert [step for step, _ in curve.validation.points] == [3, 6]


def test_a_picture_is_written_without_a_logger_into_the_root_folder(tmp_path: Path) -> None:
    toy_trainer(tmp_path, [LossCurve()]).fit(ToyModule(LOSSES), loader(6))
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(PNG)


def test_a_picture_is_written_into_the_loggers_folder(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    trainer = toy_trainer(tmp_path, [LossCurve(filename="loss.png")], logger=CSVLogger(tmp_path, name="run"))
    trainer.fit(ToyModule(LOSSES), loader(6))
    assert (tmp_path / "run" / "version_0" / "loss.png").read_bytes().startswith(PNG)


def test_a_run_that_fails_leaves_a_picture_of_what_it_did(tmp_path: Path) -> None:
    with pytest.raises(IndexError):  # the toy has no loss for the third step
        toy_trainer(tmp_path, [LossCurve()]).fit(ToyModule([3.0, 2.0]), loader(6))
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(PNG)


def test_a_resumed_run_continues_the_curve_and_marks_where(tmp_path: Path) -> None:
    first = toy_trainer(tmp_path, [LossCurve()], max_steps=4)
    first.fit(ToyModule(LOSSES), loader(10))
    checkpoint = tmp_path / "last.ckpt"
    first.save_checkpoint(checkpoint)
    assert torch.load(checkpoint, weights_only=True)["callbacks"]
    curve = LossCurve()
    toy_trainer(tmp_path, [curve], max_steps=8).fit(ToyModule(LOSSES), loader(10), ckpt_path=checkpoint)
    assert curve.train.points == list(enumerate(LOSSES[:8], start=1))
    assert curve.resumed_at == [4]


def test_the_same_callback_in_a_new_run_starts_a_new_curve(tmp_path: Path) -> None:
    curve = LossCurve()
    for _ in range(2):
        toy_trainer(tmp_path, [curve], max_steps=3).fit(ToyModule(LOSSES), loader(6))
    assert curve.train.points == [(1, 8.0), (2, 7.0), (3, 6.5)]
    assert curve.resumed_at == []


def test_a_missing_matplotlib_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatron.callbacks.loss_curve.has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"loss_curve.png cannot be drawn without matplotlib; pip install"):
        toy_trainer(tmp_path, [LossCurve()]).fit(ToyModule(LOSSES), loader(6))


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0 must be at least 1"):
        LossCurve(every_n_steps=0)
    with pytest.raises(ConfigError, match="max_points=1 must be at least 2"):
        LossCurve(max_points=1)


def test_a_long_curve_stays_bounded_and_evenly_spaced() -> None:
    curve = Curve(max_points=10)
    for step in range(1000):
        curve.add(step, float(step))
    steps = [step for step, _ in curve.points]
    assert 5 <= len(steps) <= 10
    assert {later - earlier for earlier, later in zip(steps, steps[1:], strict=False)} == {128}
    assert steps[0] == 0
