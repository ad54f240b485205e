"""Parameter counts, model FLOPs and peak FLOP/s of devices: pure arithmetic on a model's shape and layout.

Model FLOPs count a multiply-add as two operations and the backward pass as twice the forward pass. Recomputed
activations, embedding lookups, norms, softmax and the optimizer are not counted.

Sources: Megatron-LM core_v0.16.1, training.py, ``num_floating_point_operations`` (causal attention counted half, padded
vocabulary); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, equation 3, which counts full attention and a
second forward pass: without the latter it is ``72 B s L h^2 (1 + s / (6 h) + V / (12 L h))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_megatron.engine.ops.report import ops_report
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, host_memory
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE, t5_layout

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings

AttentionCount = Literal["causal", "full"]
"""Whether the masked half of a causal attention matrix is left out or counted (``full``); both are published."""
Precision = Literal["bf16", "fp16", "tf32", "fp32"]
"""Precision of matrix products: ``fp32`` without tensor cores; ``tf32`` is fp32 storage with tensor cores."""

# ---- parameters -----------------------------------------------------------------------------------------------------


def total_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without vocabulary padding or copies of tied embeddings."""
    return _chunk(
        model, (model.num_layers + model.num_decoder_layers,), 0, tp=1, vocab_size=model.vocab_size
    )


def active_parameters(model: ModelConfig) -> int:
    """Number of parameters used for one token: only ``topk`` experts of each layer."""
    inactive = 0 if model.experts is None else 1 - model.experts.topk / model.experts.num_experts
    return total_parameters(model) - round(
        inactive * sum(expert_parameters(model, i) for i in range(model.num_layers))
    )


def expert_parameters(model: ModelConfig, layer: int) -> int:
    """Number of parameters of all routed experts of a layer (counted from 0); 0 if it has none."""
    if model.experts is None or not model.has_experts(layer):
        return 0
    return (
        model.experts.num_experts
        * _mlp_matrices(model)
        * model.hidden_size
        * model.experts.ffn_hidden_size
    )


def rank_parameters(
    model: ModelConfig, layout: Sequence[int], *, tp: int, pp: int, pp_rank: int, ep: int = 1
) -> int:
    """Number of parameters of all model chunks on one (tensor, pipeline) rank, the same for every tensor-parallel rank.

    Vocabulary padding and copies of tied embeddings are included.

    Args:
        model: Model config.
        layout: Number of layers of each chunk in pipeline order, a T5's encoder before its decoder. Virtual stage v of
            pipeline rank p is chunk v * pp + p.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        pp_rank: Pipeline rank.
        ep: Expert parallel size.
    """
    padded = model.padded_vocab_size(tp)
    chunks = range(pp_rank, len(layout), pp)
    return sum(_chunk(model, layout, chunk, tp=tp, vocab_size=padded, ep=ep) for chunk in chunks)


def adapter_parameters(model: ModelConfig) -> int:
    """Number of parameters of all LoRA adapters, the only ones trained; 0 without LoRA."""
    if model.lora is None:
        return 0
    sizes, r, count = _linears(model), model.lora.rank, 0
    for name, parts in model.lora.linears:
        in_size, out_sizes = sizes[name.rpartition(".")[2]]
        out_sizes = out_sizes if len(parts) > 1 else (sum(out_sizes),)
        is_decoder = model.architecture == "t5" and name.startswith("decoder.")
        layers = model.num_decoder_layers if is_decoder else model.num_layers
        count += (
            layers
            * r
            * sum(in_size + out for out, adapted in zip(out_sizes, parts, strict=True) if adapted)
        )
    return count


def chunk_layout(
    model: ModelConfig, parallel: ParallelConfig, override: object = None
) -> tuple[int, ...]:
    """Number of layers of each chunk in pipeline order; ``override`` may set that of a T5."""
    is_t5 = model.architecture == "t5"
    return (
        t5_layout(model, parallel, override)
        if is_t5
        else parallel.layers_per_chunk(model.num_layers)
    )


