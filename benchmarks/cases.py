"""Benchmark cases of training and generation: models, layouts and sizes as data. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_megatron.planning.shapes import SHAPES


@dataclass(frozen=True)
class Target:
    """Performance target of a case on H200s: a maximum for ``step_seconds``, a minimum for other metrics."""

    metric: Literal["tokens_per_s", "tokens_per_s_per_gpu", "step_seconds", "mfu_causal"]
    """Field of a training record (``measurement.py``)."""
    value: float
    """In the metric's unit."""

    def is_met(self, measured: float) -> bool:
        """Whether ``measured`` reaches the target."""
        return measured <= self.value if self.metric == "step_seconds" else measured >= self.value

    def __str__(self) -> str:
        if self.metric == "step_seconds":
            return f"<= {self.value:g} s/step"
        if self.metric == "mfu_causal":
            return f">= {self.value:.0%} MFU"
        return f">= {self.value:,.0f} tok/s" + (
            "/GPU" if self.metric == "tokens_per_s_per_gpu" else ""
        )


@dataclass(frozen=True)
class Case:
    """Training run with timed steps."""

    name: str
    """Name on the command line."""
    model: Mapping[str, Any]
    """Fields of a Hugging Face config."""
    seq_length: int
    """Tokens per row; for T5 of the encoder."""
    micro_batch_size: int
    """Rows per microbatch."""
    num_microbatches: int
    """Microbatches per step of one replica."""
    num_devices: int = 1
    """GPUs (or CPU processes) of the run."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronStrategy`` besides ``num_microbatches``."""
    target: Target | None = None
    """Performance target on H200s; None for none."""
    decoder_seq_length: int = 0
    """Tokens per row of a T5's decoder."""
    lora: Mapping[str, Any] | None = None
    """Fields of ``LoRA``; None to train the weights."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OptimizerOptions``."""
    precision: str = "bf16-mixed"
    """``Trainer(precision=)``."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """``Trainer(accelerator=)``."""

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas."""
        ranks_per_replica: int = math.prod(self.layout.get(name, 1) for name in ("tp", "pp", "cp"))
        return self.num_devices // ranks_per_replica

    @property
    def rows(self) -> int:
        """Rows per step of one replica."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def tokens(self) -> int:
        """Tokens per step over all replicas."""
        return self.rows * self.data_parallel_size * (self.seq_length + self.decoder_seq_length)

    def __str__(self) -> str:
        layout = " ".join(f"{name}={value}" for name, value in self.layout.items())
        decoder = f"+{self.decoder_seq_length}" if self.decoder_seq_length else ""
        batch = f"s{self.seq_length}{decoder} mb{self.micro_batch_size} x {self.num_microbatches}"
        return f"{self.num_devices} {self.accelerator}, {batch}, dp={self.data_parallel_size} {layout}".rstrip()


@dataclass(frozen=True)
class GenerationCase:
    """Timed generation with fixed prompt length and number of new tokens."""

    name: str
    """Name on the command line."""
    model: Mapping[str, Any]
    """Fields of a Hugging Face config."""
    batch_size: int
    """Prompts per batch."""
    tp: int = 1
    """GPUs (or CPU processes) of the run."""
    prompt_length: int = 512
    """Tokens per prompt."""
    new_tokens: int = 256
    """New tokens per prompt, without end-of-sequence token."""
    precision: str = "bf16-true"
    """``Trainer(precision=)``."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """``Trainer(accelerator=)``."""

    def __str__(self) -> str:
        rows = f"{self.batch_size} x ({self.prompt_length} in + {self.new_tokens} out)"
        return f"{self.tp} {self.accelerator}, {rows}" + (f" tp={self.tp}" if self.tp > 1 else "")


LLAMA_1B: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    # Tied in the published model; the peers' measurements are untied, which is slightly more work.
    "tie_word_embeddings": False,
}
"""Llama-3.2-1B (Grattafiori et al. 2024), but with untied embeddings."""

LLAMA_8B: Mapping[str, Any] = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}
"""Llama-3-8B (Grattafiori et al. 2024)."""

GPT2_LARGE: Mapping[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 1280,
    "n_layer": 36,
    "n_head": 20,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
"""GPT-2 large (Radford et al. 2019), with its dropout."""

QWEN3_30B_A3B: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
"""Qwen3-30B-A3B (Yang et al. 2025): 128 experts per layer, 8 per token."""

MOONLIGHT_16B_A3B: Mapping[str, Any] = SHAPES["moonlight-16b-a3b"]
"""Moonlight-16B-A3B (Moonshot AI 2025, arXiv 2502.16982): latent attention with heads of 192 and 128, 64 experts."""

QWEN3_NEXT_80B_A3B: Mapping[str, Any] = SHAPES["qwen3-next-80b-a3b"]
"""Qwen3-Next-80B-A3B (Qwen Team 2025): gated delta nets in three of four layers, 512 experts."""

GPT_OSS_20B: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "tie_word_embeddings": False,
}
"""gpt-oss-20b (OpenAI 2025, arXiv 2508.10925): sinks of attention, windows in every other layer, 32 experts."""

BERT_LARGE: Mapping[str, Any] = {
    "model_type": "megatron-bert",
    "vocab_size": 29056,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
}
"""BERT-large (Devlin et al. 2018) with Megatron's order of norms (Shoeybi et al. 2019), with its dropout."""

