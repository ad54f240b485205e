"""A run goes on with other sizes of tp, pp, vpp and dp, with or without distributed optimizer.

Megatron's buckets are padded to multiples of dp, so dp = 3 puts everything into other places than dp = 1, 2 and 4 do.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.corpus import make_corpus
from tests.checkpoint.runs import (
    VOCAB_SIZE,
    Run,
    differences,
    fit,
    read_plain_state,
    read_tensors,
    rows_dataset,
    train,
    train_and_save,
)
from tests.parity.training import MODELS
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

Layout = tuple[int, dict[str, Any]]
"""World size and arguments of the strategy."""

ONE: Layout = (1, {})
TP2: Layout = (2, {"tp": 2})
TP2_SP: Layout = (2, {"tp": 2, "sequence_parallel": True})
PP2: Layout = (2, {"pp": 2})
PP3: Layout = (3, {"pp": 3})
PP4: Layout = (4, {"pp": 4})
PP2_VPP2: Layout = (2, {"pp": 2, "vpp": 2})
DP2: Layout = (2, {})
DP3: Layout = (3, {})
DP4: Layout = (4, {"num_microbatches": 1})
TP2_PP2_SP: Layout = (4, {"tp": 2, "pp": 2, "sequence_parallel": True})
TP2_DP2: Layout = (4, {"tp": 2})

BATCH = 12
"""Rows of a step: a multiple of every dp."""
SAMPLES = 48
"""Four steps an epoch."""


def _unsharded(layout: Layout) -> Layout:
    """The layout without distributed optimizer."""
    return layout[0], {**layout[1], "distributed_optimizer": False}


def _loader(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(SAMPLES), batch_size=BATCH // dp, shuffle=True)


def _loader_of_pairs(dp: int) -> Any:
    """For BERT, which predicts the order of two sentences too, and T5."""
    from torch.utils.data import DataLoader

    rows = [
        {
            "input_ids": row["input_ids"],
            "labels": row["input_ids"],
            "token_type_ids": (row["input_ids"] > VOCAB_SIZE // 2).long(),
            "next_sentence_label": row["input_ids"][0] % 2,
        }
        for row in rows_dataset(SAMPLES, vocab_size=80)
    ]
    return DataLoader(rows, batch_size=BATCH // dp, shuffle=True)  # type: ignore[arg-type]


def _loader_of_targets(dp: int) -> Any:
    from torch.utils.data import DataLoader

    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows_dataset(SAMPLES, vocab_size=80)]
    return DataLoader(rows, batch_size=BATCH // dp, shuffle=True)  # type: ignore[arg-type]


SIX_LAYERS = {"n_layer": 6}
BERT: dict[str, Any] = {
    "model_type": "megatron-bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}
FP16: dict[str, Any] = {
    "trainer": {"precision": "16-mixed"},
    "optimizer": {"initial_loss_scale": 2.0**9, "loss_scale_window": 2},
}


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        pytest.param({}, [ONE, TP2_SP, PP2_VPP2, PP4, DP3], id="tied"),
        pytest.param(
            {"model": SIX_LAYERS, "trainer": {"precision": "bf16-mixed"}},
            [DP4, PP3, _unsharded(DP3), TP2_DP2],
            id="tied, bf16",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(FP16, [DP2, _unsharded(TP2), DP3], id="fp16"),
        pytest.param(
            {"optimizer": {"name": "sgd"}}, [DP3, _unsharded(TP2), DP2], id="sgd", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"model": MODELS["t5"], "loader": _loader_of_targets}, [DP2, PP3, _unsharded(PP2)], id="t5, 7 layers"
        ),
        pytest.param(
            {"model": BERT, "loader": _loader_of_pairs},
            [TP2_PP2_SP, DP3, _unsharded(PP2)],
            id="bert",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_weights_and_moments_pass_through_other_layouts_unchanged(
    tmp_path: Path, changes: dict[str, Any], layouts: list[Layout]
) -> None:
    """The padded vocabulary is 104 rows at tp=1 and 112 at tp=2; only the real rows are compared."""
    run = Run(loader=_loader, module={"make_vocab_size_divisible_by": 8}, trainer={"max_steps": 3}).but(**changes)
    paths = [tmp_path / f"{index}.ckpt" for index in range(len(layouts))]
    for index, (world_size, strategy) in enumerate(layouts):
        # From the second on, max_steps is reached already: what was loaded is saved again.
        resumed_from = str(paths[index - 1]) if index else None
        run_ranks(train_and_save, world_size, run.but(strategy=strategy, ckpt_path=resumed_from), paths[index])

    original, plain = read_tensors(paths[0]), read_plain_state(paths[0])
    for path, (_, strategy) in zip(paths[1:], layouts[1:], strict=True):
        copy = read_tensors(path)
        assert copy.keys() == original.keys()
        for name, tensor in original.items():
            rows = _vocabulary(run) if "word_embeddings" in name or "output_layer" in name else None
            assert tensor[:rows].equal(copy[name][:rows]), f"{name} changed on the way to {strategy}"
        assert differences(plain, read_plain_state(path)) == [], f"it changed on the way to {strategy}"
    assert original["optimizer.state.exp_avg.embedding.word_embeddings.weight"][: _vocabulary(run)].abs().sum() > 0
    if "precision" in run.trainer:
        weight = "decoder.layers.mlp.linear_fc1.weight"
        assert original[weight].dtype != original[f"optimizer.state.param.{weight}"].dtype
        assert original[f"optimizer.state.param.{weight}"].to(original[weight].dtype).equal(original[weight])
    if changes is FP16:
        # 512, doubled after two good steps; one more has been counted since.
        assert plain[".grad_scaler.scale"] == 2.0**10
        assert plain[".grad_scaler.growth_tracker"] == 1


def _vocabulary(run: Run) -> int:
    return int(run.model.get("vocab_size", VOCAB_SIZE))


def _messages_of(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(run)
    return [str(each.message) for each in caught if "random states" in str(each.message)]


def test_rank_0_says_when_random_states_stay_behind(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 1})
    path = tmp_path / "a.ckpt"
    run_ranks(train_and_save, 1, run, path)
    resumed = run.but(trainer={"max_steps": 2}, ckpt_path=str(path))

    assert run_ranks(_messages_of, 1, resumed) == [[]]
    (of_rank_0,), of_rank_1 = run_ranks(_messages_of, 2, resumed.but(strategy={"tp": 2}))
    assert f"{path} was written at tp=1 pp=1 vpp=1 cp=1 dp=1 and this run is at tp=2 pp=1 vpp=1 cp=1 dp=1" in of_rank_0
    assert of_rank_1 == []


def test_each_sample_of_the_epoch_is_taken_once_though_dp_changes(tmp_path: Path) -> None:
    run = Run(loader=_loader, trainer={"max_steps": 4})
    first = run_ranks(train_and_save, 3, run.but(trainer={"max_steps": 2}), tmp_path / "a.ckpt")

    second = run_ranks(train, 2, run.but(ckpt_path=str(tmp_path / "a.ckpt")))

    rows = [tuple(row) for trace in first + second for numbers in trace.steps.values() for row in numbers["tokens"]]
    assert sorted(rows) == sorted(tuple(each["input_ids"].tolist()) for each in rows_dataset(SAMPLES))


def test_indexed_data_goes_on_with_the_next_sample_though_dp_changes(tmp_path: Path) -> None:
    run = Run(indexed=make_corpus(tmp_path), global_batch=BATCH, trainer={"max_steps": 5})
    (whole,) = run_ranks(train, 1, run)
    run_ranks(train_and_save, 3, run.but(trainer={"max_steps": 2}), tmp_path / "a.ckpt")

    resumed = run_ranks(train, 4, run.but(strategy={"tp": 2}, ckpt_path=str(tmp_path / "a.ckpt")))

    for step in range(3, 6):
        rows = [row for trace in resumed[::2] for row in trace.steps[step]["tokens"]]
        assert sorted(rows) == sorted(whole.steps[step]["tokens"])
