"""Frozen weights stay as they are, whoever froze them and wherever they lie, and cost nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.checkpoint.runs import callback
from tests.parity.comparison import assert_same_tensors
from tests.parity.hugging_face import tensors_of, train_hugging_face
from tests.parity.sharding import Tensors, finish_parameter_gathers, shards
from tests.parity.training import Case, Layout, loader_of, module_of, trainer_of
from tests.ranks import run_ranks

What = Literal["embeddings", "lower half", "all but the last layer", "nothing"]
OPTIMIZER = (("beta1", 0.8), ("beta2", 0.95), ("eps", 1e-3), ("weight_decay", 0.3))
CASE = Case(steps=3, optimizer=OPTIMIZER, clip=0.5, labels="uneven")


def _module(case: Case, what: What) -> Any:
    """A module that freezes what a user would, on whichever rank it is."""
    from lightning_megatron import MegatronModule
    from lightning_megatron.engine.wrap import unwrap

    if what == "nothing":
        return module_of(case)

    class InConfigureModel(MegatronModule):
        def configure_model(self) -> None:
            super().configure_model()
            for chunk in map(unwrap, self.model_chunks):  # type: ignore[arg-type]
                if hasattr(chunk, "embedding"):
                    chunk.embedding.requires_grad_(False)
                if what == "lower half":
                    for layer in chunk.decoder.layers:
                        layer.requires_grad_(layer.layer_number > 2)

    class InSetup(MegatronModule):
        def setup(self, stage: str) -> None:
            self.freeze()

        def configure_model(self) -> None:
            super().configure_model()
            for chunk in map(unwrap, self.model_chunks):  # type: ignore[arg-type]
                for layer in chunk.decoder.layers:
                    layer.requires_grad_(layer.layer_number == 4)

    return module_of(case, InSetup if what == "all but the last layer" else InConfigureModel)


Result = tuple[list[float], list[float], Tensors, Tensors, int, int]
"""Tensors on the first rank, by Hugging Face's names."""


def _train(case: Case, what: What, **options: Any) -> Result:
    """Losses, gradient norms, weights before and after, and numbers in moments and in weights that may change."""
    losses, norms = [], []
    before: Tensors = {}

    def keep(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        losses.append(outputs["loss"].item())
        norms.append(trainer.strategy.optimizer_report.grad_norm)

    watch = callback(on_train_start=lambda _, module: before.update(tensors_of(module)), on_train_batch_end=keep)
    ckpt_path = options.pop("ckpt_path", None)
    options["callbacks"] = [watch, *options.pop("callbacks", [])]
    module, trainer = _module(case, what), trainer_of(case, **options)
    trainer.fit(module, loader_of(case), ckpt_path=ckpt_path)
    finish_parameter_gathers(module)
    states = trainer.strategy.optimizers[0].parts[0].optimizer.state
    moments = sum(t.numel() for state in states.values() for t in state.values())
    trained = sum(p.numel() for p in module.model_chunks.parameters() if p.requires_grad)
    return losses, norms, before, tensors_of(module), moments, trained


def _freeze(model: Any, what: What) -> None:
    """The same in Hugging Face's model."""
    body = model.transformer
    if what == "all but the last layer":
        model.requires_grad_(False)
        body.h[3].requires_grad_(True)
        return
    for embedding in (body.wte, body.wpe):
        embedding.requires_grad_(False)
    if what == "lower half":
        body.h[:2].requires_grad_(False)


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        # The embedding is tied: where one stage freezes its copy, the other stage's is frozen, too.
        ("embeddings", Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)),
        # Nothing is left to train on the first stage.
        ("lower half", Layout(pp=2, dp=2, recompute="full", overlap_communication=True)),
        ("lower half", Layout(pp=2, vpp=2, num_microbatches=2, distributed_optimizer=False)),
        ("all but the last layer", Layout(tp=2, dp=2, distributed_optimizer=False)),
    ],
    ids=str,
)
def test_the_rest_trains_as_a_plain_model_whose_weights_are_frozen(what: What, layout: Layout) -> None:
    case = replace(CASE, layout=layout)
    ranks = run_ranks(_train, layout.world_size, case, what)
    (theirs,) = run_ranks(train_hugging_face, 1, case, ranks[0][2], partial(_freeze, what=what))
    for ours, our_norms, _, _, moments, trained in ranks:
        # The tolerances of tests/parity/comparison.py.
        assert ours == pytest.approx(theirs.losses, rel=1.5e-6)
        assert our_norms == pytest.approx(theirs.grad_norms, rel=5e-5)
        assert moments <= 2 * trained
    assert_same_tensors(ranks[0][3], theirs.weights)


