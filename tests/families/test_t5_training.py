"""A T5 trains on every layout as on one process: copies of weights, dropout, recomputation, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import GLOBAL_BATCH, Run, Trace, fit, rows_dataset
from tests.parity.comparison import assert_same_run, assert_same_within_rounding
from tests.parity.dropout_masks import PROBABILITY, Masks, dropout_masks, independent, recording
from tests.parity.hugging_face import tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import MODELS, SEQ_LENGTH, Case, Layout, joined_outcome, module_of, outcome, trainer_of
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

NUM_ENCODER_LAYERS, NUM_DECODER_LAYERS = MODELS["t5"]["num_layers"], MODELS["t5"]["num_decoder_layers"]
T5 = Case(model="t5", labels="uneven", steps=4)


def _cut(*layers: int) -> tuple[tuple[str, Any], ...]:
    return (("pipeline_model_parallel_layout", layers),)


LAYOUTS = (
    Layout(tp=2, sequence_parallel=True, num_microbatches=3),
    Layout(pp=2, num_microbatches=3, transformer_config_overrides=_cut(0, 7)),
    Layout(pp=2, vpp=2, num_microbatches=4, transformer_config_overrides=_cut(1, 3, 2, 1)),
    Layout(pp=2, dp=2, transformer_config_overrides=_cut(2, 5)),
    Layout(pp=2, vpp=2, dp=2, num_microbatches=2, overlap_communication=True),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
)
FOUR_RANKS = LAYOUTS[-1]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (i not in (0, 2, 4)), id=str(x)) for i, x in enumerate(LAYOUTS)],
)
def test_a_layout_trains_as_one_process(layout: Layout) -> None:
    # ``outcome`` also checks that all copies of a tied embedding and of a table are equal after the steps.
    assert_same_run(outcome(replace(T5, layout=layout)), outcome(T5))


def test_clipping_counts_each_copied_weight_once() -> None:
    descent = replace(T5, clip=0.5, lr=0.1, optimizer=(("name", "sgd"), ("weight_decay", 0.0)))
    layout = Layout(pp=2, vpp=2, num_microbatches=2)
    assert_same_run(outcome(replace(descent, layout=layout)), outcome(descent))
    assert min(outcome(descent).grad_norms) > 0.5


def _train_on_changing_lengths(case: Case) -> Any:
    from torch.utils.data import DataLoader

    from tests.parity.training import Sentences, train_module

    def cut(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        shorter = int(rows[0]["input_ids"].sum()) % 4  # as the first row says
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        ids, labels = stacked["input_ids"][:, 2 * shorter :], stacked["labels"][:, : SEQ_LENGTH - 4 * shorter]
        return {"input_ids": ids, "labels": labels}

    rows = Sentences(case.steps * case.global_batch_size, case.labels)
    loader = DataLoader(rows, batch_size=case.global_batch_size, collate_fn=cut)
    return train_module(module_of(case), case, loader)


def test_sequences_of_other_lengths_in_each_step_train_as_on_one_process() -> None:
    ranks = run_ranks(_train_on_changing_lengths, 4, replace(T5, layout=FOUR_RANKS))
    alone = run_ranks(_train_on_changing_lengths, 1, T5)
    assert_same_run(joined_outcome(ranks), joined_outcome(alone))


def _num_parameters(case: Case) -> tuple[int, int]:
    from lightning_megatron.accounting import rank_parameters
    from lightning_megatron.models.t5_layout import t5_layout
    from tests.parity.training import loader_of

    module, trainer = module_of(case), trainer_of(case, max_steps=1)
    trainer.fit(module, loader_of(case))
    strategy, model = trainer.strategy, module.model_config
    by_hand = dict(case.layout.transformer_config_overrides).get("pipeline_model_parallel_layout")
    layout = t5_layout(model, strategy.parallel, by_hand)
    pp_rank = strategy.topology.pp_rank
    expected = rank_parameters(model, layout, tp=case.layout.tp, pp=case.layout.pp, pp_rank=pp_rank)
    return sum(parameter.numel() for parameter in module.model_chunks.parameters()), expected


@pytest.mark.parametrize("layout", [LAYOUTS[2], FOUR_RANKS], ids=str)
def test_ranks_hold_as_many_parameters_as_the_arithmetic_says(layout: Layout) -> None:
    for held, expected in run_ranks(_num_parameters, layout.world_size, replace(T5, layout=layout)):
        assert held == expected


# ---- dropout --------------------------------------------------------------------------------------------------------

# Not ReLU, whose zeros would look like dropped numbers.
GELU = (("dropout_rate", PROBABILITY), ("feed_forward_proj", "gelu"))
DROPPING = replace(T5, model_fields=GELU)


def _masks(layout: Layout) -> list[Masks]:
    return run_ranks(dropout_masks, layout.world_size, replace(DROPPING, layout=layout))


def _widths(masks: Masks) -> list[int]:
    return sorted(mask.shape[-1] for mask in masks.activations + masks.attention)


def test_numbers_are_dropped_wherever_hugging_face_drops_them() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    fields = {name: value for name, value in MODELS["t5"].items() if name != "model_type"}
    config = T5Config(**{**fields, **dict(GELU), "decoder_start_token_id": 0})
    model = T5ForConditionalGeneration(config).train()
    model.set_attn_implementation("eager")
    tokens = torch.arange(2 * SEQ_LENGTH).view(2, SEQ_LENGTH)
    with recording(theirs := Masks()):
        model(input_ids=tokens, labels=tokens)
    (masks,) = _masks(Layout())
    assert _widths(masks) == _widths(theirs)
    for mask in masks.activations:
        assert mask.float().mean().item() == pytest.approx(PROBABILITY, abs=0.03)


def test_tensor_parallel_ranks_drop_the_same_hidden_states_and_different_parts_of_heads_and_mlps() -> None:
    first, second = _masks(Layout(tp=2))
    for a, b in zip(first.activations, second.activations, strict=True):
        is_inside_mlp = a.shape[-1] == MODELS["t5"]["d_ff"] // 2
        assert independent(a, b) if is_inside_mlp else torch.equal(a, b)
    encoder = slice(0, NUM_ENCODER_LAYERS)  # in the decoder's attention the future is zero, too
    assert all(independent(a, b) for a, b in zip(first.attention[encoder], second.attention[encoder], strict=True))


def test_under_sequence_parallelism_each_rank_drops_its_own_part() -> None:
    first, second = _masks(Layout(tp=2, sequence_parallel=True))
    assert all(independent(a, b) for a, b in zip(first.activations, second.activations, strict=True))
    hidden = [mask for mask in first.activations if mask.shape[-1] == MODELS["t5"]["d_model"]]
    assert all(mask.shape[0] == SEQ_LENGTH // 2 for mask in hidden)


def test_recomputed_activations_are_dropped_where_they_were() -> None:
    layout = Layout(tp=2, pp=2, vpp=2, num_microbatches=2)
    recomputing = replace(layout, recompute="full", recompute_method="uniform", recompute_num_layers=2)
    case = replace(DROPPING, steps=2)
    assert_same_run(outcome(replace(case, layout=recomputing)), outcome(replace(case, layout=layout)))


# ---- checkpoints ----------------------------------------------------------------------------------------------------

RUN = Run(model=MODELS["t5"], trainer={"max_steps": 5})
TP2_PP2: dict[str, Any] = {"tp": 2, "pp": 2}


def _loader(dp: int) -> Any:
    from torch.utils.data import DataLoader

    rows = [
        {"input_ids": row["input_ids"], "labels": row["input_ids"].flip(0)[:8]} for row in rows_dataset(vocab_size=83)
    ]
    return DataLoader(rows, batch_size=GLOBAL_BATCH // dp, shuffle=True)  # type: ignore[arg-type]


def _train(run: Run) -> Trace:
    return fit(replace(run, loader=_loader))[1]


def _train_and_save(run: Run, path: Path) -> None:
    trainer, _ = fit(replace(run, loader=_loader))
    trainer.save_checkpoint(path)


def test_a_checkpoint_goes_on_in_other_layouts(tmp_path: Path) -> None:
    (whole,) = run_ranks(_train, 1, RUN)
    path = tmp_path / "a.ckpt"
    run_ranks(_train_and_save, 4, RUN.but(strategy=TP2_PP2, trainer={"max_steps": 2}), path)
    for strategy in ({}, {"pp": 2, "transformer_config_overrides": dict(_cut(6, 1))}):
        for trace in run_ranks(_train, strategy.get("pp", 1), RUN.but(strategy=strategy, ckpt_path=str(path))):
            for step in (3, 4, 5):
                assert trace.steps[step]["loss"] == pytest.approx(whole.steps[step]["loss"], rel=1e-5)
                # The norm of small gradients has fewer digits than the loss.
                assert trace.steps[step]["grad_norm"] == pytest.approx(whole.steps[step]["grad_norm"], rel=1e-4)


# ---- random weights -------------------------------------------------------------------------------------------------


def _random_weights(fields: dict[str, Any]) -> Tensors:
    from lightning_megatron import MegatronModule

    module = MegatronModule(model=fields)
    row = {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.ones(4, dtype=torch.long)}
    trainer_of(Case()).validate(module, torch.utils.data.DataLoader([row], batch_size=1), verbose=False)
    return tensors_of(module)


def test_random_weights_are_as_large_as_transformers_makes_them() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    fields = {**MODELS["t5"], "d_model": 96, "d_ff": 200, "feed_forward_proj": "gated-gelu", "initializer_factor": 0.5}
    (ours,) = run_ranks(_random_weights, 1, fields)
    theirs = dict(T5ForConditionalGeneration(T5Config(**fields)).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        expected = theirs[name].detach()
        # 32 numbers in a table, thousands elsewhere: four times the standard error of two standard deviations.
        rtol = 4 / expected.numel() ** 0.5
        assert weight.square().mean().sqrt().item() == pytest.approx(expected.square().mean().sqrt().item(), rel=rtol)


# ---- refusals -------------------------------------------------------------------------------------------------------


def _fit(layout: dict[str, Any], lengths: tuple[int, int] = (8, 8)) -> None:
    from torch.utils.data import DataLoader

    from lightning_megatron import MegatronStrategy

    row = {name: torch.ones(n, dtype=torch.long) for name, n in zip(("input_ids", "labels"), lengths, strict=True)}
    case = Case(model="t5", steps=1)
    loader: Any = DataLoader([row, row], batch_size=2)  # type: ignore[arg-type]
    size = layout.get("tp", 1) * layout.get("pp", 1)
    trainer_of(case, strategy=MegatronStrategy(**layout), devices=size).fit(module_of(case), loader)


@pytest.mark.parametrize(
    ("layout", "lengths", "message"),
    [
        (
            {"recompute": "selective", "transformer_config_overrides": {"recompute_modules": ["core_attn"]}},
            (8, 8),
            "recompute_modules with 'core_attn' cannot train T5's attention bias",
        ),
        ({"pp": 4, "vpp": 2, "num_microbatches": 4}, (8, 8), "8 chunks are more than the 7 layers"),
        ({"tp": 2, "sequence_parallel": True}, (9, 7), "length of input_ids=9: expected a multiple of 2"),
        ({"tp": 2, "sequence_parallel": True}, (8, 7), "length of labels=7: expected a multiple of 2"),
        (
            {"pp": 2, "transformer_config_overrides": {"pipeline_model_parallel_layout": "Ett|ttL"}},
            (8, 8),
            "3 layers of the encoder + 4 of the decoder in all, got 2 numbers and 4 layers",
        ),
        (
            {"transformer_config_overrides": {"distribute_saved_activations": True}},
            (8, 8),
            "distribute_saved_activations=True cannot be used with T5",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(
    layout: dict[str, Any], lengths: tuple[int, int], message: str
) -> None:
    with pytest.raises(RankError) as refusal:
        run_ranks(_fit, layout.get("tp", 1) * layout.get("pp", 1), layout, lengths)
    assert refusal.value.error_type == "ConfigError"
    assert message in str(refusal.value)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def _on_gpus(layout: Layout) -> object:
    return pytest.param(layout, marks=pytest.mark.gpu(layout.world_size), id=str(layout))


@pytest.mark.parametrize("layout", [_on_gpus(layout) for layout in LAYOUTS])
def test_a_layout_trains_on_gpus_in_bf16_as_on_one(layout: Layout) -> None:
    exact = replace(T5, accelerator="gpu")
    reference = replace(exact, precision="bf16-mixed")
    assert_same_within_rounding(outcome(replace(reference, layout=layout)), outcome(reference), outcome(exact))
