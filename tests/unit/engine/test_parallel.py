"""How many layers each chunk of a pipeline has."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError


def _layout(num_layers: int, first: int | None = None, last: int | None = None, **sizes: Any) -> tuple[int, ...]:
    parallel = ParallelConfig(
        num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last, num_microbatches=12, **sizes
    )
    return parallel.layout(num_layers)


def test_stages_but_the_first_and_last_share_evenly() -> None:
    assert _layout(32, pp=4) == (8, 8, 8, 8)
    assert _layout(32, pp=2, last=15) == (17, 15)
    assert _layout(32, pp=4, first=9, last=5) == (9, 9, 9, 5)
    # Virtual stages of one stage are alike, as megatron-core 0.16.1 has them.
    assert _layout(36, pp=2, vpp=2, last=16) == (10, 8, 10, 8)


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (32, {"pp": 3, "last": 5}),
        (32, {"pp": 2, "first": 20, "last": 11}),
        (32, {"pp": 2, "last": 33}),
        (32, {"pp": 4, "first": 0}),
        (36, {"pp": 2, "vpp": 3, "last": 16}),
    ],
)
def test_what_the_others_cannot_share_is_refused(num_layers: int, sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="equal shares of the"):
        _layout(num_layers, **sizes)


def test_one_stage_has_no_first_and_last() -> None:
    with pytest.raises(ConfigError, match="is for pipelines, but pp=1"):
        _layout(32, last=15)
