"""Frozen weights never change, on any layout, and have no optimizer state."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.checkpoint.runs import callback, checkpoints_at
from tests.parity.comparison import assert_same_tensors
from tests.parity.hugging_face import tensors_of, train_hugging_face
from tests.parity.sharding import shards
from tests.parity.training import (
    FOUR_RANKS,
    PP2,
    Case,
    Layout,
    Outcome,
    loader_of,
    module_of,
    refusal,
    refused_fit,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

What = Literal["embeddings", "lower half", "all but the last layer", "all but the biases"]
OPTIMIZER = (
    ("beta1", 0.8),
    ("beta2", 0.95),
    ("eps", 1e-3),
    ("weight_decay", 0.3),
)
CASE = Case(steps=3, optimizer=OPTIMIZER, clip=0.5, labels="uneven")


def train_frozen(
    case: Case,
    what: What,
    **options: Any,
) -> tuple[Outcome, int, int]:
    """Train with ``what`` frozen: outcome in Hugging Face names on rank 0, sizes of moments and of trained weights."""
    from lightning_megatron import MegatronModule
    from lightning_megatron.engine.wrap import unwrap

    class Freezing(MegatronModule):
        """Freezes in the two hooks that a user would use."""

        def setup(self, stage: str) -> None:
            if what == "all but the last layer":
                self.freeze()

        def configure_model(self) -> None:
            super().configure_model()
            if what == "all but the biases":
                _freeze_all_but_biases(self.model_chunks)
                return
            last_frozen = {"embeddings": 0, "lower half": 2, "all but the last layer": 3}[what]
            for chunk in map(unwrap, self.model_chunks):  # type: ignore[arg-type]
                if hasattr(chunk, "embedding"):
                    chunk.embedding.requires_grad_(False)
                if last_frozen:
                    for layer in chunk.decoder.layers:
                        layer.requires_grad_(layer.layer_number > last_frozen)

    module = module_of(case, Freezing)
    run = train_module(module, case, loader_of(case), collect=tensors_of, **options)
    states = module.trainer.strategy.optimizers[0].parts[0].optimizer.state
    moments = sum(t.numel() for state in states.values() for t in state.values())
    weights = module.model_chunks.parameters()
    return run, moments, sum(p.numel() for p in weights if p.requires_grad)


def _freeze_all_but_biases(model: Any) -> None:
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith("bias"))


def _freeze(model: Any, what: What) -> None:
    """Freeze the same in Hugging Face's model."""
    if what == "all but the biases":
        _freeze_all_but_biases(model)
        return
    body = model.transformer
    if what == "all but the last layer":
        model.requires_grad_(False)
        body.h[3].requires_grad_(True)
        return
    parts = [body.wte, body.wpe]
    if what == "lower half":
        parts += body.h[:2]
    for part in parts:
        part.requires_grad_(False)


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        # The embedding is tied: if one pipeline stage freezes its copy, the other stage's is frozen as well.
        ("embeddings", FOUR_RANKS),
        # The first stage has no trainable weight.
        (
            "lower half",
            Layout(
                pp=2,
                dp=2,
                recompute="full",
                overlap_communication=True,
            ),
        ),
        (
            "lower half",
            Layout(
                pp=2,
                vpp=2,
                num_microbatches=2,
                distributed_optimizer=False,
            ),
        ),
        ("all but the last layer", Layout(tp=2, dp=2, distributed_optimizer=False)),
        ("all but the biases", Layout(tp=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_training_with_frozen_weights_equals_hugging_face(what: What, layout: Layout) -> None:
    case = replace(CASE, layout=layout)
    ranks = run_ranks(train_frozen, layout.world_size, case, what)
    initial = ranks[0][0].initial_weights
    freeze = partial(_freeze, what=what)
    (theirs,) = run_ranks(train_hugging_face, 1, case, initial, freeze)
    for ours, moments, trained in ranks:
        # The tolerances of tests/parity/comparison.py.
        assert ours.losses == pytest.approx(theirs.losses, rel=1.5e-6)
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=5e-5)
        assert moments <= 2 * trained
    assert_same_tensors(ranks[0][0].weights, theirs.weights)


def _save_and_resume(
    case: Case,
    other: Case,
    folder: Path,
) -> tuple[Outcome, list[Outcome], str]:
    path = folder / "step=1.ckpt"
    uninterrupted, *_ = train_frozen(
        case, "lower half", callbacks=[checkpoints_at(folder)], enable_checkpointing=True
    )
    resumed = [train_frozen(x, "lower half", ckpt_path=path)[0] for x in (case, other)]
    fit = trainer_of(case).fit
    not_frozen = refusal(fit, module_of(case), loader_of(case), ckpt_path=path)
    return uninterrupted, resumed, not_frozen


def test_frozen_weights_resume_at_same_and_other_layout(tmp_path: Path) -> None:
    from tests.convert.directories import converted

    same = Layout(pp=2, dp=2)
    other = Layout(tp=2, dp=2, distributed_optimizer=False)
    cases = (replace(CASE, layout=layout) for layout in (same, other))
    uninterrupted, resumed, not_frozen = run_ranks(_save_and_resume, 4, *cases, tmp_path / "run")[0]
    assert "frozen" in not_frozen
    for run, atol in zip(resumed, (0.0, 5e-6), strict=True):
        assert_same_tensors(run.weights, uninterrupted.weights, atol=atol)
        assert len(run.losses) == 2
    for target in ("hf", "megatron"):
        converted(tmp_path / "run/step=3.ckpt", tmp_path / target, to=target)


def _refusals(case: Case) -> list[str]:
    from lightning_megatron import MegatronModule

    def freeze(trainer: Any, module: Any, *_: Any) -> None:
        module.model_chunks.requires_grad_(False)

    class OnFitStart(MegatronModule):
        def on_fit_start(self) -> None:
            self.requires_grad_(False)

    frozen = module_of(case)
    frozen.freeze()
    return [
        refused_fit(case, module_of(case, OnFitStart)),
        refused_fit(
            case,
            module_of(case),
            callbacks=[callback(on_train_batch_end=freeze)],
        ),
        refused_fit(case, frozen),
    ]


def _frozen_between_fits(case: Case) -> list[bool]:
    """Whether the embedding changed in each of three fits of one module: trained, frozen, trained again."""
    module = module_of(case)
    before: torch.Tensor | None = None
    changed = []
    for is_trained in (True, False, True):
        if module.model_chunks is not None:
            module.model_chunks[0].module.embedding.requires_grad_(is_trained)
        trainer_of(case).fit(module, loader_of(case))
        after = next(shard.data for shard in shards(module) if "word" in shard.key)
        changed.append(before is None or not torch.equal(before, after))
        before = after
    return changed


def test_freezing_works_between_fits_but_not_within_one() -> None:
    case = replace(CASE, layout=Layout(dp=2, overlap_communication=True))
    assert run_ranks(_frozen_between_fits, 2, case) == [[True, False, True]] * 2
    ranks = run_ranks(_refusals, 2, replace(CASE, layout=PP2))
    # The layers of the second stage have their numbers in the whole model.
    assert "decoder.layers.2." in ranks[1][0]
    for at_start, late, everything in ranks:
        assert "expected requires_grad=True as when the optimizer was made" in at_start
        assert "expected requires_grad=True as when the optimizer was made" in late
        assert "every weight is frozen" in everything
