"""Parameters, FLOPs and peak speeds of a run: pure arithmetic on the model's shape and layout.

Model FLOPs are what the mathematics needs, one multiply-add being two operations, the backward pass twice the forward
pass. Recomputed activations do not count, nor do embedding lookups, norms, softmax and the optimizer.

Sources: Megatron-LM core_v0.16.1, training.py, ``num_floating_point_operations`` (causal attention counted half, padded
vocabulary); Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, equation 3, which counts full attention and a
second forward pass: without the latter it is ``72 B s L h^2 (1 + s / (6 h) + V / (12 L h))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lightning_megatron.engine.fillers.choice import slot_report
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, host_memory
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE, t5_layout

if TYPE_CHECKING:
    from lightning_megatron.models.transformer_config import EngineSettings

AttentionCount = Literal["causal", "full"]
"""Whether the half of the attention matrix that a causal mask removes counts. Published figures use either."""
Precision = Literal["bf16", "fp16", "tf32", "fp32"]
"""Type of the matrix products. ``fp32`` is without tensor cores; ``tf32`` is fp32 storage with tensor cores."""

# ---- parameters -----------------------------------------------------------------------------------------------------


def total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, each counted once: no padding of the vocabulary, no copy of a tied embedding."""
    return _chunk(model, (model.num_layers + model.num_decoder_layers,), 0, tp=1, vocab_size=model.vocab_size)


def active_parameters(model: ModelConfig) -> int:
    """Those of ``total_parameters`` that one token meets: of a layer's experts only ``topk``."""
    idle = 0 if model.experts is None else 1 - model.experts.topk / model.experts.num_experts
    return total_parameters(model) - round(idle * sum(expert_parameters(model, i) for i in range(model.num_layers)))


def expert_parameters(model: ModelConfig, layer: int) -> int:
    """Parameters of all experts that share the tokens of a layer (from 0); 0 if it has none."""
    if model.experts is None or not model.has_experts(layer):
        return 0
    return model.experts.num_experts * _matrices(model) * model.hidden_size * model.experts.ffn_hidden_size


def rank_parameters(model: ModelConfig, layout: Sequence[int], *, tp: int, pp: int, pp_rank: int, ep: int = 1) -> int:
    """Parameters of all model chunks on one (tensor, pipeline) rank, copies and padding of the vocabulary included.

    It is the same for every tensor-parallel rank.

    Args:
        model: Its shape.
        layout: Layers of each chunk in the order of the pipeline, those of a T5's encoder before its decoder's. Virtual
            stage v of pipeline rank p is chunk v * pp + p.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        pp_rank: Which pipeline stage.
        ep: Expert parallel size.
    """
    padded = model.padded_vocab_size(tp)
    chunks = range(pp_rank, len(layout), pp)
    return sum(_chunk(model, layout, chunk, tp=tp, vocab_size=padded, ep=ep) for chunk in chunks)


def adapter_parameters(model: ModelConfig) -> int:
    """Parameters of all adapters (LoRA) of the model, which are those that are trained; 0 without."""
    if model.lora is None:
        return 0
    sizes, r, count = _linears(model), model.lora.rank, 0
    for name, parts in model.lora.linears:
        read, written = sizes[name.rpartition(".")[2]]
        written = written if len(parts) > 1 else (sum(written),)
        is_second = model.architecture == "t5" and name.startswith("decoder.")
        layers = model.num_decoder_layers if is_second else model.num_layers
        count += layers * sum(r * (read + out) for out, has_one in zip(written, parts, strict=True) if has_one)
    return count


def chunk_layout(model: ModelConfig, parallel: ParallelConfig, by_hand: object = None) -> tuple[int, ...]:
    """Layers of each chunk in the order of the pipeline; of a T5 perhaps as ``by_hand`` says."""
    is_t5 = model.architecture == "t5"
    return t5_layout(model, parallel, by_hand) if is_t5 else parallel.layout(model.num_layers)


