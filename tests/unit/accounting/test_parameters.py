"""Do the counts agree with published ones, with transformers' models and with the whole?"""

from __future__ import annotations

import pytest

from lightning_megatron.accounting.parameters import (
    rank_parameters,
    total_parameters,
)
from lightning_megatron.models.config import ModelConfig
from tests.unit.accounting.shapes import GPT2_LARGE, LLAMA_2_7B, LLAMA_3_2_1B, LLAMA_3_8B, gpt2, llama


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (GPT2_LARGE, 774_030_080),
        (gpt2(12, 768, 12), 124_439_808),
        (LLAMA_3_2_1B, 1_235_814_400),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_2_7B, 6_738_415_616),
    ],
)
def test_total_is_the_published_count(model: ModelConfig, published: int) -> None:
    assert total_parameters(model) == published


def test_total_equals_that_of_transformers_models() -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    sizes = {"vocab_size": 101, "tie_word_embeddings": False}
    ours = {
        gpt2(
            3, 24, 4, vocab_size=101, max_position_embeddings=17, share_embeddings_and_output_weights=False
        ): GPT2Config(n_layer=3, n_embd=24, n_head=4, n_positions=17, **sizes),
        llama(3, 24, 40, (4, 2), vocab_size=101): LlamaConfig(
            num_hidden_layers=3,
            hidden_size=24,
            intermediate_size=40,
            num_attention_heads=4,
            num_key_value_heads=2,
            **sizes,
        ),
    }
    for model, config in ours.items():
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config)
        assert total_parameters(model) == sum(p.numel() for p in theirs.parameters())


def test_ranks_of_gpt2_large_hold_what_accelerates_guide_prints_for_megatron_lm() -> None:
    # Hugging Face Accelerate, docs/source/usage_guides/megatron_lm.md: tp=2, pp=2, vocabulary padded to 50432.
    assert GPT2_LARGE.padded_vocab_size(2) == 50432
    assert rank_parameters(GPT2_LARGE, tp=2, pp=2, pp_rank=0) == 210_753_280
    assert rank_parameters(GPT2_LARGE, tp=2, pp=2, pp_rank=1) == 209_445_120


def test_pipeline_stages_sum_to_the_whole_plus_a_copy_of_a_tied_embedding() -> None:
    for model, copies in ((LLAMA_3_8B, 0), (LLAMA_3_2_1B, 1)):
        stages = sum(rank_parameters(model, tp=1, pp=4, pp_rank=rank) for rank in range(4))
        assert stages == total_parameters(model) + copies * model.vocab_size * model.hidden_size
