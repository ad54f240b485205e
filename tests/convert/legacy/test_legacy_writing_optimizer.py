"""Are a run's moments where Megatron-LM looks for them in a written legacy checkpoint? Its own classes load them."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron.convert.legacy.target import write_legacy
from lightning_megatron.convert.stored.hugging_face import open_hugging_face
from tests.convert.directories import tiny_gpt2
from tests.convert.legacy.written import GROUPS, InTraining, flat, load, of_state, options


@functools.cache
def _gpt2() -> Any:
    return tiny_gpt2()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_megatron_core_loads_the_optimizer_and_the_schedule(tmp_path: Path, dtype: torch.dtype) -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    copy.deepcopy(_gpt2()).to(dtype).save_pretrained(tmp_path / "hf")
    run = InTraining(weights=open_hugging_face(tmp_path / "hf"))
    # As a run under Lightning has it: of its schedule only the place is known.
    groups_of_run = tuple({**group, "max_lr": None, "min_lr": None} for group in GROUPS)
    run = replace(run, training=replace(run.training, lr_scheduler={"last_epoch": 7}, param_groups=groups_of_run))
    write_legacy(run, options(tmp_path / "hf", tmp_path / "legacy", tp=2))
    state = load(tmp_path / "legacy" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    # As Megatron-LM groups the parameters of this model; a float32 model's are the run's own numbers.
    weights = [tensor / 2 if dtype == torch.float32 else tensor for tensor in flat(state["model"]).values()]
    weights.sort(key=lambda weight: weight.dim() == 1)
    parameters = [torch.nn.Parameter(weight.float()) for weight in weights]
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]]
    known = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    adam = torch.optim.AdamW([{"params": group, "wd_mult": 1.0 - i, **known} for i, group in enumerate(groups)])
    kind = FP32Optimizer if dtype == torch.float32 else Float16OptimizerWithFloat16Params
    optimizer = kind.__new__(kind)  # their constructors want a GPU
    optimizer.optimizer, optimizer.config = adam, SimpleNamespace(fp16=False)
    optimizer.fp32_from_float16_groups = groups

    optimizer.load_state_dict(state["optimizer"])

    for parameter, weight in zip(parameters, weights, strict=True):
        assert torch.equal(adam.state[parameter]["exp_avg"], of_state(weight, "exp_avg"))
        assert torch.equal(adam.state[parameter]["exp_avg_sq"], of_state(weight, "exp_avg_sq"))
        assert adam.state[parameter]["step"] == 7
        assert dtype == torch.float32 or torch.equal(parameter.data, of_state(weight, "param"))
    assert [group["weight_decay"] for group in adam.param_groups] == [0.1, 0.0]
    _check_schedule(adam, state["opt_param_scheduler"])


def _check_schedule(adam: Any, stored: Any) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule = OptimizerParamScheduler(
        adam,
        init_lr=0.0,
        max_lr=3e-4,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    schedule.load_state_dict(stored)
    assert schedule.num_steps == 448
    assert adam.param_groups[0]["lr"] == pytest.approx(3e-4 * (1 - 0.448))
