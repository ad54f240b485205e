"""Does the curve have the losses that were logged, over resumes, in bounded memory?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lightning_megatron.callbacks import LossCurve
from lightning_megatron.callbacks.loss_curve import Curve
from lightning_megatron.callbacks.loss_picture import LossHistory, draw_loss_picture, perplexity_ticks, smoothed
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


def test_a_restored_curve_goes_on_like_one_that_was_never_stored() -> None:
    whole, first, second = Curve(8), Curve(8), Curve(8)
    for step in range(20):
        whole.add(step, 0.5 * step)
        first.add(step, 0.5 * step)
    second.load_state_dict(first.state_dict())
    for step in range(20, 61):
        whole.add(step, 0.5 * step)
        second.add(step, 0.5 * step)
    assert second.points == whole.points


def test_smoothing_does_not_move_a_straight_line() -> None:
    line = [9.0 - 0.01 * step for step in range(500)]
    assert smoothed(line)[:490] == pytest.approx(line[:490])  # the window of 21 is cut off at the end


def test_smoothing_takes_the_mean_of_the_neighbours_and_skips_what_is_not_finite() -> None:
    assert smoothed([1.0, 4.0, 1.0, 7.0]) == pytest.approx([1.0, 2.0, 4.0, 4.0])
    assert smoothed([2.0, math.nan, math.inf, 4.0]) == pytest.approx([2.0, 2.0, 4.0, 4.0])
    assert math.isnan(smoothed([math.nan, 1.0])[0])


def test_perplexity_ticks_are_round_and_inside_the_axis() -> None:
    assert perplexity_ticks(math.log(40.0), math.log(1500.0)) == [50.0, 100.0, 200.0, 500.0, 1000.0]
    assert len(perplexity_ticks(0.0, 29.0)) <= 10
    assert perplexity_ticks(0.0, 400.0) == []


@pytest.mark.parametrize("log_scale", [False, True])
def test_pictures_of_odd_histories_can_be_drawn(tmp_path: Path, log_scale: bool) -> None:
    histories = {
        "one": LossHistory(train=[(1, 4.0)]),
        "nan": LossHistory(train=[(1, math.nan), (2, math.nan)], validation=[(2, math.inf)]),
        "huge": LossHistory(train=[(1, 4.0), (2, 1e6)], resumed_at=[1, 2]),
    }
    for name, history in histories.items():
        draw_loss_picture(history, tmp_path / f"{name}.png", log_scale=log_scale)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
