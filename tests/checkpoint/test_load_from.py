"""``load_from`` starts a new run from the weights of a checkpoint; weights-only checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    NO_DROPOUT,
    Run,
    callback,
    checkpoints_at,
    fit,
    live_state,
    make_module,
    make_trainer,
    read_tensors,
    rows_dataset,
    train,
)
from tests.marks import exhaustive
from tests.ranks import RankError, run_ranks
from tests.recording import recorded_log, recorded_warnings

TP2: dict[str, Any] = {"tp": 2}
RUN = Run(model=NO_DROPOUT, trainer={"max_steps": 3}, strategy=TP2)


def _ordered_loader(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(12)[:GLOBAL_BATCH], batch_size=GLOBAL_BATCH // dp)


def _train(run: Run, folder: Path) -> dict[str, Any]:
    """Save each step; return the final state and validation loss."""
    trainer, trace = fit(run, checkpoints_at(folder))
    (metrics,) = trainer.validate(
        trainer.lightning_module,
        _ordered_loader(trainer.strategy.data_parallel_size),
        verbose=False,
    )
    return {"state": trace.state, "loss": metrics["val_loss"]}


Trained = tuple[Path, list[dict[str, Any]]]
"""Directory with a checkpoint of each step; by rank, final state and loss."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    return folder, run_ranks(_train, 2, RUN, folder)


def _begin(run: Run) -> dict[str, Any]:
    """Initial and final state, losses and learning rates of a run; the loss in another Trainer's validation."""
    state: dict[str, Any] = {}
    trainer, trace = fit(
        run,
        callback(on_train_start=lambda trainer, _: state.update(live_state(trainer))),
    )
    loader = _ordered_loader(trainer.strategy.data_parallel_size)
    (after,) = make_trainer(run).validate(
        trainer.lightning_module,
        loader,
        verbose=False,
    )
    return {
        "state": state,
        "losses": {step: values["loss"] for step, values in trace.steps.items()},
        "lr": [values["lr"] for values in trace.steps.values()],
        "end": trace.state,
        "after": after["val_loss"],
    }


def _weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("weights.")}


@pytest.mark.parametrize(
    "by", ["load_from a directory, with moments", "load_from", "load_weights_only"]
)
def test_new_run_loads_weights_and_optionally_moments(trained: Trained, by: str) -> None:
    from lightning_megatron import LoadFrom, LRSchedule

    folder, before = trained
    path = str(folder / "step=3.ckpt")
    with_moments = by.endswith("moments")
    options = LoadFrom(path=str(folder) if with_moments else path, optimizer=with_moments)
    run = RUN.but(
        strategy={"load_weights_only": True}
        if by == "load_weights_only"
        else {"load_from": options},
        seed=99,
        # Nothing has been saved yet, so "last" finds nothing.
        ckpt_path=path if by == "load_weights_only" else "last",
        trainer={"max_steps": 3},
        module={
            "lr": 1e-3,
            "lr_schedule": LRSchedule(warmup_steps=2, init_lr=1e-4),
        },
        loader=_ordered_loader,
    )

    for old, new in zip(before, run_ranks(_begin, 2, run), strict=True):
        weights = _weights(old["state"])
        assert weights
        assert all(new["state"][name].equal(value) for name, value in weights.items())
        assert new["state"]["global_step"] == 0
        assert list(new["losses"]) == [1, 2, 3]
        assert new["losses"][1] == pytest.approx(old["loss"], rel=1e-6)
        # Recorded after the step: the rate of the next step.
        assert new["lr"] == [pytest.approx([lr, lr]) for lr in (5.5e-4, 1e-3, 1e-3)]
        moments = {
            name: value for name, value in old["state"].items() if "exp_avg" in name and value.any()
        }
        assert moments
        loaded = [
            name in new["state"] and new["state"][name].equal(value)
            for name, value in moments.items()
        ]
        assert all(loaded) if with_moments else not any(loaded)
        # Validation with the same option does not load the weights again.
        assert new["after"] != pytest.approx(old["loss"], rel=1e-4)


