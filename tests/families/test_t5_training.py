"""A T5 trains on every layout as on one process: changing lengths, checkpoints, random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import GLOBAL_BATCH, Run, Trace, fit, rows_dataset
from tests.parity.hugging_face import tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import MODELS, Case, module_of, trainer_of
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


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
    for strategy in ({}, {"pp": 2, "transformer_config_overrides": {"pipeline_model_parallel_layout": (6, 1)}}):
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
        ({"tp": 2, "sequence_parallel": True}, (8, 7), "length of labels=7: expected a multiple of 2"),
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