T5_LARGE: Mapping[str, Any] = {
    "model_type": "t5",
    "vocab_size": 32128,
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "decoder_start_token_id": 0,
}
"""T5-large (Raffel et al. 2020), version 1.0, with its dropout."""

_TINY: Mapping[str, Any] = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 32}
_GPT2_TINY = {
    **GPT2_LARGE,
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}
_BERT_TINY = {**BERT_LARGE, **_TINY, "intermediate_size": 32, "num_attention_heads": 2}
_T5_TINY = {
    **T5_LARGE,
    "vocab_size": 300,
    "d_model": 32,
    "d_ff": 32,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 2,
}
_EXPERTS_TINY = {**QWEN3_30B_A3B, **_TINY, "num_attention_heads": 4, "moe_intermediate_size": 16}
_EXPERTS_TINY |= {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
_LLAMA_TINY = {**LLAMA_8B, **_TINY, "intermediate_size": 64, "head_dim": 8}
_LLAMA_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}

_LLAMA_8_LAYERS = {**LLAMA_8B, "num_hidden_layers": 8}
_TP2 = {"tp": 2, "sequence_parallel": True}
_TP2_PP2 = {"tp": 2, "pp": 2, "sequence_parallel": True}
_OFFLOAD = {"offload_optimizer": True}
_CPU: Mapping[str, Any] = {"precision": "32-true", "accelerator": "cpu"}


def _per_gpu(tokens: float) -> Target:
    return Target("tokens_per_s_per_gpu", tokens)


