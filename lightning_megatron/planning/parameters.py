"""Parameter counts of a model and of each rank: pure arithmetic on a model's shape and layout."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import t5_layout


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
        * mlp_matrices(model)
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
                (in_size + 1) * out_size for in_size, out_size, _ in bert_head(model, rows)
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
        "linear_fc1": (h, (ffn,) * (mlp_matrices(model) - 1)),
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
    split = num_attentions * attention_weights(model) + mlp_matrices(model) * h * width
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


def attention_weights(model: ModelConfig) -> int:
    """Number of weights of one attention."""
    return (
        2
        * model.hidden_size
        * (model.num_attention_heads + model.num_query_groups)
        * model.kv_channels
    )


def mlp_matrices(model: ModelConfig) -> int:
    """Number of matrices of an MLP."""
    return 3 if model.gated_linear_unit else 2


def _norm(model: ModelConfig, width: int | None = None) -> int:
    return (width or model.hidden_size) * (
        2 if model.normalization == "LayerNorm" and model.norm_bias else 1
    )


def bert_head(
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