def startup_lines(model: ModelConfig, settings: EngineSettings) -> list[str]:
    """Lines that rank 0 logs at start-up: padded vocabulary, parameters of each rank, implementations of the ops."""
    tp, pp = settings.parallel.tp, settings.parallel.pp
    padded = model.padded_vocab_size(tp)
    lines = [
        f"Padded vocabulary: {model.vocab_size} tokens + {padded - model.vocab_size} dummy tokens = {padded} "
        f"(a multiple of make_vocab_size_divisible_by={model.make_vocab_size_divisible_by} x tp={tp})",
        f"Number of parameters of the model: {total_parameters(model)}",
    ]
    if model.experts is not None:
        lines.append(
            f"Number of active parameters (used for one token): {active_parameters(model)}"
        )
    layout = chunk_layout(model, settings.parallel, settings.overrides.transformer.get(OVERRIDE))
    if model.architecture == "t5" and len(layout) > 1:
        lines.append(
            f"Layers of each chunk, in the order of the pipeline: {', '.join(map(str, layout))} "
            f"(the first {model.num_layers} are the encoder's)"
        )
    for pp_rank in range(pp):
        count = rank_parameters(
            model, layout, tp=tp, pp=pp, pp_rank=pp_rank, ep=settings.parallel.ep
        )
        lines += [
            f"Number of parameters on (tensor, pipeline) rank ({t}, {pp_rank}): {count}"
            for t in range(tp)
        ]
    if model.lora is not None:
        trained = adapter_parameters(model)
        lines.append(
            f"LoRA of rank {model.lora.rank}: {trained} parameters are trained, and all others are frozen"
        )
    ops = ops_report("cuda" if settings.device.type == "cuda" else "cpu")
    linears = f"; linears of layers: fp8, {settings.fp8}" if settings.fp8 else ""
    return [
        *lines,
        f"Engine ops: {'; '.join(f'{op}: {used}' for op, used, _ in ops)}{linears}",
    ]


def _chunk(
    model: ModelConfig, layout: Sequence[int], chunk: int, *, tp: int, vocab_size: int, ep: int = 1
) -> int:
    start, end = sum(layout[:chunk]), sum(layout[: chunk + 1])
    is_first, is_last = chunk == 0, chunk == len(layout) - 1
    embedding = vocab_size // tp * model.hidden_size
    count = sum(_layer(model, layer, tp, ep) for layer in range(start, end))
    if (
        model.position_embedding_type == "relative"
    ):  # a table for encoder and decoder each, if in this chunk
        buckets = model.relative_attention_num_buckets * model.num_attention_heads // tp
        count += ((start < model.num_layers) + (end > model.num_layers)) * buckets
    if model.architecture == "t5" and start < model.num_layers <= end:
        count += _norm(model)
    if is_first:
        count += (
            embedding
            + model.num_tokentypes * model.hidden_size
            + model.embedding_layernorm * _norm(model)
        )
        if model.position_embedding_type == "learned_absolute":
            count += (model.max_position_embeddings + model.position_offset) * model.hidden_size
    if is_last:
        count += _norm(model)
        if model.architecture == "bert":  # the weight of the output layer is counted below
            rows = vocab_size // tp if model.has_output_layer else 0
            count += sum(
                (in_size + 1) * out_size for in_size, out_size, _ in _bert_head(model, rows)
            )
            count += model.has_output_layer * 2 * model.hidden_size - rows * model.hidden_size
        # A tied output layer on another stage than the embedding is a copy, kept equal by an all-reduce of gradients.
        if model.has_output_layer and not (model.share_embeddings_and_output_weights and is_first):
            count += embedding
    return count


def _linears(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Input size of each linear of a layer, and the output sizes of the matrices fused in it."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    q, kv = (
        model.num_attention_heads * model.kv_channels,
        model.num_query_groups * model.kv_channels,
    )
    return {
        "linear_qkv": (h, (q, kv, kv)),
        "linear_q": (h, (q,)),
        "linear_kv": (h, (kv, kv)),
        "linear_proj": (q, (h,)),
        "linear_fc1": (h, (ffn,) * (_mlp_matrices(model) - 1)),
        "linear_fc2": (ffn, (h,)),
    }


def _layer(model: ModelConfig, layer: int, tp: int, ep: int) -> int:
    """Number of parameters of one layer (counted from 0, a T5's decoder after its encoder) on one rank.

    Linears are split over tp; norms, routers and biases of row-parallel linears are replicated.
    """
    h, linears, num_attentions = (
        model.hidden_size,
        _linears(model),
        2 if layer >= model.num_layers else 1,
    )
    qkv, up = (sum(linears[name][1]) for name in ("linear_qkv", "linear_fc1"))
    experts = model.experts if model.has_experts(layer) else None
    width = model.ffn_hidden_size if experts is None else experts.shared_ffn_hidden_size
    # Key/value heads are split even if there are fewer than ranks: each rank keeps some of their rows.
    split = num_attentions * _attention_weights(model) + _mlp_matrices(model) * h * width
    norms = model.pre_norms * (num_attentions + model.has_mlp_norm) + 2 * model.post_norms
    replicated = (
        norms * _norm(model) + (model.has_attention_output_bias + model.add_bias_linear) * h
    )
    split += model.add_qkv_bias * qkv + model.add_bias_linear * up
    if model.qk_layernorm:
        heads = (
            model.num_attention_heads + model.num_query_groups
            if model.qk_layernorm_of_all_heads
            else 2
        )
        replicated += heads * _norm(model, model.kv_channels)
    if experts is not None:  # the router, and the gate of the shared MLP
        replicated += experts.num_experts * h + (h if width else 0)
    return split // tp + replicated + expert_parameters(model, layer) // ep