def startup_lines(model: ModelConfig, settings: EngineSettings) -> list[str]:
    """What rank 0 logs when a run starts: padded vocabulary, parameters of each rank, what fills the engine's slots."""
    tp, pp = settings.parallel.tp, settings.parallel.pp
    padded = model.padded_vocab_size(tp)
    lines = [
        f"Padded vocabulary: {model.vocab_size} tokens + {padded - model.vocab_size} dummy tokens = {padded} "
        f"(a multiple of make_vocab_size_divisible_by={model.make_vocab_size_divisible_by} x tp={tp})",
        f"Number of parameters of the model: {total_parameters(model)}",
    ]
    if model.experts is not None:
        lines.append(f"Number of parameters that a token meets (active ones): {active_parameters(model)}")
    layout = chunk_layout(model, settings.parallel, settings.overrides.transformer.get(OVERRIDE))
    if model.architecture == "t5" and len(layout) > 1:
        lines.append(
            f"Layers of each chunk, in the order of the pipeline: {', '.join(map(str, layout))} "
            f"(the first {model.num_layers} are the encoder's)"
        )
    for pp_rank in range(pp):
        count = rank_parameters(model, layout, tp=tp, pp=pp, pp_rank=pp_rank, ep=settings.parallel.ep)
        lines += [f"Number of parameters on (tensor, pipeline) rank ({t}, {pp_rank}): {count}" for t in range(tp)]
    if model.lora is not None:
        trained = adapter_parameters(model)
        lines.append(f"LoRA of rank {model.lora.rank}: {trained} parameters are trained, and all others are frozen")
    slots = slot_report("cuda" if settings.device.type == "cuda" else "cpu")
    linears = f"; linears of layers: fp8, {settings.fp8}" if settings.fp8 else ""
    return [*lines, f"Engine slots: {'; '.join(f'{slot}: {filler}' for slot, filler, _ in slots)}{linears}"]


def _chunk(model: ModelConfig, layout: Sequence[int], chunk: int, *, tp: int, vocab_size: int, ep: int = 1) -> int:
    start, end = sum(layout[:chunk]), sum(layout[: chunk + 1])
    is_first, is_last = chunk == 0, chunk == len(layout) - 1
    embedding = vocab_size // tp * model.hidden_size
    count = sum(_layer(model, layer, tp, ep) for layer in range(start, end))
    if model.position_embedding_type == "relative":  # a table for each stack of which there are layers here
        buckets = model.relative_attention_num_buckets * model.num_attention_heads // tp
        count += ((start < model.num_layers) + (end > model.num_layers)) * buckets
    if model.architecture == "t5" and start < model.num_layers <= end:
        count += _norm(model)
    if is_first:
        count += embedding + model.num_tokentypes * model.hidden_size + model.embedding_layernorm * _norm(model)
        if model.position_embedding_type == "learned_absolute":
            count += (model.max_position_embeddings + model.position_offset) * model.hidden_size
    if is_last:
        count += _norm(model)
        if model.architecture == "bert":  # the weight of the output layer is counted below
            rows = vocab_size // tp if model.has_output_layer else 0
            count += sum((read + 1) * written for read, written, _ in _bert_head(model, rows))
            count += model.has_output_layer * 2 * model.hidden_size - rows * model.hidden_size
        # A tied output layer on another stage than the embedding is a copy, kept equal by an all-reduce of gradients.
        if model.has_output_layer and not (model.share_embeddings_and_output_weights and is_first):
            count += embedding
    return count


def _linears(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Numbers that each linear of a layer reads, and those that each of its matrices writes."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    q, kv = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    return {
        "linear_qkv": (h, (q, kv, kv)),
        "linear_q": (h, (q,)),
        "linear_kv": (h, (kv, kv)),
        "linear_proj": (q, (h,)),
        "linear_fc1": (h, (ffn,) * (_matrices(model) - 1)),
        "linear_fc2": (ffn, (h,)),
    }


def _layer(model: ModelConfig, layer: int, tp: int, ep: int) -> int:
    """One layer (from 0, a T5's decoder behind its encoder) on one rank.

    Linears are split over tp; norms, routers and biases of row-parallel linears are not.
    """
    h, linears, num_attentions = model.hidden_size, _linears(model), 2 if layer >= model.num_layers else 1
    qkv, up = (sum(linears[name][1]) for name in ("linear_qkv", "linear_fc1"))
    experts = model.experts if model.has_experts(layer) else None
    width = model.ffn_hidden_size if experts is None else experts.shared_ffn_hidden_size
    # Fewer key/value heads than ranks are split, too: each rank keeps a part of their rows.
    split = num_attentions * _projections(model) + _matrices(model) * h * width
    norms = model.pre_norms * (num_attentions + model.has_mlp_norm) + 2 * model.post_norms
    whole = norms * _norm(model) + (model.has_attention_output_bias + model.add_bias_linear) * h
    split += model.add_qkv_bias * qkv + model.add_bias_linear * up
    if model.qk_layernorm:
        heads = model.num_attention_heads + model.num_query_groups if model.qk_layernorm_of_all_heads else 2
        whole += heads * _norm(model, model.kv_channels)
    if experts is not None:  # the router, and the gate of the shared MLP
        whole += experts.num_experts * h + (h if width else 0)
    return split // tp + whole + expert_parameters(model, layer) // ep