_BF16_CASES: tuple[Case, ...] = (
    # Name, model, tokens per row, rows per microbatch, microbatches, GPUs, layout, target.
    Case("llama-1b", LLAMA_1B, 4096, 4, 2, target=Target("tokens_per_s", 60_000)),
    Case(
        "llama-1b-muon",
        LLAMA_1B,
        4096,
        4,
        2,
        optimizer={"name": "muon", "adjust_lr": "match_rms_adamw"},
    ),
    Case("gpt2-large", GPT2_LARGE, 1024, 24, 2, target=Target("tokens_per_s", 80_000)),
    Case("llama-8b-8layers", _LLAMA_8_LAYERS, 4096, 2, 8, target=Target("mfu_causal", 0.58)),
    # 256k tokens a step; the same without is llama-8b-8layers with --num-microbatches 32.
    Case("llama-8b-8layers-offload", _LLAMA_8_LAYERS, 4096, 2, 32, layout=_OFFLOAD),
    Case("llama-8b-offload", LLAMA_8B, 4096, 2, 8, layout=_OFFLOAD),
    Case("gpt2-large-tp2-pp2", GPT2_LARGE, 1024, 24, 2, 4, _TP2_PP2, Target("step_seconds", 0.32)),
    Case("gpt2-large-dp4", GPT2_LARGE, 1024, 12, 1, 4),
    Case(
        "llama-8b-lora",
        LLAMA_8B,
        4096,
        2,
        4,
        lora={"rank": 16, "alpha": 32.0},
        target=_per_gpu(14_000),
    ),
    Case("llama-8b-tp2-dp2", LLAMA_8B, 4096, 2, 4, 4, _TP2, _per_gpu(9_700)),
    Case("llama-8b-tp2", LLAMA_8B, 4096, 2, 4, 2, _TP2),
    Case("llama-8b-dp2", LLAMA_8B, 4096, 1, 8, 2),
    Case("llama-8b-dp4-mb1", LLAMA_8B, 4096, 1, 8, 4),
    Case("llama-8b-dp4-mb2", LLAMA_8B, 4096, 2, 4, 4, target=_per_gpu(11_000)),
    Case("llama-8b-dp4-s8192", LLAMA_8B, 8192, 1, 4, 4),
    Case("llama-8b-cp2-dp2-s8192", LLAMA_8B, 8192, 2, 4, 4, {"cp": 2}),
    *(
        Case(
            f"llama-8b-cp4-s{length}",
            {**LLAMA_8B, "max_position_embeddings": length},
            length,
            1,
            2,
            4,
            layout,
        )
        for length, layout in (
            (32768, {"cp": 4, "recompute": "selective"}),
            (131072, {"cp": 4, "recompute": "full"}),
        )
    ),
    *(
        # As many layers as fit in memory: 18 bytes per parameter of a rank's experts, and activations.
        Case(
            f"qwen3-30b-a3b-{8 * gpus}layers" + (f"-ep{gpus}" if gpus > 1 else ""),
            *({**QWEN3_30B_A3B, "num_hidden_layers": 8 * gpus}, 4096, rows, 16 // rows, gpus),
            *({"ep": gpus} if gpus > 1 else {}, Target("mfu_causal", 0.25)),
        )
        for gpus, rows in ((1, 4), (2, 2), (4, 2))
    ),
    Case(
        "qwen3-30b-a3b-16layers-ep2-gathered",
        {**QWEN3_30B_A3B, "num_hidden_layers": 16},
        4096,
        2,
        8,
        2,
        {"ep": 2, "transformer_config_overrides": {"moe_token_dispatcher_type": "allgather"}},
    ),
    Case(
        "moonlight-16b-a3b-8layers",
        {**MOONLIGHT_16B_A3B, "num_hidden_layers": 8},
        4096,
        4,
        4,
    ),
    Case(
        "gpt-oss-20b-6layers",
        {**GPT_OSS_20B, "num_hidden_layers": 6},
        4096,
        2,
        8,
    ),
    # In bf16, with 18 bytes per parameter, 7.2 billion of four layers take 121 GiB, and 5.6 of three 94.
    Case(
        "qwen3-next-4layers",
        {**QWEN3_NEXT_80B_A3B, "num_hidden_layers": 4},
        4096,
        1,
        8,
    ),
    Case(
        "qwen3-next-3layers",
        {
            **QWEN3_NEXT_80B_A3B,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        4096,
        2,
        4,
    ),
    Case("bert-large", BERT_LARGE, 512, 32, 2),
    Case("bert-large-tp2-pp2", BERT_LARGE, 512, 32, 8, 4, _TP2_PP2),
    Case("t5-large", T5_LARGE, 512, 32, 2, decoder_seq_length=128),
    Case("t5-large-tp2-pp2", T5_LARGE, 512, 32, 8, 4, _TP2_PP2, decoder_seq_length=128),
    Case("gpt2-large-graphs", GPT2_LARGE, 1024, 12, 1, layout={"cuda_graphs": True}),
    Case("smoke", _GPT2_TINY, 32, 2, 2, **_CPU),
    Case("smoke-bert", _BERT_TINY, 32, 2, 2, **_CPU),
    Case("smoke-t5", _T5_TINY, 32, 2, 2, decoder_seq_length=16, **_CPU),
    Case("smoke-muon", _GPT2_TINY, 32, 2, 2, optimizer={"name": "muon"}, **_CPU),
    Case("smoke-offload", _GPT2_TINY, 32, 2, 2, layout=_OFFLOAD, **_CPU),
    Case("smoke-lora", _GPT2_TINY, 32, 2, 2, 2, {"tp": 2}, lora={"rank": 4}, **_CPU),
    Case("smoke-experts", _EXPERTS_TINY, 32, 2, 2, 2, {**_TP2, "ep": 2}, **_CPU),
    Case("smoke-tp2", _GPT2_TINY, 32, 2, 2, 2, _TP2, **_CPU),
)

_FP8_TARGETS: Mapping[str, Target | None] = {
    "llama-1b": _per_gpu(72_000),
    "llama-8b-dp4-mb2": _per_gpu(17_000),
    "llama-8b-tp2-dp2": _per_gpu(14_200),
    "llama-8b-dp4-s8192": _per_gpu(15_200),
    **dict.fromkeys(("llama-8b-8layers", "llama-8b-tp2", "gpt2-large", "smoke")),
}
"""Cases with an fp8 variant, and its target."""

CASES: tuple[Case, ...] = (
    *_BF16_CASES,
    *(
        replace(case, name=f"{case.name}-graphs", layout={"cuda_graphs": True})
        for case in _BF16_CASES
        if case.name in ("bert-large", "t5-large")
    ),
    *(
        replace(
            case,
            name=f"{case.name}-fp8",
            layout={**case.layout, "fp8": "tensorwise"},
            precision="bf16-mixed",
            target=_FP8_TARGETS[case.name],
        )
        for case in _BF16_CASES
        if case.name in _FP8_TARGETS
    ),
)
"""All training cases; ``smoke`` cases only test that the benchmarks run."""


_PROMPTS: Mapping[str, Any] = {"prompt_length": 12, "new_tokens": 10, **_CPU}

GENERATION_CASES: tuple[GenerationCase, ...] = (
    GenerationCase("llama-8b-b1", LLAMA_8B, 1),
    GenerationCase("llama-8b-b32", LLAMA_8B, 32),
    GenerationCase("llama-8b-b1-tp2", LLAMA_8B, 1, 2),
    GenerationCase("llama-8b-b32-tp2", LLAMA_8B, 32, 2),
    GenerationCase("smoke", _LLAMA_TINY, 2, **_PROMPTS),
    GenerationCase("smoke-tp2", _LLAMA_TINY, 2, 2, **_PROMPTS),
)
"""All generation cases; ``smoke`` cases only test that the benchmarks run."""


def case_named(name: str) -> Case:
    """Return the training case called ``name``.

    Raises:
        KeyError: If the name is unknown.
    """
    return {case.name: case for case in CASES}[name]


def changed(
    case: Case,
    layers: int | None = None,
    micro_batch_size: int | None = None,
    num_microbatches: int | None = None,
) -> Case:
    """Return ``case`` with a different number of layers or batch (None: unchanged); a changed case has no target."""
    names = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in case.model]
    variant = replace(
        case,
        model={**case.model, **dict.fromkeys(names, layers)} if layers else case.model,
        micro_batch_size=micro_batch_size or case.micro_batch_size,
        num_microbatches=num_microbatches or case.num_microbatches,
    )
    return case if variant == case else replace(variant, target=None)
