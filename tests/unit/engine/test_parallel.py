"""How many layers each chunk of a pipeline has, and how context parallelism splits rows and heads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


@pytest.mark.parametrize(("num_layers", "first", "last", "sizes", "expected"), [
    (32, None, None, {"pp": 4}, (8, 8, 8, 8)),
    (32, None, 15, {"pp": 2}, (17, 15)),
    (32, 9, 5, {"pp": 4}, (9, 9, 9, 5)),
    (36, None, 16, {"pp": 2, "vpp": 2}, (10, 8, 10, 8)),  # virtual stages of a stage are alike (megatron-core 0.16.1)
    (32, 20, 11, {"pp": 2}, "equal shares of the"),
    (32, 0, None, {"pp": 4}, "equal shares of the"),
    (32, None, 15, {}, "is for pipelines, but pp=1"),
])  # fmt: skip
def test_stages_but_the_first_and_last_share_evenly(
    num_layers: int, first: int | None, last: int | None, sizes: dict[str, Any], expected: tuple[int, ...] | str
) -> None:
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    with pytest.raises(ConfigError, match=expected) if isinstance(expected, str) else nullcontext():
        assert ParallelConfig(num_microbatches=12, **ends, **sizes).layout(num_layers) == expected


def _llama(heads: int = 8, groups: int = 4) -> ModelConfig:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 96}
    return model_config({"model_type": "llama", "num_hidden_layers": 2, "intermediate_size": 96, **sizes})


@pytest.mark.parametrize(("groups", "sizes", "expected"), [
    (4, {"cp": 4}, "a2a"),
    (4, {"cp": 2, "tp": 2}, "a2a"),
    (4, {"cp": 4, "tp": 2}, "all_gather"),
    (1, {"cp": 2}, "all_gather"),
    (4, {"cp": 2, "cp_comm_type": "all_gather"}, "all_gather"),
])  # fmt: skip
def test_heads_are_exchanged_where_there_are_enough(groups: int, sizes: dict[str, Any], expected: str) -> None:
    assert ParallelConfig(**sizes).comm_type_of(_llama(groups=groups)) == expected


@pytest.mark.parametrize(("sizes", "message"), [
    ({"cp": 0}, "cp=0"),
    ({"cp": 2, "cp_comm_type": "p2p"}, "cp_comm_type='p2p'"),
    ({"cp": 4, "tp": 2, "cp_comm_type": "a2a"}, 'num_query_groups=4 .* tp=2 x cp=4 = 8.*use .*"all_gather"'),
])  # fmt: skip
def test_a_split_that_cannot_be_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**sizes).check_model(_llama())


def test_ranks_must_divide_rows_and_heads_of_queries_keys_and_values() -> None:
    ParallelConfig(tp=6).check_model(_llama(heads=12, groups=3))
    with pytest.raises(ConfigError, match="tp=4 neither divides num_query_groups=3 nor is a multiple of it"):
        ParallelConfig(tp=4).check_model(_llama(heads=12, groups=3))
    # (6 + 2) heads of 5 numbers are 40 rows.
    one_key = model_config({"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 6, "n_embd": 30, "n_inner": 60})
    with pytest.raises(ConfigError, match=r"tp=3 does not divide .*num_query_groups\) \* kv_channels=40"):
        ParallelConfig(tp=3).check_model(one_key)


def test_a_row_must_split_into_twice_cp_runs_and_each_over_tp() -> None:
    ParallelConfig(cp=3, tp=2, sequence_parallel=True).check_sequence(12)
    with pytest.raises(ConfigError, match="seq_length=14: expected a multiple of 8, because cp=4 .*; use 16"):
        ParallelConfig(cp=4).check_sequence(14)
    with pytest.raises(ConfigError, match=r"seq_length=12: expected a multiple of 8, .* tp=4 .*; use 16"):
        ParallelConfig(cp=2, tp=4, sequence_parallel=True).check_sequence(12)


def test_ranks_that_cp_does_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="world size 6 .* tp=2 x pp=1 x cp=2 = 4; use 8 devices"):
        ParallelConfig(tp=2, cp=2).data_parallel_size(6)