def _attention_weights(model: ModelConfig) -> int:
    """Number of weights of one attention."""
    return (
        2
        * model.hidden_size
        * (model.num_attention_heads + model.num_query_groups)
        * model.kv_channels
    )


def _mlp_matrices(model: ModelConfig) -> int:
    """Number of matrices of an MLP."""
    return 3 if model.gated_linear_unit else 2


def _norm(model: ModelConfig, width: int | None = None) -> int:
    return (width or model.hidden_size) * (
        2 if model.normalization == "LayerNorm" and model.norm_bias else 1
    )


def _bert_head(
    model: ModelConfig, vocab_rows: int, seq_length: int = 1
) -> list[tuple[int, int, int]]:
    """Input size, output size and tokens of a row for each linear after the final norm."""
    h = model.hidden_size
    linears = [(h, h, 1)] if model.has_pooler else []
    if model.has_output_layer:
        linears += [(h, h, seq_length), (h, vocab_rows, seq_length)]
    if model.task == "pretraining":
        return [*linears, (h, 2, 1)]
    if model.has_output_layer:
        return linears
    return [*linears, (h, model.num_labels, 1 if model.has_pooler else seq_length)]


def check_host_memory(model: ModelConfig, settings: EngineSettings, ranks: int) -> None:
    """Check that the weights of the ``ranks`` on this host fit its memory, before Linux kills a process.

    Raises:
        ConfigError: If they do not.
    """
    count = total_parameters(model)
    parallel = settings.parallel
    experts = sum(expert_parameters(model, layer) for layer in range(model.num_layers))
    per_rank = (count - experts) // (parallel.tp * parallel.pp) + experts // (
        parallel.ep * parallel.pp
    )
    needed = per_rank * ranks * settings.params_dtype.itemsize
    if needed > (memory := host_memory()):
        raise ConfigError(
            f"the weights of this model ({count:,} parameters) take {needed / 2**30:,.0f} GiB on {ranks} "
            f"rank{'s' * (ranks > 1)} of this host, which has {memory / 2**30:,.0f} GiB; correct the model's sizes, or "
            "use more hosts"
        )


# ---- floating-point operations --------------------------------------------------------------------------------------


def forward_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """FLOPs of the forward pass for one row, over all ranks.

    With q = heads x head size and k = v = key/value groups x head size, the multiply-adds of a row of s tokens are
    ``s * (L * (h * (q + k + v) + q * h + h * ffn * (3 if gated else 2) + q * s * (1 if causal else 2)) + h * V)``; a
    layer with a sliding window of w < s tokens has ``w * (1 - w / (2 s))`` (or w) keys in place of s / 2 (or s).
    Those of a T5 for s_e encoder and s_d decoder tokens are ``L_e * s_e * (4 h q + mlp + 2 q s_e)
    + L_d * (s_d * (6 h q + mlp + q s_d + 2 q s_e) + 2 s_e h q) + s_d * h * V``. Of experts,
    only the active ones and the router are counted.

    Args:
        model: Model config.
        lengths: Tokens of the row; for a T5 those of the encoder and of the decoder.
        padded_vocab_size: Rows V of the output layer, padding included; see ``ModelConfig.padded_vocab_size``.
        attention: ``causal`` counts the unmasked keys, s / 2 per query on average; ``full`` all s, or the whole window.
            For a BERT and a T5's encoder, which have no causal mask, both count all keys.
    """
    layers = range(model.num_layers + model.num_decoder_layers)
    stack = sum(sum(layer_flops(model, lengths, layer, attention)) for layer in layers)
    return stack + head_flops(model, lengths, padded_vocab_size)