def _projections(model: ModelConfig) -> int:
    """Weights of an attention."""
    return 2 * model.hidden_size * (model.num_attention_heads + model.num_query_groups) * model.kv_channels


def _matrices(model: ModelConfig) -> int:
    """Of an MLP."""
    return 3 if model.gated_linear_unit else 2


def _norm(model: ModelConfig, width: int | None = None) -> int:
    return (width or model.hidden_size) * (2 if model.normalization == "LayerNorm" and model.norm_bias else 1)


def _bert_head(model: ModelConfig, vocab_rows: int, seq_length: int = 1) -> list[tuple[int, int, int]]:
    """Numbers that each linear after the final norm reads and writes, and for how many tokens of a row."""
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
    """Raise if the weights on the ``ranks`` of this host are more than it can hold: Linux kills whoever asks for that.

    Raises:
        ConfigError: With both sizes.
    """
    count = total_parameters(model)
    parallel = settings.parallel
    experts = sum(expert_parameters(model, layer) for layer in range(model.num_layers))
    of_rank = (count - experts) // (parallel.tp * parallel.pp) + experts // (parallel.ep * parallel.pp)
    needed = of_rank * ranks * settings.params_dtype.itemsize
    if needed > (there := host_memory()):
        raise ConfigError(
            f"the weights of this model ({count:,} parameters) take {needed / 2**30:,.0f} GiB on {ranks} "
            f"rank{'s' * (ranks > 1)} of this host, which has {there / 2**30:,.0f} GiB; correct the model's sizes, or "
            "use more hosts"
        )


# ---- floating-point operations --------------------------------------------------------------------------------------


def forward_flops(
    model: ModelConfig, lengths: Sequence[int], padded_vocab_size: int, attention: AttentionCount = "causal"
) -> float:
    """Operations of the forward pass on one row, over all ranks.

    With q = heads x head width and k = v = key/value groups x head width, the multiply-adds of a row of s tokens are
    ``s * (L * (h * (q + k + v) + q * h + h * ffn * (3 if gated else 2) + q * s * (1 if causal else 2)) + h * V)``; a
    layer with a sliding window of w < s tokens has ``w * (1 - w / (2 s))`` (or w) keys in the place of s / 2 (or s).
    A T5's, for s_e and s_d tokens, are ``L_e * s_e * (4 h q + mlp + 2 q s_e)
    + L_d * (s_d * (6 h q + mlp + q s_d + 2 q s_e) + 2 s_e h q) + s_d * h * V``. Of experts those count that a token
    goes through, and the router.

    Args:
        model: Its shape.
        lengths: Tokens of the row; of a T5 those of the encoder and of the decoder.
        padded_vocab_size: Rows V of the output layer that is really computed, see ``ModelConfig.padded_vocab_size``.
        attention: ``causal`` counts the keys that a query sees, on average s / 2, ``full`` all s, or its whole window.
            The queries of a BERT and of a T5's encoder see all keys, and count so either way.
    """
    layers = range(model.num_layers + model.num_decoder_layers)
    stack = sum(sum(layer_flops(model, lengths, layer, attention)) for layer in layers)
    return stack + head_flops(model, lengths, padded_vocab_size)


