"""``ParallelConfig``: layers per model chunk, context parallelism, invalid layouts; the process group for host data."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine import groups
from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.checks import check_model
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layout import check_layout, comm_type_of


def _uneven(
    num_layers: int,
    first: int | None,
    last: int | None,
    **sizes: Any,
) -> tuple[int, ...]:
    ends = dict(zip(UNEVEN_STAGES, (first, last), strict=True))
    return ParallelConfig(num_microbatches=12, **ends, **sizes).layers_per_chunk(num_layers)  # type: ignore[arg-type]


def test_layers_are_split_evenly_except_first_and_last_stage() -> None:
    assert _uneven(32, None, None, pp=4) == (8, 8, 8, 8)
    assert _uneven(32, None, 15, pp=2) == (17, 15)
    assert _uneven(32, 9, 5, pp=4) == (9, 9, 9, 5)
    # Uneven counts apply per stage, split evenly over its virtual stages (megatron-core 0.16.1).
    assert _uneven(36, None, 16, pp=2, vpp=2) == (10, 8, 10, 8)


def _llama(heads: int = 8, groups: int = 4) -> ModelConfig:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 96}
    return model_config(
        {"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 96, **sizes}
    )


def _multi_query() -> ModelConfig:
    """Model whose fused QKV weight has (6 + 2) heads x 5 channels = 40 rows."""
    return model_config(
        {
            "model_type": "gpt_bigcode",
            "n_layer": 2,
            "n_head": 6,
            "n_embd": 30,
            "n_inner": 60,
        }
    )


@pytest.mark.parametrize(("groups", "sizes", "expected"), [
    (4, {"cp": 4}, "a2a"),
    (4, {"cp": 2, "tp": 2}, "a2a"),
    (4, {"cp": 4, "tp": 2}, "all_gather"),
    (1, {"cp": 2}, "all_gather"),
    (4, {"cp": 2, "cp_comm_type": "all_gather"}, "all_gather"),
])  # fmt: skip
def test_heads_are_exchanged_if_tp_and_cp_divide_them(
    groups: int, sizes: dict[str, Any], expected: str
) -> None:
    assert comm_type_of(_llama(groups=groups), ParallelConfig(**sizes)) == expected


def test_conversion_accepts_experts_of_any_size() -> None:
    settings = EngineSettings(
        parallel=ParallelConfig(), params_dtype=torch.float32, device=torch.device("cpu")
    )
    model = model_config({"model_type": "mixtral", "intermediate_size": 46, "vocab_size": 83})
    check_model(model, settings)


@pytest.mark.parametrize(("check", "message"), [
    (lambda: _uneven(32, 20, 11, pp=2), "equal shares of the"),
    (lambda: _uneven(32, 0, None, pp=4), "equal shares of the"),
    (lambda: _uneven(32, None, 15), "is for pipelines, but pp=1"),
    (lambda: ParallelConfig(cp=0), "cp=0"),
    (lambda: ParallelConfig(cp=2, cp_comm_type="p2p"), "cp_comm_type='p2p'"),  # type: ignore[arg-type]
    (lambda: check_layout(_llama(), ParallelConfig(cp=4, tp=2, cp_comm_type="a2a",)),
     'num_query_groups=4 .* tp=2 x cp=4 = 8.*use .*"all_gather"'),
    (lambda: check_layout(_llama(heads=12, groups=3), ParallelConfig(tp=4)),
     "tp=4 neither divides num_query_groups=3 nor is a multiple of it"),
    (lambda: check_layout(_multi_query(), ParallelConfig(tp=3)),
     r"tp=3 does not divide .*num_query_groups\) \* kv_channels=40"),
    (lambda: ParallelConfig(cp=4).check_sequence(14), "seq_length=14: expected a multiple of 8, because cp=4.* use 16"),
    (lambda: ParallelConfig(cp=2, tp=4, sequence_parallel=True,).check_sequence(12),
     r"seq_length=12: expected a multiple of 8, .* tp=4 .*; use 16"),
    (lambda: ParallelConfig(tp=2, cp=2).data_parallel_size(6), "world size 6 .* tp=2 x pp=1 x cp=2 = 4; use 8 devices"),
])  # fmt: skip
def test_invalid_layout_is_refused(check: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check()


@pytest.mark.usefixtures("world")
def test_host_group_is_one_gloo_group_for_all_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    first, second, third = (
        groups.host_group(timedelta(minutes=minutes)) for minutes in (10, 30, 10)
    )
    assert first is second is third