def _saved_and_resumed(case: Case, other: Case, folder: Path) -> tuple[Result, Result]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    through = _train(case, "lower half", callbacks=[saving], enable_checkpointing=True)
    return through, _train(other, "lower half", ckpt_path=folder / "step=1.ckpt")


def test_a_run_with_frozen_weights_resumes_here_and_at_another_layout(tmp_path: Path) -> None:
    from lightning_megatron.convert.convert import ConvertOptions, convert

    case = replace(CASE, layout=Layout(pp=2, dp=2))
    for index, layout in enumerate([case.layout, Layout(tp=2, dp=2, distributed_optimizer=False)]):
        ranks = run_ranks(_saved_and_resumed, 4, case, replace(case, layout=layout), tmp_path / str(index))
        through, resumed = (ranks[0][run][3] for run in (0, 1))
        assert_same_tensors(resumed, through, atol=0.0 if layout == case.layout else 5e-6)
        assert len(ranks[0][1][0]) == 2
    for run, target in (("0", "hf"), ("1", "megatron")):
        options = ConvertOptions(load_path=tmp_path / run / "step=3.ckpt", save_path=tmp_path / target, to=target)
        convert(options)
    for message in run_ranks(_resumed_without_freezing, 2, replace(CASE, layout=Layout(pp=2)), tmp_path / "0"):
        assert "frozen" in message


def _resumed_without_freezing(case: Case, folder: Path) -> str:
    from lightning_megatron import CheckpointError

    with pytest.raises(CheckpointError) as raised:
        trainer_of(case).fit(_module(case, "nothing"), loader_of(case), ckpt_path=folder / "step=1.ckpt")
    return str(raised.value)


def _refused(case: Case) -> list[str]:
    from lightning_megatron import ConfigError, MegatronModule

    late = callback(on_train_batch_end=lambda trainer, module, *_: module.model_chunks.requires_grad_(False))

    class OnFitStart(MegatronModule):
        def on_fit_start(self) -> None:
            self.requires_grad_(False)

    frozen = module_of(case)
    frozen.freeze()
    messages = []
    for module, callbacks in ((module_of(case, OnFitStart), []), (module_of(case), [late]), (frozen, [])):
        with pytest.raises(ConfigError) as raised:
            trainer_of(case, callbacks=callbacks).fit(module, loader_of(case))
        messages.append(str(raised.value))
    return messages


def _frozen_between_fits(case: Case) -> list[bool]:
    """Whether the embedding has moved in each of three fits: free, frozen, free again."""
    module, moved = module_of(case), []
    for is_trained in (True, False, True):
        if module.model_chunks is not None:
            module.model_chunks[0].module.embedding.requires_grad_(is_trained)
        before = [shard for shard in shards(module) if "word" in shard.key] if module.model_chunks is not None else []
        trainer_of(case).fit(module, loader_of(case))
        finish_parameter_gathers(module)
        after = [shard for shard in shards(module) if "word" in shard.key]
        moved.append(not before or not torch.equal(before[0].data, after[0].data))
    return moved


def test_freezing_holds_from_fit_to_fit_and_is_refused_once_the_optimizer_is_made() -> None:
    case = replace(CASE, layout=Layout(dp=2, overlap_communication=True))
    assert run_ranks(_frozen_between_fits, 2, case) == [[True, False, True]] * 2
    for at_start, late, everything in run_ranks(_refused, 2, case):
        assert "expected requires_grad=True as when the optimizer was made" in at_start
        assert "expected requires_grad=True as when the optimizer was made" in late
        assert "every weight is frozen" in everything