def layer_flops(
    model: ModelConfig, lengths: Sequence[int], layer: int, attention: AttentionCount = "causal"
) -> tuple[float, float]:
    """Operations of one layer's forward pass on one row: of the products with weights, and of attention.

    Args:
        model: Its shape.
        lengths: As for ``forward_flops``.
        layer: Counted from 0, those of a T5's decoder after its encoder's.
        attention: As for ``forward_flops``.
    """
    h, q = model.hidden_size, model.num_attention_heads * model.kv_channels
    mlp = h * model.mlp_width(layer) * _matrices(model)
    if model.experts is not None and model.has_experts(layer):
        mlp += h * (model.experts.num_experts + (model.experts.shared_ffn_hidden_size > 0))
    is_decoder = layer >= model.num_layers
    s = lengths[-1 if is_decoder else 0]
    if model.architecture != "t5":
        keys = _keys_per_query(model, layer, s, attention)
    else:
        keys = s / 2 if is_decoder and attention == "causal" else s
    products, scores = s * (_projections(model) + mlp), 2 * s * q * keys
    if is_decoder:  # queries and outputs of the decoder's tokens, keys and values of the encoder's
        products += (s + lengths[0]) * 2 * h * q
        scores += 2 * s * q * lengths[0]
    return 2.0 * products, 2.0 * scores


def head_flops(model: ModelConfig, lengths: Sequence[int], padded_vocab_size: int) -> float:
    """Operations of what follows the last layer, forward, on one row."""
    if model.architecture == "bert":
        return 2.0 * sum(math.prod(linear) for linear in _bert_head(model, padded_vocab_size, lengths[0]))
    return 2.0 * lengths[-1] * model.hidden_size * padded_vocab_size


def model_flops(
    model: ModelConfig, lengths: Sequence[int], padded_vocab_size: int, attention: AttentionCount = "causal"
) -> float:
    """Operations of training (forward and backward pass) on one row, over all ranks; arguments as ``forward_flops``.

    For each product of the forward pass the backward pass has two: the gradients of the input and of the weight, which
    frozen weights beside adapters do not have.
    """
    flops = 3 * forward_flops(model, lengths, padded_vocab_size, attention)
    if model.lora is None:
        return flops
    layers = range(model.num_layers + model.num_decoder_layers)
    frozen = sum(layer_flops(model, lengths, layer, attention)[0] for layer in layers)
    frozen += head_flops(model, lengths, padded_vocab_size)
    return flops - frozen + 6.0 * adapter_parameters(model) * lengths[-1]


def _keys_per_query(model: ModelConfig, layer: int, seq_length: int, attention: AttentionCount) -> float:
    """How many keys a query of one layer sees, on average over the sequence."""
    window = min(seq_length, model.sliding_window or seq_length) if model.has_window(layer) else seq_length
    if attention == "full" or model.architecture == "bert":
        return window
    # A triangle of the first ``window`` queries, then rows of ``window`` keys.
    return window * (1 - window / (2 * seq_length))


# ---- devices --------------------------------------------------------------------------------------------------------

DEVICE_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    # Blackwell architecture technical brief, HGX B200; its tf32 and fp32 figures vary by edition.
    "NVIDIA B200": (2250.0, 2250.0, None, None),
    # Datasheets of H200 and H100, sparse figures halved.
    **dict.fromkeys(("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H800"), (989.0, 989.0, 494.0, 67.0)),
    **dict.fromkeys(("NVIDIA H200 NVL", "NVIDIA H100 NVL"), (835.0, 835.0, 417.0, 60.0)),
    "NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    # Datasheet of the A100.
    **dict.fromkeys(
        (
            *("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
            "NVIDIA A800-SXM4-80GB",
        ),
        (312.0, 312.0, 156.0, 19.5),
    ),
    # Each its own datasheet; the L4's sparse figures are halved.
    "NVIDIA L40S": (362.0, 362.0, 183.0, 91.6),
    "NVIDIA L40": (181.0, 181.0, 90.5, 90.5),
    "NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
    "NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    "NVIDIA A30": (165.0, 165.0, 82.0, 10.3),
    "NVIDIA A10": (125.0, 125.0, 62.5, 31.2),
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (None, 125.0, None, 15.7)),
    "Tesla T4": (None, 65.0, None, 8.1),
}
"""Peak dense TFLOP/s (1e12) by ``torch.cuda.get_device_name``: of bf16, fp16 and tf32 on tensor cores, and of fp32.

Only exact names are known: a slice of a GPU (MIG), a variant with another power limit or a new GPU has no peak here,
and then no utilisation is reported rather than a wrong one.
"""


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Peak dense FLOP/s of one device; None if the device, or that precision on it, is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it.
        precision: Type of the matrix products.
    """
    peaks = DEVICE_PEAKS.get(device_name, (None,) * 4)
    teraflops = dict(zip(("bf16", "fp16", "tf32", "fp32"), peaks, strict=True))[precision]
    return None if teraflops is None else teraflops * 1e12
