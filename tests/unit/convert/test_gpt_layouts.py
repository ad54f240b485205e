"""Splits of few key/value heads that cannot be are refused before anything is built."""

from __future__ import annotations

import pytest

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError

_ONE_KEY = {"model_type": "gpt_bigcode", "n_layer": 2, "vocab_size": 83}


def test_ranks_must_divide_the_rows_of_queries_keys_and_values() -> None:
    # (6 + 2) heads of 5 numbers are 40 rows.
    model = model_config({**_ONE_KEY, "n_head": 6, "n_embd": 30, "n_inner": 60})
    ParallelConfig(tp=2).check_model(model)
    with pytest.raises(ConfigError, match=r"tp=3 does not divide .*num_query_groups\) \* kv_channels=40"):
        ParallelConfig(tp=3).check_model(model)


def test_ranks_and_key_value_heads_must_divide_one_another() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 96}
    model = model_config({"model_type": "llama", "num_attention_heads": 12, "num_key_value_heads": 3, **sizes})
    ParallelConfig(tp=6).check_model(model)
    with pytest.raises(ConfigError, match="tp=4 neither divides num_query_groups=3 nor is a multiple of it"):
        ParallelConfig(tp=4).check_model(model)
