"""Does a run go on when it is resumed with other sizes of tp, pp, vpp and dp?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    LLAMA,
    NO_DROPOUT,
    NUM_SAMPLES,
    VOCAB_SIZE,
    Run,
    Trace,
    fit,
    read_tensors,
    rows_dataset,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

Layout = tuple[int, dict[str, Any]]
"""World size and arguments of the strategy."""

ONE: Layout = (1, {})
TP2: Layout = (2, {"tp": 2})
TP2_SP: Layout = (2, {"tp": 2, "sequence_parallel": True})
PP2: Layout = (2, {"pp": 2})
PP2_VPP2: Layout = (2, {"pp": 2, "vpp": 2})
DP2: Layout = (2, {})
TP2_PP2_SP: Layout = (4, {"tp": 2, "pp": 2, "sequence_parallel": True})


def _unsharded(layout: Layout) -> Layout:
    """The layout without distributed optimizer."""
    return layout[0], {**layout[1], "distributed_optimizer": False}


def _train(run: Run) -> Trace:
    return fit(run)[1]


def _train_and_save(run: Run, path: Path) -> Trace:
    trainer, trace = fit(run)
    trainer.save_checkpoint(path)
    return trace


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(ONE, TP2_SP, id="one rank to tp2 sp"),
        pytest.param(TP2_PP2_SP, ONE, id="tp2 pp2 sp to one rank"),
        pytest.param(PP2_VPP2, DP2, id="pp2 vpp2 to dp2"),
        pytest.param(DP2, PP2, id="dp2 to pp2"),
        pytest.param(_unsharded(DP2), _unsharded(PP2_VPP2), id="dp2 to pp2 vpp2, unsharded optimizer"),
    ],
)
def test_the_loss_curve_goes_on(tmp_path: Path, before: Layout, after: Layout) -> None:
    run = Run(model=NO_DROPOUT, trainer={"max_steps": 7})
    (whole,) = run_ranks(_train, 1, run)
    path = tmp_path / "a.ckpt"
    run_ranks(_train_and_save, before[0], run.but(strategy=before[1], trainer={"max_steps": 3}), path)

    resumed = run_ranks(_train, after[0], run.but(strategy=after[1], ckpt_path=str(path)))

    for step in range(4, 8):
        for trace in resumed:
            assert trace.steps[step]["loss"] == pytest.approx(whole.steps[step]["loss"], rel=1e-5)
            # The norm of small gradients has fewer digits than the loss.
            assert trace.steps[step]["grad_norm"] == pytest.approx(whole.steps[step]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param({}, [ONE, TP2_SP, PP2_VPP2, TP2_PP2_SP, DP2, ONE], id="tied"),
        pytest.param(LLAMA, [TP2_PP2_SP, PP2, TP2, ONE], id="untied"),
        pytest.param({}, [_unsharded(each) for each in (TP2, PP2_VPP2, DP2, TP2)], id="unsharded optimizer"),
    ],
)
def test_weights_and_moments_pass_through_other_layouts_unchanged(
    tmp_path: Path, model: dict[str, Any], layouts: list[Layout]
) -> None:
    """The padded vocabulary is 104 rows at tp=1 and 112 at tp=2; only the 100 real rows are compared."""
    run = Run(model=model, module={"make_vocab_size_divisible_by": 8}, trainer={"max_steps": 2})
    paths = [tmp_path / f"{index}.ckpt" for index in range(len(layouts))]
    for index, (world_size, strategy) in enumerate(layouts):
        # From the second on, max_steps is reached already: what was loaded is saved again.
        resumed_from = str(paths[index - 1]) if index else None
        run_ranks(_train_and_save, world_size, run.but(strategy=strategy, ckpt_path=resumed_from), paths[index])

    original = read_tensors(paths[0])
    for path, (_, strategy) in zip(paths[1:], layouts[1:], strict=True):
        copy = read_tensors(path)
        assert copy.keys() == original.keys()
        for name, tensor in original.items():
            rows = VOCAB_SIZE if "word_embeddings" in name or "output_layer" in name else None
            assert tensor[:rows].equal(copy[name][:rows]), f"{name} changed on the way to {strategy}"
    assert original["optimizer.state.exp_avg.embedding.word_embeddings.weight"][:VOCAB_SIZE].abs().sum() > 0


def _messages_of(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(run)
    return [str(each.message) for each in caught if "random states" in str(each.message)]


def test_rank_0_says_when_random_states_stay_behind(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 1})
    path = tmp_path / "a.ckpt"
    run_ranks(_train_and_save, 1, run, path)
    resumed = run.but(trainer={"max_steps": 2}, ckpt_path=str(path))

    assert run_ranks(_messages_of, 1, resumed) == [[]]
    (of_rank_0,), of_rank_1 = run_ranks(_messages_of, 2, resumed.but(strategy={"tp": 2}))
    assert f"{path} was written at tp=1 pp=1 vpp=1 cp=1 dp=1 and this run is at tp=2 pp=1 vpp=1 cp=1 dp=1" in of_rank_0
    assert of_rank_1 == []


def _loader_of_random_order(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(), batch_size=GLOBAL_BATCH // dp, shuffle=True)


def test_an_order_drawn_from_global_random_numbers_goes_on_in_later_epochs_too(tmp_path: Path) -> None:
    own_sampler = {"max_steps": 8, "use_distributed_sampler": False}
    run = Run(model=NO_DROPOUT, loader=_loader_of_random_order, trainer=own_sampler)
    (whole,) = run_ranks(_train, 1, run)
    run_ranks(_train_and_save, 1, run.but(trainer={"max_steps": 3}), tmp_path / "a.ckpt")

    resumed = run_ranks(_train, 2, run.but(strategy={"tp": 2}, ckpt_path=str(tmp_path / "a.ckpt")))

    for trace in resumed:
        assert {step: numbers["tokens"] for step, numbers in trace.steps.items()} == {
            step: whole.steps[step]["tokens"] for step in range(4, 9)
        }


@pytest.mark.parametrize(("before", "after"), [(ONE, DP2), (DP2, ONE)])
def test_each_sample_of_the_epoch_is_taken_once_though_dp_changes(
    tmp_path: Path, before: Layout, after: Layout
) -> None:
    run = Run(trainer={"max_steps": 5})
    first = run_ranks(_train_and_save, before[0], run.but(trainer={"max_steps": 2}), tmp_path / "a.ckpt")

    second = run_ranks(_train, after[0], run.but(ckpt_path=str(tmp_path / "a.ckpt")))

    rows = [tuple(row) for trace in first + second for numbers in trace.steps.values() for row in numbers["tokens"]]
    assert sorted(rows) == sorted(tuple(each["input_ids"].tolist()) for each in rows_dataset(NUM_SAMPLES))
