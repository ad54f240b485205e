"""Does a run go on from a converted checkpoint as from its own, with its moments, schedule, place and random states?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.conversion import convert
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.distributed import open_distributed
from lightning_megatron.convert.targets.distributed import write_distributed
from tests.checkpoint.corpus import make_corpus
from tests.checkpoint.runs import NO_DROPOUT, VOCAB_SIZE, Run, Trace, differences, fit, read_tensors
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def trained_and_saved(run: Run, path: Path) -> Trace:
    """Train, and save as ``path``."""
    trainer, trace = fit(run)
    trainer.save_checkpoint(path)
    return trace


def trained(run: Run) -> Trace:
    """Train."""
    return fit(run)[1]


# ---- tests ----------------------------------------------------------------------------------------------------------


def _converted(source: Path, target: Path, **options: Any) -> Path:
    return _written(open_distributed(source, None), target, **options)


def _written(source: Any, target: Path, **options: Any) -> Path:
    given = {"load_path": source.path, "save_path": target, "to": "megatron", "make_vocab_size_divisible_by": 8}
    write_distributed(source, ConvertOptions(**{**given, **options}))
    return target


def _assert_same_traces(found: list[Trace], expected: list[Trace]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.steps == other.steps
        assert differences(other.state, one.state) == []


_PADDED = {"make_vocab_size_divisible_by": 8}


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        pytest.param({"tp": 2}, {"tp": 2}, {}, id="the same layout, dropout included"),
        pytest.param({"pp": 2, "vpp": 2}, {"tp": 2}, NO_DROPOUT, id="pp2 vpp2 to tp2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_goes_on_exactly(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], model: dict[str, Any]
) -> None:
    run = Run(strategy=before, model=model, module=_PADDED, trainer={"max_steps": 3})
    run_ranks(trained_and_saved, 2, run, tmp_path / "a.ckpt")
    converted = _converted(tmp_path / "a.ckpt", tmp_path / "b.ckpt", **after)

    resumed = Run(strategy=after, model=model, module=_PADDED, trainer={"max_steps": 5})
    expected = run_ranks(trained, 2, resumed.but(ckpt_path=str(tmp_path / "a.ckpt")))
    found = run_ranks(trained, 2, resumed.but(ckpt_path=str(converted)))

    assert list(found[0].steps) == [4, 5]
    _assert_same_traces(found, expected)


@pytest.mark.parametrize(
    ("precision", "optimizer", "distributed_optimizer"),
    [
        ("bf16-mixed", {}, True),
        pytest.param("32-true", {"name": "sgd"}, False, marks=pytest.mark.exhaustive),
    ],
)
def test_every_kind_of_optimizer_travels(
    tmp_path: Path, precision: str, optimizer: dict[str, Any], distributed_optimizer: bool
) -> None:
    run = Run(
        strategy={"tp": 2, "distributed_optimizer": distributed_optimizer},
        module=_PADDED,
        optimizer=optimizer,
        trainer={"max_steps": 2, "precision": precision},
    )
    run_ranks(trained_and_saved, 2, run, tmp_path / "a.ckpt")

    _converted(tmp_path / "a.ckpt", tmp_path / "b.ckpt", tp=1, pp=2)

    expected, found = read_tensors(tmp_path / "a.ckpt"), read_tensors(tmp_path / "b.ckpt")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        rows = VOCAB_SIZE if "word_embeddings" in name else None
        assert found[name].dtype is tensor.dtype
        assert found[name][:rows].equal(tensor[:rows]), name
    assert found["optimizer.state.exp_avg.embedding.word_embeddings.weight"].abs().sum() > 0
    (before, meta_before), (after, meta_after) = (
        [torch.load(tmp_path / folder / name, weights_only=True) for name in ("common.pt", "meta.pt")]
        for folder in ("a.ckpt", "b.ckpt")
    )
    assert {name: str(value) for name, value in after["optimizer"].items()} == {
        name: str(value) for name, value in before["optimizer"].items()
    }
    assert meta_after["optimizer_format"] == meta_before["optimizer_format"]
    (resumed,) = run_ranks(trained, 1, run.but(strategy={"tp": 1}, ckpt_path=str(tmp_path / "b.ckpt")))
    assert resumed.state["global_step"] == 2


def test_a_run_goes_through_megatron_lms_format_and_back(tmp_path: Path) -> None:
    run = Run(
        model=NO_DROPOUT, module=_PADDED, trainer={"max_steps": 5, "max_epochs": -1}, indexed=make_corpus(tmp_path)
    )
    run_ranks(trained_and_saved, 2, run.but(strategy={"tp": 2}, trainer={"max_steps": 3}), tmp_path / "a.ckpt")
    options: dict[str, Any] = {"make_vocab_size_divisible_by": 8, "tp": 2}
    legacy, back = tmp_path / "legacy", tmp_path / "b.ckpt"
    convert(ConvertOptions(load_path=tmp_path / "a.ckpt", save_path=legacy, to="megatron-legacy", pp=2, **options))
    convert(ConvertOptions(load_path=legacy, save_path=back, to="megatron", **options))

    before, after = read_tensors(tmp_path / "a.ckpt"), read_tensors(back)
    assert after.keys() == before.keys()
    assert [name for name, tensor in before.items() if not after[name].equal(tensor)] == []
    resumed = run.but(strategy={"tp": 2})
    expected = run_ranks(trained, 2, resumed.but(ckpt_path=str(tmp_path / "a.ckpt")))
    found = run_ranks(trained, 2, resumed.but(ckpt_path=str(back)))
    assert [trace.steps for trace in found] == [trace.steps for trace in expected]