def _losses_with_and_without_a_search(run: Run) -> list[list[float]]:
    from lightning.pytorch.callbacks import LearningRateFinder

    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    traces = [fit(run, *callbacks)[1] for callbacks in ((finder,), ())]
    return [[step["loss"] for step in trace.steps.values()] for trace in traces]


def test_search_of_a_learning_rate_leaves_no_moments(trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained
    run = RUN.but(
        strategy={"load_weights_only": True},
        ckpt_path=str(folder / "step=3.ckpt"),
        trainer={"default_root_dir": str(tmp_path)},
    )
    for searched, plain in run_ranks(_losses_with_and_without_a_search, 2, run):
        assert len(plain) == 3
        assert searched == plain


def _begin_and_log(run: Run) -> tuple[dict[str, Any], str]:
    from lightning_utilities.core import rank_zero

    with recorded_log(rank_zero.log.name) as log:
        result = _begin(run)
    return result, log.getvalue()


def test_moments_of_another_optimizer_begin_at_zero(trained: Trained) -> None:
    folder, before = trained
    run = RUN.but(
        strategy={"load_from": str(folder / "step=3.ckpt")},
        optimizer={"name": "muon"},
        loader=_ordered_loader,
    )
    (new, text), _ = run_ranks(_begin_and_log, 2, run)
    assert "The moments of muon begin at zero: the checkpoint has those of adam" in text
    assert new["losses"][1] == pytest.approx(before[0]["loss"], rel=1e-6)
    assert not any(value.any() for name, value in new["state"].items() if "exp_avg" in name)


def test_resume_ignores_load_from(trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained
    shutil.copytree(folder / "step=2.ckpt", tmp_path / "a.ckpt")
    run = RUN.but(
        strategy={"load_from": str(tmp_path / "missing.ckpt")},
        ckpt_path=str(tmp_path / "a.ckpt"),
    )
    assert [min(result["losses"]) for result in run_ranks(_begin, 2, run)] == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "load_from must not be empty"),  # not the working directory
        ({"path": "nowhere"}, "nowhere does not exist"),
        ({"path": ".", "step": 7}, "has no complete checkpoint of step=7; those it has: 1, 2, 3"),
        (
            {"path": "step=2.ckpt", "step": 3},
            "has no complete checkpoint of step=3; those it has: 2",
        ),
    ],
)
def test_missing_load_from_is_refused_before_any_process_starts(
    trained: Trained,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_megatron import ConfigError, LoadFrom

    monkeypatch.chdir(trained[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=message):
        fit(RUN.but(strategy={"load_from": LoadFrom(**options)}))


def test_weights_of_another_architecture_are_refused_even_if_not_strict(trained: Trained) -> None:
    """Though their shapes match."""
    from lightning_megatron import LoadFrom

    strategy = {
        "tp": 1,
        "load_from": LoadFrom(path=str(trained[0]), strict=False),
    }
    with pytest.raises(RankError, match="is of another model: num_attention_heads=") as caught:
        run_ranks(_begin, 1, RUN.but(model={"n_head": 2}, strategy=strategy))
    assert caught.value.error_type == "CheckpointError"


@pytest.mark.parametrize("vocab_size", [exhaustive(110), 300])
def test_embeddings_of_new_tokens_keep_their_initial_values(
    trained: Trained, vocab_size: int
) -> None:
    """New tokens within and beyond the padding of the vocabulary of 100; at tp=2 each rank has half of the rows."""
    import torch

    from lightning_megatron import LoadFrom

    folder, before = trained
    larger = RUN.but(
        model={"vocab_size": vocab_size},
        trainer={"max_steps": 1},
        seed=99,
    )
    initial = run_ranks(_begin, 2, larger)
    lenient = larger.but(
        strategy={"load_from": LoadFrom(path=str(folder / "step=3.ckpt"), strict=False)}
    )
    loaded = run_ranks(_begin_and_warn, 2, lenient)

    name = "weights.0.module.embedding.word_embeddings.weight"
    old, fresh = (
        torch.cat([result["state"][name] for result in results]) for results in (before, initial)
    )
    new = torch.cat([state[name] for state, _ in loaded])
    assert new[:100].equal(old[:100])
    assert new[100:].equal(fresh[100:])
    _, text = loaded[0]
    rows = f"rows 100 to {vocab_size - 1}"
    assert f"initial values ({rows} of embedding.word_embeddings.weight)" in text


def test_missing_and_unused_weights_are_listed_if_not_strict(trained: Trained) -> None:
    from lightning_megatron import LoadFrom

    folder, before = trained
    untied = RUN.but(
        model={"tie_word_embeddings": False},
        trainer={"max_steps": 1},
        seed=99,
    )
    path = str(folder / "step=3.ckpt")
    with pytest.raises(RankError, match="is of another model: share_embeddings_and_output_weights"):
        run_ranks(_begin, 2, untied.but(strategy={"load_from": path}))

    lenient = untied.but(strategy={"load_from": LoadFrom(path=path, strict=False)})
    (new, text), (_, silent) = run_ranks(_begin_and_warn, 2, lenient)

    assert silent == ""
    assert "keep their initial values (output_layer.weight); not used are none" in text
    weights = _weights(before[0]["state"])
    assert "weights.0.output_layer.weight" not in weights
    assert all(new[name].equal(value) for name, value in weights.items())


def _begin_and_warn(run: Run) -> tuple[dict[str, Any], str]:
    with recorded_warnings("The run begins") as texts:
        result = _begin(run)
    return result["state"], "\n".join(texts)


# ---- weights-only checkpoints ---------------------------------------------------------------------------------------


def _save_full_and_weights(run: Run, folder: Path) -> tuple[float, dict[str, Any]]:
    """Save ``full.ckpt`` and ``weights.ckpt`` of the same step; return its validation loss and weights."""
    trainer, trace = fit(run)
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    (metrics,) = trainer.validate(
        trainer.lightning_module,
        _ordered_loader(1),
        verbose=False,
    )
    return metrics["val_loss"], _weights(trace.state)


def _evaluate(run: Run, path: Path) -> list[float]:
    trainer = make_trainer(run)
    module = make_module(run)
    loader = _ordered_loader(1)
    (validated,) = trainer.validate(
        module,
        loader,
        ckpt_path=path,
        verbose=False,
    )
    (tested,) = trainer.test(
        module,
        loader,
        ckpt_path=path,
        verbose=False,
    )
    return [validated["val_loss"], tested["test_loss"]]


def _step_at_rate_zero(run: Run) -> list[dict[str, Any]]:
    """Weights after loading and after an optimizer step with learning rate 0."""
    before: dict[str, Any] = {}
    record = callback(on_train_start=lambda trainer, _: before.update(live_state(trainer)))
    _, trace = fit(run.but(module={"lr": 0.0}), record)
    return [_weights(before), _weights(trace.state)]


def test_weights_only_checkpoints_evaluate_and_start_but_never_resume(tmp_path: Path) -> None:
    """Stale fp32 masters of the random weights would overwrite the loaded ones at the first optimizer step."""
    run = RUN.but(trainer={"max_steps": 1, "precision": "bf16-mixed"})
    saved = run_ranks(_save_full_and_weights, 2, run, tmp_path)
    path = str(tmp_path / "weights.ckpt")
    assert run_ranks(_evaluate, 2, run, tmp_path / "weights.ckpt") == [[saved[0][0]] * 2] * 2
    weights = read_tensors(tmp_path / "weights.ckpt")
    full = read_tensors(tmp_path / "full.ckpt")
    assert weights.keys() == {name for name in full if not name.startswith("optimizer.")}
    assert all(tensor.equal(full[name]) for name, tensor in weights.items())

    fresh = run.but(
        strategy={"load_weights_only": True},
        seed=99,
        ckpt_path=path,
    )
    for (_, trained), states in zip(saved, run_ranks(_step_at_rate_zero, 2, fresh), strict=True):
        assert all(state[name].equal(trained[name]) for name in trained for state in states)

    with pytest.raises(
        RankError, match="holds only weights; resume from a full one.*load_weights_only=True"
    ) as caught:
        run_ranks(train, 2, run.but(ckpt_path=path))
    assert caught.value.error_type == "CheckpointError"
