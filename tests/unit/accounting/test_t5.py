"""Do the counts of a T5 agree with published ones, with transformers' model, with the whole and with arithmetic?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_megatron.accounting.t5 import (
    t5_model_flops_per_row,
    t5_rank_parameters,
    t5_total_parameters,
)
from lightning_megatron.models.config import ModelConfig

T5_LARGE = ModelConfig(
    family="t5",
    architecture="t5",
    num_layers=24,
    num_decoder_layers=24,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=64,
    vocab_size=32128,
    max_position_embeddings=1,
    normalization="RMSNorm",
)
FLAN_T5_LARGE = replace(
    T5_LARGE, ffn_hidden_size=2816, gated_linear_unit=True, share_embeddings_and_output_weights=False
)
ODD = replace(FLAN_T5_LARGE, num_layers=3, num_decoder_layers=4, relative_attention_num_buckets=8, vocab_size=101)


@pytest.mark.parametrize(("model", "published"), [(T5_LARGE, 737_668_096), (FLAN_T5_LARGE, 783_150_080)])
def test_total_is_the_published_count(model: ModelConfig, published: int) -> None:
    assert t5_total_parameters(model) == published


def test_total_equals_that_of_transformers_model() -> None:
    torch = pytest.importorskip("torch")
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_kv=64,
        d_ff=2816,
        num_heads=16,
        num_layers=3,
        num_decoder_layers=4,
        vocab_size=101,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        theirs = T5ForConditionalGeneration(config)
    tied = replace(ODD, share_embeddings_and_output_weights=True)
    assert t5_total_parameters(tied) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("layout", "tables", "pp"),
    [((7,), 2, 1), ((2, 5), 3, 2), ((0, 7), 2, 2), ((1, 3, 2, 1), 5, 2), ((1, 1, 1, 4), 4, 4)],
)
def test_stages_sum_to_the_whole_plus_copies_of_tables(layout: tuple[int, ...], tables: int, pp: int) -> None:
    held = [t5_rank_parameters(ODD, layout, tp=1, pp=pp, pp_rank=rank) for rank in range(pp)]
    padding = 2 * (ODD.padded_vocab_size(1) - ODD.vocab_size) * ODD.hidden_size
    assert sum(held) == t5_total_parameters(ODD) + padding + (tables - 2) * 8 * 16


def test_a_tied_output_layer_on_another_stage_is_a_copy() -> None:
    tied = replace(ODD, share_embeddings_and_output_weights=True)
    for layout, copies in (((7,), 1), ((3, 4), 2)):
        pp = len(layout)
        held = sum(t5_rank_parameters(tied, layout, tp=1, pp=pp, pp_rank=rank) for rank in range(pp))
        vocabulary = ODD.padded_vocab_size(1) * copies - ODD.vocab_size
        assert held == t5_total_parameters(tied) + vocabulary * ODD.hidden_size


def test_flops_of_a_small_model_by_hand() -> None:
    small = replace(
        T5_LARGE, num_layers=1, num_decoder_layers=1, hidden_size=4, ffn_hidden_size=5, num_attention_heads=1,
        num_query_groups=1, kv_channels=3, vocab_size=7,
    )  # fmt: skip
    # Six tokens in the encoder, two in the decoder; a multiply-add is two operations, backward twice as much again.
    encoder = 6 * (4 * 4 * 3 + 2 * 4 * 5) + 2 * 3 * 6 * 6
    decoder = 2 * (4 * 4 * 3 + 2 * 4 * 5) + 2 * 3 * 2 * 2 / 2 + 2 * (2 * 4 * 3) + 6 * (2 * 4 * 3) + 2 * 3 * 2 * 6
    head = 2 * 4 * 7
    assert t5_model_flops_per_row(small, 6, 2, 7) == 6 * (encoder + decoder + head)
    assert t5_model_flops_per_row(small, 6, 2, 7, "full") - t5_model_flops_per_row(small, 6, 2, 7) == 6 * 12
