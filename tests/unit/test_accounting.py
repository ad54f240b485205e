"""Parameter and FLOP counts compared with published counts, transformers and hand calculation; peak FLOP/s."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from benchmarks.cases import GPT2_LARGE, LLAMA_8B, T5_LARGE
from lightning_megatron.convert.peft import LoRA, with_adapters
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.planning.devices import peak_flops_per_s
from lightning_megatron.planning.flops import (
    AttentionCount,
    forward_flops,
    layer_flops,
    model_flops,
)
from lightning_megatron.planning.memory import memory
from lightning_megatron.planning.parameters import (
    active_parameters,
    adapter_parameters,
    rank_parameters,
    total_parameters,
)
from lightning_megatron.planning.run import PlannedRun

_LIKE_LLAMA: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LIKE_LLAMA |= {"intermediate_size": 40, "num_experts_per_tok": 3, "vocab_size": 83}
_LIKE_QWEN = {**_LIKE_LLAMA, "num_experts": 6, "moe_intermediate_size": 12, "mlp_only_layers": [2]}
_DEEPSEEK = {
    **_LIKE_LLAMA,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "attention_bias": True,
}
_LINEAR_ATTENTION = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "shared_expert_intermediate_size": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {**_LIKE_LLAMA, "num_local_experts": 4},
    "Qwen2Moe": {**_LIKE_QWEN, "shared_expert_intermediate_size": 20},
    "Qwen3Moe": {**_LIKE_QWEN, "decoder_sparse_step": 2},
    "Ernie4_5_Moe": {
        **_LIKE_LLAMA,
        "moe_num_experts": 8,
        "moe_intermediate_size": 12,
        "moe_layer_interval": 2,
        "tie_word_embeddings": False,
    },
    "GptOss": {**_LIKE_LLAMA, "num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": _DEEPSEEK,
    "Qwen3Next": {**_LIKE_QWEN, **_LINEAR_ATTENTION},
}
_BERT = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "num_labels": 5,
}
_T5 = {
    "d_model": 1024,
    "d_ff": 2816,
    "num_heads": 16,
    "num_layers": 3,
    "num_decoder_layers": 4,
    "vocab_size": 101,
}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (f"MegatronBertFor{head}" for head in ("PreTraining", "MaskedLM", "QuestionAnswering")),
        _BERT,
    ),
    **dict.fromkeys(
        (f"MegatronBertFor{level}Classification" for level in ("Sequence", "Token")), _BERT
    ),
    "T5ForConditionalGeneration": {
        **_T5,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": 8,
    },
}


def test_total_parameters_equal_published_counts() -> None:
    published = (
        (GPT2_LARGE, 774_030_080),
        (LLAMA_8B, 8_030_261_248),
        (T5_LARGE, 737_668_096),
    )
    assert [total_parameters(model_config(model)) for model, _ in published] == [
        count for _, count in published
    ]


def _build_both(name: str, fields: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    """Model config and transformers' model, after a check that their parameter counts are equal."""
    config = getattr(transformers, f"{name.split('For')[0]}Config")(**fields, architectures=[name])
    with torch.device("meta"):
        model = model_config(config)
        reference = getattr(transformers, name)(config)
    # Selection biases, which are not trained by gradients, are parameters in some families.
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    assert total_parameters(model) == sum(parameter.numel() for parameter in trained)
    return model, reference


