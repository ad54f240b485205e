"""Layers of an encoder-decoder are cut as evenly as their costs allow."""

from __future__ import annotations

import itertools

import pytest

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import (
    DECODER_COST,
    ENCODER_COST,
    balanced_layout,
    check_layout,
    layout_by_hand,
    shares,
    t5_layout,
)

MODEL = ModelConfig(
    family="t5",
    architecture="t5",
    num_layers=3,
    num_decoder_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=12,
    vocab_size=97,
    max_position_embeddings=1,
)


def _costs(num_encoder_layers: int, layout: tuple[int, ...]) -> list[int]:
    return [
        ENCODER_COST * len(share.encoder) + DECODER_COST * len(share.decoder)
        for share in shares(num_encoder_layers, layout)
    ]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("num_encoder_layers", "num_decoder_layers"), [(1, 1), (3, 4), (6, 2), (2, 7), (5, 5)])
def test_no_cut_has_a_faster_slowest_chunk(num_encoder_layers: int, num_decoder_layers: int, num_chunks: int) -> None:
    num_layers = num_encoder_layers + num_decoder_layers
    num_chunks = min(num_chunks, num_layers)
    layout = balanced_layout(num_encoder_layers, num_decoder_layers, num_chunks)
    check_layout(layout, num_encoder_layers, num_decoder_layers, num_chunks)
    assert min(layout) >= 1
    every_cut = (
        tuple(end - start for start, end in itertools.pairwise((0, *borders, num_layers)))
        for borders in itertools.combinations(range(1, num_layers), num_chunks - 1)
    )

    def judged(cut: tuple[int, ...]) -> tuple[int, int]:
        costs = _costs(num_encoder_layers, cut)
        return max(costs), sum(cost * cost for cost in costs)

    assert judged(layout) == min(judged(cut) for cut in every_cut)


@pytest.mark.parametrize("layout", [(7,), (0, 7), (7, 0), (3, 4), (2, 5), (1, 3, 2, 1), (0, 4, 2, 1), (1, 1, 1, 4, 0)])
def test_every_layer_is_in_one_chunk_and_each_norm_where_its_stack_ends(layout: tuple[int, ...]) -> None:
    held = shares(3, layout)
    assert [number for share in held for number in share.encoder] == [0, 1, 2]
    assert [number for share in held for number in share.decoder] == [0, 1, 2, 3]
    assert [len(share.encoder) + len(share.decoder) for share in held] == list(layout)
    assert [share.ends_encoder for share in held] == [2 in share.encoder for share in held]


@pytest.mark.parametrize("given", [[2, 5], (2, 5), "Et*2|t*5L", "Ett|tttttL"])
def test_a_cut_is_given_as_numbers_or_in_megatrons_notation(given: object) -> None:
    assert layout_by_hand(given) == (2, 5)
    assert t5_layout(MODEL, ParallelConfig(pp=2), given) == (2, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2.5, 4.5], "does not say how many layers each chunk holds"),
        ([-1, 8], "does not say how many layers each chunk holds"),
        (7, "does not say how many layers each chunk holds"),
        ("Ex|L", "is not in Megatron's notation"),
        ([7], r"has 1 parts, but pp x vpp = 2 chunks"),
        ([3, 3], "has 6 layers, but the model has 3 in its encoder and 4 in its decoder"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        t5_layout(MODEL, ParallelConfig(pp=2), given)


def test_a_model_needs_as_many_layers_as_there_are_chunks() -> None:
    ParallelConfig(pp=7).check_model(MODEL)
    ParallelConfig(tp=2, pp=3, vpp=2, num_microbatches=3).check_model(MODEL)
    with pytest.raises(ConfigError, match="pp=8 x vpp=1 = 8 chunks are more than the 7 layers"):
        ParallelConfig(pp=8).check_model(MODEL)
    with pytest.raises(ConfigError, match="tp=3 does not divide num_attention_heads=4"):
        ParallelConfig(tp=3).check_model(MODEL)
