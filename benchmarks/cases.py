"""Cases of the training benchmark: models, layouts and batch sizes as data; importing this loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

TargetMetric = Literal["tokens_per_s", "tokens_per_s_per_gpu", "step_seconds", "mfu_causal"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The figure that a case must reach; a step time from above, everything else from below."""

    metric: TargetMetric
    """A field of ``Measurement``."""
    value: float
    """In the metric's unit."""

    def is_met(self, measured: float | None) -> bool | None:
        """Whether ``measured`` reaches the target; None if it could not be measured."""
        if measured is None:
            return None
        return measured <= self.value if self.metric == "step_seconds" else measured >= self.value

    def __str__(self) -> str:
        if self.metric == "step_seconds":
            return f"<= {self.value:g} s/step"
        if self.metric == "mfu_causal":
            return f">= {self.value:.0%} MFU"
        return f">= {self.value:,.0f} tok/s" + ("/GPU" if self.metric == "tokens_per_s_per_gpu" else "")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run whose steps are timed."""

    name: str
    """By which it is chosen on the command line."""
    model: Mapping[str, Any]
    """Fields of a Hugging Face config."""
    seq_length: int
    """Tokens per row; of the encoder for a T5."""
    micro_batch_size: int
    """Rows of one microbatch."""
    num_microbatches: int
    """Microbatches per step of one data-parallel rank."""
    decoder_seq_length: int = 0
    """Tokens per row of a T5's decoder."""
    num_devices: int = 1
    """GPUs (or CPU processes) of the run."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronStrategy`` besides ``num_microbatches``."""
    precision: str = "bf16-mixed"
    """Of the Trainer."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """Of the Trainer."""
    target: Target | None = None
    """What must be reached on H200s."""
    lora: Mapping[str, Any] | None = None
    """Fields of ``LoRA``; None to train the weights."""

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        ranks_of_a_copy: int = math.prod(self.layout.get(name, 1) for name in ("tp", "pp", "cp"))
        return self.num_devices // ranks_of_a_copy

    @property
    def rows(self) -> int:
        """Rows that one data-parallel rank trains on in a step."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.rows * self.data_parallel_size * (self.seq_length + self.decoder_seq_length)

    def __str__(self) -> str:
        layout = " ".join(f"{name}={value}" for name, value in self.layout.items())
        decoder = f"+{self.decoder_seq_length}" if self.decoder_seq_length else ""
        batch = f"s{self.seq_length}{decoder} mb{self.micro_batch_size} x {self.num_microbatches}"
        return f"{self.num_devices} {self.accelerator}, {batch}, dp={self.data_parallel_size} {layout}".rstrip()


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
    # The published model ties them. A weight more is a little more work, and what peers measured.
    "tie_word_embeddings": False,
}
"""The shape of Llama-3.2-1B (Grattafiori et al. 2024), with an output layer of its own."""

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
"""Qwen3-30B-A3B (Yang et al. 2025): 128 experts a layer, of which a token meets 8."""

_EXPERTS_TINY: Mapping[str, Any] = {
    **QWEN3_30B_A3B,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 8,
}

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

_TP2_PP2: Mapping[str, Any] = {"tp": 2, "pp": 2, "sequence_parallel": True}

_GPT2_TINY: Mapping[str, Any] = {
    **GPT2_LARGE,
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}

_SMOKE: Mapping[str, Any] = {
    "seq_length": 32,
    "micro_batch_size": 2,
    "num_microbatches": 2,
    "precision": "32-true",
    "accelerator": "cpu",
}

