"""Do the FLOPs agree with hand-computed and published figures?"""

from __future__ import annotations

import pytest

from lightning_megatron.accounting.flops import forward_flops_per_token, model_flops_per_step, model_flops_per_token
from lightning_megatron.models.config import ModelConfig
from tests.unit.accounting.shapes import (
    GPT2_LARGE,
    GPT2_XL,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_3_2_1B,
    LLAMA_3_8B,
    MEGATRON_CI_7B,
    gpt2,
)


@pytest.mark.parametrize(
    ("model", "seq_length", "gigaflops"),
    [
        (GPT2_LARGE, 1024, 4.92),
        (GPT2_XL, 1024, 9.80),
        (LLAMA_3_2_1B, 4096, 8.22),
        (LLAMA_3_2_1B, 8192, 9.03),
        (LLAMA_2_7B, 2048, 41.25),
        (LLAMA_2_7B, 4096, 42.86),
        (MEGATRON_CI_7B, 8192, 43.49),
        (LLAMA_3_8B, 4096, 48.25),
        (LLAMA_3_8B, 8192, 51.47),
        (LLAMA_2_13B, 4096, 82.14),
    ],
)
def test_causal_flops_per_token_match_the_figures_computed_by_hand(
    model: ModelConfig, seq_length: int, gigaflops: float
) -> None:
    got = model_flops_per_token(model, seq_length, model.padded_vocab_size(1)) / 1e9
    assert got == pytest.approx(gigaflops, abs=0.006)  # the figures have two decimals


def test_one_small_model_to_the_last_operation() -> None:
    # q, k, v: 4*4 + 2*(4*2); output projection 4*4; gated MLP 3*4*6; scores and values 2*4*(8/2); head 4*10.
    model = ModelConfig(
        family="llama",
        num_layers=2,
        hidden_size=4,
        ffn_hidden_size=6,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=2,
        vocab_size=9,
        max_position_embeddings=8,
        gated_linear_unit=True,
    )
    layer = (16 + 16) + 16 + 72
    assert forward_flops_per_token(model, 8, 10) == 2 * (2 * (layer + 32) + 40)
    assert forward_flops_per_token(model, 8, 10, attention="full") == 2 * (2 * (layer + 64) + 40)
    assert model_flops_per_token(model, 8, 10) == 3 * forward_flops_per_token(model, 8, 10)
    assert model_flops_per_step(model, 8, 5, 10) == 40 * model_flops_per_token(model, 8, 10)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "seq", "vocab"), [(24, 2304, 24, 2048, 51200), (2, 64, 4, 16, 128)]
)
def test_full_attention_equals_equation_3_of_the_megatron_paper_without_recomputation(
    layers: int, hidden: int, heads: int, seq: int, vocab: int
) -> None:
    model = gpt2(layers, hidden, heads)
    batch = 7
    paper = 72 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops_per_step(model, seq, batch, vocab, attention="full") == pytest.approx(paper, rel=1e-12)


def test_full_attention_of_llama_3_8b_at_8192_is_the_published_figure() -> None:
    full = model_flops_per_token(LLAMA_3_8B, 8192, LLAMA_3_8B.padded_vocab_size(1), attention="full")
    assert full / 1e9 == pytest.approx(57.91, abs=0.006)


def test_a_window_leaves_out_the_keys_before_it() -> None:
    from dataclasses import replace

    whole = gpt2(3, 24, 4)
    # Of 8 queries the first four see 1, 2, 3, 4 keys and the others 4 each; as elsewhere half of the diagonal counts:
    # 8 * 4 - 4 * 4 / 2 = 24 pairs instead of 8 * 8 / 2 = 32.
    pairs = {"causal": (24 / 8, 32 / 8), "full": (4, 8)}
    for attention, (seen, all_keys) in pairs.items():
        difference = 2 * 2 * 24 * (all_keys - seen)

        def flops(model: ModelConfig, attention: str = attention) -> float:
            return forward_flops_per_token(model, 8, 128, attention)  # type: ignore[arg-type]

        assert flops(whole) - flops(replace(whole, sliding_window=4)) == pytest.approx(3 * difference)
        in_one_layer = replace(whole, sliding_window=4, sliding_window_layers=(1,))
        assert flops(whole) - flops(in_one_layer) == pytest.approx(difference)
        assert flops(replace(whole, sliding_window=8)) == flops(replace(whole, sliding_window=99)) == flops(whole)
