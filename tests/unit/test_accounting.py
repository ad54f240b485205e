"""Parameters and FLOPs beside published counts, transformers' models and arithmetic by hand; peaks of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from lightning_megatron.accounting import (
    AttentionCount,
    active_parameters,
    forward_flops,
    layer_flops,
    model_flops,
    peak_flops_per_s,
    rank_parameters,
    total_parameters,
)
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.models.config import ModelConfig


def gpt2(num_layers: int, hidden_size: int, num_attention_heads: int, **changes: Any) -> ModelConfig:
    shape = {"family": "gpt2", "vocab_size": 50257, "max_position_embeddings": 1024}
    shape |= {"num_layers": num_layers, "hidden_size": hidden_size, "ffn_hidden_size": 4 * hidden_size}
    shape |= {"num_attention_heads": num_attention_heads, "num_query_groups": num_attention_heads}
    return ModelConfig(**shape | {"kv_channels": hidden_size // num_attention_heads} | changes)


_WITHOUT_BIASES = {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False}


def llama(layers: int, hidden: int, ffn: int, heads: tuple[int, int], **changes: Any) -> ModelConfig:
    shape = {"ffn_hidden_size": ffn, "num_query_groups": heads[1], "vocab_size": 128256, "gated_linear_unit": True}
    shape |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return gpt2(layers, hidden, heads[0], **shape | _WITHOUT_BIASES | changes)


def bert(num_layers: int, hidden_size: int, num_attention_heads: int, task: str, num_labels: int = 2) -> ModelConfig:
    shape = {"vocab_size": 29056, "max_position_embeddings": 512, "num_tokentypes": 2, "num_labels": num_labels}
    return gpt2(num_layers, hidden_size, num_attention_heads, architecture="bert", task=task, **shape)


GPT2_LARGE = gpt2(36, 1280, 20)
LLAMA_3_2_1B = llama(16, 2048, 8192, (32, 8), share_embeddings_and_output_weights=True)
LLAMA_3_8B = llama(32, 4096, 14336, (32, 8))
_T5 = {"architecture": "t5", "position_embedding_type": "relative", "vocab_size": 32128}
T5_LARGE = gpt2(24, 1024, 16, num_decoder_layers=24, **_T5, **_WITHOUT_BIASES)
FLAN_T5_LARGE = replace(
    T5_LARGE, ffn_hidden_size=2816, gated_linear_unit=True, share_embeddings_and_output_weights=False
)
ODD_T5 = replace(FLAN_T5_LARGE, num_layers=3, num_decoder_layers=4, relative_attention_num_buckets=8, vocab_size=101)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (GPT2_LARGE, 774_030_080),
        (LLAMA_3_2_1B, 1_235_814_400),
        (LLAMA_3_8B, 8_030_261_248),
        (T5_LARGE, 737_668_096),
        (FLAN_T5_LARGE, 783_150_080),
    ],
)
def test_total_is_the_published_count(model: ModelConfig, published: int) -> None:
    assert total_parameters(model) == published


_LIKE_LLAMA = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_LIKE_LLAMA |= {"intermediate_size": 40, "num_experts_per_tok": 3}
_LIKE_QWEN = {**_LIKE_LLAMA, "num_experts": 6, "moe_intermediate_size": 12, "mlp_only_layers": [2]}
MIXTURES = {
    "Mixtral": {**_LIKE_LLAMA, "num_local_experts": 4},
    "Qwen2Moe": {**_LIKE_QWEN, "shared_expert_intermediate_size": 20},
    "Qwen3Moe": {**_LIKE_QWEN, "decoder_sparse_step": 2},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_parameters_of_a_mixture_are_those_of_transformers_and_a_token_meets_some(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=83, **MIXTURES[name])
    with torch.device("meta"):
        theirs = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model_config(config)
    assert total_parameters(model) == sum(p.numel() for p in theirs.parameters())
    of_experts = [p for n, p in theirs.named_parameters() if ".experts." in n]
    idle = sum(p.numel() // len(p) * (len(p) - model.experts.topk) for p in of_experts)  # type: ignore[union-attr]
    assert active_parameters(model) == total_parameters(model) - idle
    # Without attention each matrix but the embedding is one multiply-add for a token.
    others = sum(p.numel() for n, p in theirs.named_parameters() if p.dim() == 1 or "embed_tokens" in n)
    scores = sum(layer_flops(model, (8,), layer)[1] for layer in range(4))
    assert forward_flops(model, (8,), 83) - scores == 2 * 8 * (active_parameters(model) - others)


def test_a_rank_has_its_part_of_the_experts() -> None:
    model = model_config(transformers.MixtralConfig(vocab_size=84, **MIXTURES["Mixtral"]))
    model = replace(model, make_vocab_size_divisible_by=1)
    of_all, of_rank = (rank_parameters(model, (4,), tp=1, pp=1, pp_rank=0, ep=ep) for ep in (1, 4))
    assert of_all - of_rank == 4 * 3 * (3 * 24 * 40)


BERT_HEADS = {
    "pretraining": "PreTraining",
    "masked_lm": "MaskedLM",
    "sequence_classification": "SequenceClassification",
    "token_classification": "TokenClassification",
    "question_answering": "QuestionAnswering",
}


def test_total_equals_that_of_transformers_models() -> None:
    shape = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    berts = transformers.MegatronBertConfig(**shape, intermediate_size=96, num_labels=5)
    t5 = transformers.T5Config(
        d_model=1024, d_kv=64, d_ff=2816, num_heads=16, num_layers=3, num_decoder_layers=4, vocab_size=101,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    tied_t5 = replace(ODD_T5, share_embeddings_and_output_weights=True)
    with torch.device("meta"):
        pairs = [
            (bert(3, 24, 4, task, num_labels=5), getattr(transformers, f"MegatronBertFor{head}")(berts))
            for task, head in BERT_HEADS.items()
        ]
        pairs.append((tied_t5, transformers.T5ForConditionalGeneration(t5)))
    for model, theirs in pairs:
        assert total_parameters(model) == sum(parameter.numel() for parameter in theirs.parameters()), model.task


def test_ranks_of_gpt2_large_hold_what_accelerates_guide_prints_for_megatron_lm() -> None:
    # Hugging Face Accelerate, docs/source/usage_guides/megatron_lm.md: tp=2, pp=2, vocabulary padded to 50432.
    layout = ParallelConfig(pp=2).layout(GPT2_LARGE.num_layers)
    assert GPT2_LARGE.padded_vocab_size(2) == 50432
    assert rank_parameters(GPT2_LARGE, layout, tp=2, pp=2, pp_rank=0) == 210_753_280
    assert rank_parameters(GPT2_LARGE, layout, tp=2, pp=2, pp_rank=1) == 209_445_120


def test_small_models_to_the_last_operation() -> None:
    # q, k, v: 4*4 + 2*(4*2); output projection 4*4; gated MLP 3*4*6; scores and values 2*4*(8/2); head 4*10.
    model = llama(2, 4, 6, (2, 1))
    layer = (16 + 16) + 16 + 72
    assert forward_flops(model, (8,), 10) == 8 * 2 * (2 * (layer + 32) + 40)
    assert forward_flops(model, (8,), 10, "full") == 8 * 2 * (2 * (layer + 64) + 40)
    assert model_flops(model, (8,), 10) == 3 * forward_flops(model, (8,), 10)
    small = replace(
        T5_LARGE, num_layers=1, num_decoder_layers=1, hidden_size=4, ffn_hidden_size=5, num_attention_heads=1,
        num_query_groups=1, kv_channels=3, vocab_size=7,
    )  # fmt: skip
    encoder = 6 * (4 * 4 * 3 + 2 * 4 * 5) + 2 * 3 * 6 * 6
    decoder = 2 * (4 * 4 * 3 + 2 * 4 * 5) + 2 * 3 * 2 * 2 / 2 + 2 * (2 * 4 * 3) + 6 * (2 * 4 * 3) + 2 * 3 * 2 * 6
    assert model_flops(small, (6, 2), 7) == 6 * (encoder + decoder + 2 * 4 * 7)
    assert model_flops(small, (6, 2), 7, "full") - model_flops(small, (6, 2), 7) == 6 * 12


def test_a_window_leaves_out_the_keys_before_it() -> None:
    whole = gpt2(3, 24, 4)
    # Of 8 queries the first four see 1, 2, 3, 4 keys and the others 4 each; as elsewhere half of the diagonal counts:
    # 8 * 4 - 4 * 4 / 2 = 24 pairs instead of 8 * 8 / 2 = 32.
    pairs: dict[AttentionCount, tuple[int, int]] = {"causal": (24, 32), "full": (4 * 8, 8 * 8)}
    for attention, (seen, all_keys) in pairs.items():
        difference = 2 * 2 * 24 * (all_keys - seen)
        flops = forward_flops(whole, (8,), 128, attention)
        assert flops - forward_flops(replace(whole, sliding_window=4), (8,), 128, attention) == 3 * difference
        in_one_layer = replace(whole, sliding_window=4, sliding_window_layers=(1,))
        assert flops - forward_flops(in_one_layer, (8,), 128, attention) == difference
        assert forward_flops(replace(whole, sliding_window=99), (8,), 128, attention) == flops


def test_peaks_are_those_of_datasheets_for_exactly_the_devices_that_are_known() -> None:
    assert peak_flops_per_s("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops_per_s("Tesla T4", "fp16") == 65e12
    assert peak_flops_per_s("Tesla T4", "bf16") is None
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H300", "cpu", "", "nvidia h200"):
        assert peak_flops_per_s(name, "bf16") is None
