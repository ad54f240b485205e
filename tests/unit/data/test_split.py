"""A split is what the engine makes of it; what the engine misreads is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.samples import (
    SPLIT_NAMES,
    canonical_split,
    parse_split,
    split_ranges,
)
from lightning_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("949,50,1", (949, 50, 1)),
        ("969/30/1", (969, 30, 1)),
        (" 8 , 1.5, .5 ", (8, 1.5, 0.5)),
        ("90", (90, 0, 0)),
        ("1,0,0", (1, 0, 0)),
        ("0,1", (0, 1, 0)),
    ],
)
def test_weights_are_read(text: str, weights: tuple[float, float, float]) -> None:
    assert parse_split(text) == weights


@pytest.mark.parametrize("text", ["-1,1", "1e-3,1", "", "1,,1", "a", "1;2", "1,2,nan", "inf", "1,1,1,1", "+1"])
def test_what_is_not_a_weight_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be one to three weights like 949,50,1"):
        parse_split(text)


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1000)), min_size=1, max_size=3).filter(any),
    num_sequences=st.integers(1, 10**9),
)
def test_bounds_equal_the_engines(weights: list[float], num_sequences: int) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    text = ",".join(np.format_float_positional(weight) for weight in weights)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(canonical_split(text)))

    for name, bounds in zip(SPLIT_NAMES, matrix, strict=True):
        ours = split_ranges(text, num_sequences)[name]
        if bounds is None:
            assert len(ours) == 0
        else:
            assert ours == range(*(int(round(bound * float(num_sequences))) for bound in bounds))