_BF16_CASES: tuple[Case, ...] = (
    Case(
        name="llama-1b",
        model=LLAMA_1B,
        seq_length=4096,
        micro_batch_size=4,
        num_microbatches=2,
        target=Target(metric="tokens_per_s", value=60_000),
    ),
    Case(
        name="gpt2-large",
        model=GPT2_LARGE,
        seq_length=1024,
        micro_batch_size=24,
        num_microbatches=2,
        target=Target(metric="tokens_per_s", value=80_000),
    ),
    Case(
        name="llama-8b-8layers",
        model={**LLAMA_8B, "num_hidden_layers": 8},
        seq_length=4096,
        micro_batch_size=2,
        num_microbatches=8,
        target=Target(metric="mfu_causal", value=0.58),
    ),
    Case(
        name="gpt2-large-tp2-pp2",
        model=GPT2_LARGE,
        seq_length=1024,
        micro_batch_size=24,
        num_microbatches=2,
        num_devices=4,
        layout={"tp": 2, "pp": 2, "sequence_parallel": True, "distributed_optimizer": True},
        target=Target(metric="step_seconds", value=0.32),
    ),
    Case(
        name="gpt2-large-dp4",
        model=GPT2_LARGE,
        seq_length=1024,
        micro_batch_size=12,
        num_microbatches=1,
        num_devices=4,
    ),
    Case(
        name="llama-8b-lora",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=2,
        num_microbatches=4,
        lora={"rank": 16, "alpha": 32.0},
        target=Target(metric="tokens_per_s_per_gpu", value=14_000),
    ),
    Case(
        name="llama-8b-tp2-dp2",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=2,
        num_microbatches=4,
        num_devices=4,
        layout={"tp": 2, "sequence_parallel": True},
        target=Target(metric="tokens_per_s_per_gpu", value=9_700),
    ),
    Case(
        name="llama-8b-tp2",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=2,
        num_microbatches=4,
        num_devices=2,
        layout={"tp": 2, "sequence_parallel": True},
    ),
    Case(
        name="llama-8b-dp2",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=1,
        num_microbatches=8,
        num_devices=2,
    ),
    Case(
        name="llama-8b-dp4-mb1",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=1,
        num_microbatches=8,
        num_devices=4,
    ),
    Case(
        name="llama-8b-dp4-mb2",
        model=LLAMA_8B,
        seq_length=4096,
        micro_batch_size=2,
        num_microbatches=4,
        num_devices=4,
        target=Target(metric="tokens_per_s_per_gpu", value=11_000),
    ),
    Case(
        name="llama-8b-dp4-s8192",
        model=LLAMA_8B,
        seq_length=8192,
        micro_batch_size=1,
        num_microbatches=4,
        num_devices=4,
    ),
    Case(
        name="llama-8b-cp2-dp2-s8192",
        model=LLAMA_8B,
        seq_length=8192,
        micro_batch_size=2,
        num_microbatches=4,
        num_devices=4,
        layout={"cp": 2},
    ),
    *(
        Case(
            name=f"llama-8b-cp4-s{length}",
            model={**LLAMA_8B, "max_position_embeddings": length},
            seq_length=length,
            micro_batch_size=1,
            num_microbatches=2,
            num_devices=4,
            layout={"cp": 4, "recompute": recompute},
        )
        for length, recompute in ((32768, "selective"), (131072, "full"))
    ),
    *(
        # As many layers as fit: 18 bytes for each parameter of a rank's experts, and activations.
        Case(
            name=f"qwen3-30b-a3b-{8 * gpus}layers" + (f"-ep{gpus}" if gpus > 1 else ""),
            model={**QWEN3_30B_A3B, "num_hidden_layers": 8 * gpus},
            seq_length=4096,
            micro_batch_size=rows,
            num_microbatches=16 // rows,
            num_devices=gpus,
            layout={"ep": gpus} if gpus > 1 else {},
            target=Target(metric="mfu_causal", value=0.25),
        )
        for gpus, rows in ((1, 4), (2, 2), (4, 2))
    ),
    Case(name="bert-large", model=BERT_LARGE, seq_length=512, micro_batch_size=32, num_microbatches=2),
    Case(
        name="bert-large-tp2-pp2",
        model=BERT_LARGE,
        seq_length=512,
        micro_batch_size=32,
        num_microbatches=8,
        num_devices=4,
        layout=_TP2_PP2,
    ),
    Case(
        name="t5-large",
        model=T5_LARGE,
        seq_length=512,
        decoder_seq_length=128,
        micro_batch_size=32,
        num_microbatches=2,
    ),
    Case(
        name="t5-large-tp2-pp2",
        model=T5_LARGE,
        seq_length=512,
        decoder_seq_length=128,
        micro_batch_size=32,
        num_microbatches=8,
        num_devices=4,
        layout=_TP2_PP2,
    ),
    Case(
        name="gpt2-large-graphs",
        model=GPT2_LARGE,
        seq_length=1024,
        micro_batch_size=12,
        num_microbatches=1,
        layout={"cuda_graphs": True},
    ),
    Case(
        name="smoke-bert",
        model={**BERT_LARGE, **dict.fromkeys(("hidden_size", "intermediate_size"), 32), "vocab_size": 300}
        | {"num_hidden_layers": 2, "num_attention_heads": 2},
        **_SMOKE,
    ),
    Case(
        name="smoke-t5",
        model={**T5_LARGE, **dict.fromkeys(("d_model", "d_ff"), 32), "vocab_size": 300, "d_kv": 16}
        | {"num_layers": 2, "num_heads": 2},
        decoder_seq_length=16,
        **_SMOKE,
    ),
    Case(name="smoke", model=_GPT2_TINY, **_SMOKE),
    Case(name="smoke-lora", model=_GPT2_TINY, num_devices=2, layout={"tp": 2}, lora={"rank": 4}, **_SMOKE),
    Case(
        name="smoke-experts",
        model=_EXPERTS_TINY,
        num_devices=2,
        layout={"tp": 2, "sequence_parallel": True, "ep": 2},
        **_SMOKE,
    ),
    Case(name="smoke-tp2", model=_GPT2_TINY, num_devices=2, layout={"tp": 2, "sequence_parallel": True}, **_SMOKE),
)

_FP8_TARGETS: Mapping[str, int | None] = {
    "llama-1b": 72_000,
    "llama-8b-8layers": None,
    "llama-8b-dp4-mb2": 17_000,
    "llama-8b-tp2-dp2": 14_200,
    "llama-8b-dp4-s8192": 15_200,
    "llama-8b-tp2": None,
    "gpt2-large": None,
    "smoke": None,
}
"""Cases that are run in fp8, too, with the tokens per second of a GPU that are to be reached."""

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
            target=goal and Target(metric="tokens_per_s_per_gpu", value=goal),
        )
        for case in _BF16_CASES
        if (goal := _FP8_TARGETS.get(case.name, 0)) != 0
    ),
)
"""Every case; those called ``smoke`` only prove that the programs run."""


def case_named(name: str) -> Case:
    """The case called ``name``.

    Raises:
        KeyError: If there is none.
    """
    return {case.name: case for case in CASES}[name]


_NUMBERS_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def with_layers(case: Case, layers: int | None) -> Case:
    """The case with fewer layers, and then without its target; the same one where ``layers`` is None."""
    if layers is None:
        return case
    changed = {name: layers for name in _NUMBERS_OF_LAYERS if name in case.model}
    return replace(case, model={**case.model, **changed}, target=None)


def with_batch(case: Case, micro_batch_size: int | None, num_microbatches: int | None) -> Case:
    """The case with another batch, and then without its target; the same case where both are None."""
    if micro_batch_size is None and num_microbatches is None:
        return case
    return replace(
        case,
        micro_batch_size=micro_batch_size or case.micro_batch_size,
        num_microbatches=num_microbatches or case.num_microbatches,
        target=None,
    )
