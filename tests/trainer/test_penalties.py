"""Gradients that layers do not compute: penalties on weights in a loss, and hooks that users register on weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import callback
from tests.marks import exhaustive
from tests.parity.training import (
    CP2,
    DP2,
    PP2,
    TP2,
    TP2_SP,
    Case,
    Layout,
    Outcome,
    common_result,
    join_outcomes,
    loader_of,
    module_of,
    outcome,
    refused_fit,
    train_module,
)
from tests.ranks import RankError, run_ranks

WEIGHT = 0.02
OVERLAPPED = replace(DP2, overlap_communication=True, num_microbatches=2)
RECOMPUTED = Layout(recompute="full", num_microbatches=2)


def _penalized(max_axes: int, num_penalties: int) -> Any:
    """A step that adds ``WEIGHT`` times the sum of squared weights.

    Args:
        max_axes: Most axes of these weights.
        num_penalties: Microbatches after which it does not any more.
    """
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm, Output

    class Penalized(GPTTrainStep):
        loss_terms = ("lm_loss", "squares_loss")
        num_losses = 0

        def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
            rows = torch.tensor(float(len(batch["tokens"])))
            targets = super().counts(batch) or {}
            return {**targets, "squares_loss": rows}

        def forward_step(
            self, data_iterator: Iterator[Batch], model: torch.nn.Module
        ) -> tuple[Output, LossFunc]:
            self.chunk = model
            return super().forward_step(data_iterator, model)

        def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
            rows = torch.tensor(float(len(batch["tokens"])))
            self.num_losses += 1
            squares = [torch.zeros(())]
            if self.num_losses <= num_penalties:
                weights = [each for each in self.chunk.parameters() if each.dim() <= max_axes]
                squares = [each.square().sum() for each in weights]
            penalty = LossTerm(WEIGHT * torch.stack(squares).sum() * rows, rows)
            return {**super().loss_func(batch, output), "squares_loss": penalty}

    return Penalized()


def _train_penalized(case: Case, max_axes: int = 3) -> Outcome:
    """Train with penalties in the first step alone."""
    step = _penalized(max_axes, case.layout.num_microbatches)
    return train_module(module_of(case, train_step=step), case, loader_of(case))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("experts", Layout(num_microbatches=2)),
        ("experts", OVERLAPPED),
        *(
            exhaustive(model, layout)
            for model in ("gpt2", "llama", "experts")
            for layout in (
                RECOMPUTED,
                DP2,
                OVERLAPPED,
                replace(OVERLAPPED, distributed_optimizer=False),
            )
        ),
    ],
    ids=str,
)
def test_gradients_of_penalties_on_weights_are_added(model: str, layout: Layout) -> None:
    case = Case(layout=layout, model=model, steps=2)
    plain = outcome(case.on_one_process)
    penalized = join_outcomes(run_ranks(_train_penalized, layout.world_size, case))
    assert penalized.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        expected = gradient + 2 * WEIGHT * plain.initial_weights[name]
        # Summed in another order.
        torch.testing.assert_close(penalized.gradients[name], expected, rtol=1e-4, atol=1e-5)


_RECOMPUTED_AND_OVERLAPPED = replace(OVERLAPPED, recompute="full")


@pytest.mark.parametrize("max_axes", [exhaustive(3), 1], ids=["weights", "vectors"])
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (PP2, "each rank holds the whole model, got pp=2; use weight_decay"),
        exhaustive(TP2, "each rank holds the whole model, got tp=2; use weight_decay"),
        exhaustive(CP2, "each rank holds the whole model, got cp=2; use weight_decay"),
        exhaustive(TP2_SP, "each rank holds the whole model, got tp=2; use weight_decay"),
        exhaustive(_RECOMPUTED_AND_OVERLAPPED, "overlap_communication=False, got both"),
    ],
    ids=str,
)
def test_penalties_that_a_layout_would_change_are_refused(
    layout: Layout, message: str, max_axes: int
) -> None:
    text = f"Penalized.loss_func: its terms read .* itself.*{message}"
    with pytest.raises(RankError, match=text):
        run_ranks(_train_penalized, layout.world_size, Case(layout=layout), max_axes)


def _train_on_hidden_states(case: Case) -> list[float]:
    """Losses of a step with a term on what the last layer returns, which reads no weight by itself."""
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm, Output

    class SmallStates(GPTTrainStep):
        loss_terms = ("lm_loss", "size_loss")

        def counts(self, batch: Batch) -> dict[str, torch.Tensor]:
            rows = torch.tensor(float(len(batch["tokens"])))
            targets = super().counts(batch) or {}
            return {**targets, "size_loss": rows}

        def forward_step(
            self, data_iterator: Iterator[Batch], model: Any
        ) -> tuple[Output, LossFunc]:
            decoder = next(
                module for name, module in model.named_modules() if name.endswith("decoder")
            )
            hook = decoder.layers[-1].register_forward_hook(self.keep)
            result = super().forward_step(data_iterator, model)
            hook.remove()
            return result

        def keep(self, module: Any, inputs: Any, output: Any) -> None:
            self.states, _ = output

        def loss_func(self, batch: Batch, output: Output) -> dict[str, LossTerm]:
            rows = torch.tensor(float(len(batch["tokens"])))
            size = self.states.square().mean(-1).mean(0).sum()
            return {**super().loss_func(batch, output), "size_loss": LossTerm(0.1 * size, rows)}

    module = module_of(case, train_step=SmallStates())
    return train_module(module, case, loader_of(case)).losses


@pytest.mark.parametrize(
    ("model", "layout"),
    # On the last stage, the gate of a shared expert is a weight that torch's own functions read.
    [exhaustive("gpt2", TP2), ("experts", PP2)],
    ids=str,
)
def test_terms_on_hidden_states_train_where_the_model_is_split(model: str, layout: Layout) -> None:
    case = Case(layout=layout, model=model, steps=3)
    losses = common_result(_train_on_hidden_states, case)
    expected = common_result(_train_on_hidden_states, case.on_one_process)
    assert losses == pytest.approx(expected, rel=2e-6)


# ---- hooks on weights ------------------------------------------------------------------------------------------------

_ROWS = slice(0, 20)


def _refusals_of_hooks(case: Case, names: tuple[str, ...], kind: str) -> list[str]:
    """Messages of runs in which a user registers a hook on one weight."""
    messages = []
    for name in names:
        module = module_of(case)

        def register(trainer: Any, pl_module: Any, name: str = name) -> None:
            weights = {
                key.removeprefix("module."): weight
                for key, weight in pl_module.model_chunks[0].named_parameters()
            }
            getattr(weights[name], kind)(lambda gradient: None)

        hooks = callback(on_train_start=register)
        messages.append(refused_fit(case, module, callbacks=[hooks]))
    return messages


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(), "register_hook"),
        exhaustive(Layout(), "register_post_accumulate_grad_hook"),
        exhaustive(TP2, "register_hook"),
    ],
    ids=str,
)
def test_hooks_that_would_get_a_placeholder_are_refused(layout: Layout, kind: str) -> None:
    names = (
        "embedding.word_embeddings.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
    )
    case = Case(layout=layout, model="llama")
    for name, message in zip(
        names, common_result(_refusals_of_hooks, case, names, kind), strict=True
    ):
        assert message.startswith(
            f"{name}: expected no hook on this weight, got one, but its layer"
        )


def _frozen_rows(case: Case) -> bool:
    """Whether rows of the embedding stay as they were if their gradients are zeroed as the refusal says."""
    module = module_of(case)
    kept = {}

    def keep(trainer: Any, pl_module: Any) -> None:
        (weight,) = _embeddings(pl_module)
        kept["rows"] = weight.detach().clone()

    def zero(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        (weight,) = _embeddings(pl_module)
        weight.main_grad[_ROWS] = 0

    hooks = callback(on_train_start=keep, on_before_optimizer_step=zero)
    train_module(module, case, loader_of(case), callbacks=[hooks])
    (weight,) = _embeddings(module)
    is_same = (weight == kept["rows"]).all(dim=1)
    return bool(is_same[_ROWS].all()) and not bool(is_same[_ROWS.stop :].all())


def _embeddings(module: Any) -> list[Any]:
    return [
        weight
        for name, weight in module.model_chunks[0].named_parameters()
        if name.endswith("word_embeddings.weight")
    ]


@pytest.mark.parametrize("layout", [OVERLAPPED, exhaustive(Layout())], ids=str)
def test_gradients_can_be_changed_where_the_refusal_says(layout: Layout) -> None:
    case = Case(layout=layout, model="llama", steps=3, optimizer=(("weight_decay", 0.0),))
    assert common_result(_frozen_rows, case)