@pytest.mark.parametrize("name", OTHERS)
def test_total_parameters_equal_transformers(name: str) -> None:
    _build_both(name, OTHERS[name])


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters_and_flops_of_experts(name: str) -> None:
    model, reference = _build_both(f"{name}ForCausalLM", MIXTURES[name])
    experts = [p for n, p in reference.named_parameters() if ".experts." in n]
    idle = sum(p.numel() // len(p) * (len(p) - model.experts.topk) for p in experts)
    assert active_parameters(model) == total_parameters(model) - idle
    # Without attention, each weight of a matrix except the embedding is one multiply-add per token.
    not_multiplied = 0
    for n, p in reference.named_parameters():
        if n.endswith("proj_bias"):  # of all experts
            not_multiplied += p.numel() // len(p) * model.experts.topk
        elif p.requires_grad and (p.dim() == 1 or "embed_tokens" in n):
            not_multiplied += p.numel()
    scores = sum(layer_flops(model, (8,), layer)[1] for layer in range(4))
    assert forward_flops(model, (8,), 83) - scores == 2 * 8 * (
        active_parameters(model) - not_multiplied
    )


def test_rank_parameters_of_stages_and_experts() -> None:
    # Hugging Face Accelerate, docs/source/usage_guides/megatron_lm.md: tp=2, pp=2, vocabulary padded to 50432.
    model = model_config(GPT2_LARGE)
    parallel = ParallelConfig(tp=2, pp=2)
    layout = parallel.layers_per_chunk(model.num_layers)
    assert model.padded_vocab_size(2) == 50432
    stages = [rank_parameters(model, layout, parallel, rank) for rank in range(2)]
    assert stages == [210_753_280, 209_445_120]
    mixture = _build_both("MixtralForCausalLM", MIXTURES["Mixtral"])[0]
    total, rank = (rank_parameters(mixture, (4,), ParallelConfig(ep=ep), 0) for ep in (1, 4))
    assert total - rank == 4 * 3 * (3 * 24 * 40)


def test_adapters_of_latent_attention_dense_and_shared_mlps_are_counted() -> None:
    model = _build_both("DeepseekV3ForCausalLM", _DEEPSEEK)[0]
    h, ffn, heads, qk, value = 24, 40, 4, 6 + 4, 5
    attention = (h + 14) + (14 + heads * qk) + (h + 10 + 4) + (10 + heads * (6 + value))
    attention += heads * value + h
    dense = 2 * (h + ffn) + ffn + h
    shared = 3 * (h + 12)
    adapted = with_adapters(model, LoRA(rank=3))
    assert adapter_parameters(adapted) == 3 * (4 * attention + dense + 3 * shared)


def test_adapters_of_routed_experts_are_counted_on_their_ranks_and_in_flops() -> None:
    model = _build_both("Qwen2MoeForCausalLM", MIXTURES["Qwen2Moe"])[0]
    targets = ("experts.gate_up_proj", "experts.down_proj")
    q_proj = LoRA(rank=3, targets=("q_proj",))
    attention = with_adapters(model, q_proj)
    adapted = with_adapters(
        model,
        replace(q_proj, target_parameters=targets, ranks={"gate_up_proj": 5}),
    )
    # Three layers of six experts, of which a token goes through three; gate and up have one adapter.
    of_one = 5 * (24 + 2 * 12) + 3 * (12 + 24)
    assert adapter_parameters(attention) == 4 * 3 * (24 + 24)
    assert adapter_parameters(adapted) - adapter_parameters(attention) == 3 * 6 * of_one
    flops = model_flops(adapted, (8,), 83) - model_flops(attention, (8,), 83)
    assert flops == 6 * 8 * 3 * 3 * of_one
    layout = ParallelConfig(tp=2, ep=2, sequence_parallel=True)
    one, other = (
        PlannedRun(model=each, lengths=(8,), world_size=4, parallel=layout)
        for each in (adapted, attention)
    )
    assert one.trained(0) == {2: 4 * 3 * 48 / 2 + 3 * 6 * of_one / 2}
    more = 3 * 6 * of_one / 2
    # Weights in bf16, gradients in fp32, and masters and moments, which the two ranks with the same experts share.
    for use, num_bytes in (("weights", 2.0), ("gradients", 4.0), ("optimizer", 12.0 / 2)):
        difference = getattr(memory(one), use) - getattr(memory(other), use)
        assert difference == pytest.approx(num_bytes * more)


def test_adapters_of_linear_attention_and_of_gates_are_counted() -> None:
    model = _build_both("Qwen3NextForCausalLM", MIXTURES["Qwen3Next"])[0]
    h, ffn = 24, 40
    # Two projections in the files: queries, keys, values and gates of each key head, and two numbers of a value head.
    linear = (h + 2 * 2 * 6 + 2 * 4 * 10) + (h + 2 * 4) + (4 * 10 + h)
    attention = (h + 2 * 4 * 8) + 2 * (h + 2 * 8) + (4 * 8 + h)
    dense = 2 * (h + ffn) + ffn + h
    shared = 2 * (h + 20) + 20 + h
    adapted = with_adapters(model, LoRA(rank=3))
    assert adapter_parameters(adapted) == 3 * (3 * linear + attention + dense + 3 * shared)


def test_flops_of_linear_attention_are_those_of_its_recurrence() -> None:
    model = model_config({"model_type": "qwen3_next", **MIXTURES["Qwen3Next"]})
    # k S, k v^T and q S of each token in each of four heads, whatever the number of tokens.
    states = [layer_flops(model, (length,), 0)[1] for length in (8, 80)]
    assert states == [2 * 8 * 3 * 4 * 6 * 10, 2 * 80 * 3 * 4 * 6 * 10]
    assert layer_flops(model, (8,), 1)[1] == 2 * 2 * 8 * 4 * 8 * (8 / 2)


def test_flops_of_small_models_equal_hand_calculation() -> None:
    sizes = {
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    model = model_config({"model_type": "llama", "num_hidden_layers": 2, **sizes})
    # q, k, v: 4*4 + 2*(4*2); output projection 4*4; gated MLP 3*4*6; scores and values 2*4*(8/2); head 4*10.
    layer = (16 + 16) + 16 + 72
    assert forward_flops(model, (8,), 10) == 8 * 2 * (2 * (layer + 32) + 40)
    assert forward_flops(model, (8,), 10, "full") == 8 * 2 * (2 * (layer + 64) + 40)
    assert model_flops(model, (8,), 10) == 3 * forward_flops(model, (8,), 10)
    small = model_config(
        {
            "model_type": "t5",
            "d_model": 4,
            "d_kv": 3,
            "d_ff": 5,
            "num_heads": 1,
            "num_layers": 1,
        }
    )
    encoder = 6 * (4 * 4 * 3 + 2 * 4 * 5) + 2 * 3 * 6 * 6
    decoder = (
        2 * (4 * 4 * 3 + 2 * 4 * 5)
        + 2 * 3 * 2 * 2 / 2
        + 2 * (2 * 4 * 3)
        + 6 * (2 * 4 * 3)
        + 2 * 3 * 2 * 6
    )
    assert model_flops(small, (6, 2), 7) == 6 * (encoder + decoder + 2 * 4 * 7)
    assert model_flops(small, (6, 2), 7, "full") - model_flops(small, (6, 2), 7) == 6 * 12


def test_sliding_window_reduces_attention_flops() -> None:
    full = model_config(
        {
            "model_type": "gpt2",
            "n_layer": 3,
            "n_embd": 24,
            "n_head": 4,
        }
    )
    # The first four of 8 queries see 1, 2, 3, 4 keys, the other queries 4 each; half of the diagonal counts:
    # 8 * 4 - 4 * 4 / 2 = 24 pairs instead of 8 * 8 / 2 = 32.
    pairs: dict[AttentionCount, tuple[int, int]] = {
        "causal": (24, 32),
        "full": (4 * 8, 8 * 8),
    }
    for attention, (visible, all_keys) in pairs.items():
        flops = forward_flops(full, (8,), 128, attention)
        for layers, windows in ((3, None), (1, (1,))):
            windowed = replace(full, sliding_window=4, sliding_window_layers=windows)
            assert flops - forward_flops(windowed, (8,), 128, attention) == layers * 2 * 2 * 24 * (
                all_keys - visible
            )
        assert forward_flops(replace(full, sliding_window=99), (8,), 128, attention) == flops


def test_peak_flops_are_known_for_exact_device_names_only() -> None:
    assert peak_flops_per_s("NVIDIA H200", "bf16") == 989e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    for name in ("Tesla T4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H300", "cpu", ""):
        assert peak_flops_per_s(name, "bf16") is None