def layer_flops(
    model: ModelConfig, lengths: Sequence[int], layer: int, attention: AttentionCount = "causal"
) -> tuple[float, float]:
    """FLOPs of one layer's forward pass for one row: those of linears, and those of attention scores and values.

    Args:
        model: Model config.
        lengths: As for ``forward_flops``.
        layer: Index of the layer from 0, a T5's decoder after its encoder.
        attention: As for ``forward_flops``.
    """
    h, q = model.hidden_size, model.num_attention_heads * model.kv_channels
    mlp = h * model.mlp_width(layer) * _mlp_matrices(model)
    if model.experts is not None and model.has_experts(layer):
        mlp += h * (model.experts.num_experts + (model.experts.shared_ffn_hidden_size > 0))
    is_decoder = layer >= model.num_layers
    s = lengths[-1 if is_decoder else 0]
    if model.architecture != "t5":
        keys = _keys_per_query(model, layer, s, attention)
    else:
        keys = s / 2 if is_decoder and attention == "causal" else s
    products, scores = s * (_attention_weights(model) + mlp), 2 * s * q * keys
    if (
        is_decoder
    ):  # cross-attention: queries and outputs of decoder tokens, keys and values of encoder tokens
        products += (s + lengths[0]) * 2 * h * q
        scores += 2 * s * q * lengths[0]
    return 2.0 * products, 2.0 * scores


def head_flops(model: ModelConfig, lengths: Sequence[int], padded_vocab_size: int) -> float:
    """FLOPs of the head (all after the last layer) in the forward pass for one row."""
    if model.architecture == "bert":
        return 2.0 * sum(
            math.prod(linear) for linear in _bert_head(model, padded_vocab_size, lengths[0])
        )
    return 2.0 * lengths[-1] * model.hidden_size * padded_vocab_size


def model_flops(
    model: ModelConfig,
    lengths: Sequence[int],
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """FLOPs of training (forward and backward pass) for one row, over all ranks; arguments as for ``forward_flops``.

    For each matrix product of the forward pass the backward pass has two, for the gradients of input and weight; the
    frozen weights of a model with LoRA have no weight gradient.
    """
    flops = 3 * forward_flops(model, lengths, padded_vocab_size, attention)
    if model.lora is None:
        return flops
    layers = range(model.num_layers + model.num_decoder_layers)
    frozen = sum(layer_flops(model, lengths, layer, attention)[0] for layer in layers)
    frozen += head_flops(model, lengths, padded_vocab_size)
    return flops - frozen + 6.0 * adapter_parameters(model) * lengths[-1]


def _keys_per_query(
    model: ModelConfig, layer: int, seq_length: int, attention: AttentionCount
) -> float:
    """Mean number of keys per query that one layer attends to."""
    window = (
        min(seq_length, model.sliding_window or seq_length)
        if model.has_window(layer)
        else seq_length
    )
    if attention == "full" or model.architecture == "bert":
        return window
    # The first ``window`` queries see a growing number of keys, later ones ``window`` keys.
    return window * (1 - window / (2 * seq_length))


# ---- devices --------------------------------------------------------------------------------------------------------

DEVICE_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    # Blackwell architecture technical brief, HGX B200; its tf32 and fp32 figures vary by edition.
    "NVIDIA B200": (2250.0, 2250.0, None, None),
    # Datasheets of H200 and H100, sparse figures halved.
    **dict.fromkeys(
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H800"), (989.0, 989.0, 494.0, 67.0)
    ),
    **dict.fromkeys(("NVIDIA H200 NVL", "NVIDIA H100 NVL"), (835.0, 835.0, 417.0, 60.0)),
    "NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    # Datasheet of the A100.
    **dict.fromkeys(
        (
            *(
                "NVIDIA A100-SXM4-40GB",
                "NVIDIA A100-SXM4-80GB",
                "NVIDIA A100-PCIE-40GB",
                "NVIDIA A100 80GB PCIe",
            ),
            "NVIDIA A800-SXM4-80GB",
        ),
        (312.0, 312.0, 156.0, 19.5),
    ),
    # Datasheet of each; the L4's sparse figures are halved.
    "NVIDIA L40S": (362.0, 362.0, 183.0, 91.6),
    "NVIDIA L40": (181.0, 181.0, 90.5, 90.5),
    "NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
    "NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    "NVIDIA A30": (165.0, 165.0, 82.0, 10.3),
    "NVIDIA A10": (125.0, 125.0, 62.5, 31.2),
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (None, 125.0, None, 15.7)),
    "Tesla T4": (None, 65.0, None, 8.1),
}
"""Peak dense TFLOP/s (1e12) by ``torch.cuda.get_device_name``: bf16, fp16 and tf32 on tensor cores, and fp32.

Names must match exactly: a slice of a GPU (MIG), a variant with another power limit or a new GPU has no entry, and no
utilisation is reported rather than a wrong one.
"""


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Peak dense FLOP/s of one device; None if unknown for that device or precision.

    Args:
        device_name: As returned by ``torch.cuda.get_device_name``.
        precision: Precision of the matrix products.
    """
    peaks = DEVICE_PEAKS.get(device_name, (None,) * 4)
    teraflops = dict(zip(("bf16", "fp16", "tf32", "fp32"), peaks, strict=True))[precision]
    return None if teraflops is None else teraflops * 1e12
