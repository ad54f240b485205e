"""Pipeline layouts of encoder-decoders: balanced by layer cost, or given as a list or in Megatron's notation."""

import itertools

import pytest

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import (
    DECODER_COST,
    ENCODER_COST,
    balanced_layout,
    layer_ranges,
    parse_layout,
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
    chunks = layer_ranges(num_encoder_layers, layout)
    return [
        ENCODER_COST * len(encoder) + DECODER_COST * len(decoder) for encoder, decoder in chunks
    ]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("num_encoder_layers", "num_decoder_layers"),
    [
        (1, 1),
        (3, 4),
        (6, 2),
        (2, 7),
        (5, 5),
    ],
)
def test_balanced_layout_is_optimal(
    num_encoder_layers: int, num_decoder_layers: int, num_chunks: int
) -> None:
    num_layers = num_encoder_layers + num_decoder_layers
    num_chunks = min(num_chunks, num_layers)
    layout = balanced_layout(num_encoder_layers, num_decoder_layers, num_chunks)
    assert (len(layout), sum(layout), min(layout) >= 1) == (num_chunks, num_layers, True)
    layouts = (
        tuple(end - start for start, end in itertools.pairwise((0, *borders, num_layers)))
        for borders in itertools.combinations(range(1, num_layers), num_chunks - 1)
    )

    def cost(candidate: tuple[int, ...]) -> tuple[int, int]:
        costs = _costs(num_encoder_layers, candidate)
        return max(costs), sum(each * each for each in costs)

    assert cost(layout) == min(map(cost, layouts))


@pytest.mark.parametrize(
    "layout",
    [
        [2, 5],
        (2, 5),
        "Et*2|t*5L",
        "Ett|tttttL",
    ],
)
def test_layout_is_a_list_or_megatrons_notation(layout: object) -> None:
    assert parse_layout(layout) == (2, 5)
    assert t5_layout(MODEL, ParallelConfig(pp=2), layout) == (2, 5)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([2.5, 4.5], "does not say how many layers each chunk holds"),
        ("Ex|L", "or Megatron's notation"),
        ([3, 3], "3 layers of the encoder [+] 4 of the decoder in all, got 2 numbers and 6 layers"),
        ([-1, 8], "leaves a chunk without weights"),
    ],
)
def test_invalid_layout_is_refused(layout: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        t5_layout(MODEL, ParallelConfig(pp=2), layout)
