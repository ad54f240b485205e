"""Parameter counts of a model and of each rank: pure arithmetic on a model's shape and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.models.adapter_names import module_of_matrices
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import t5_layout

_ROUTED = ".mlp.experts."
"""Part of the names of linears of routed experts."""


def total_parameters(model: ModelConfig) -> int:
    """Number of parameters of the whole model, without vocabulary padding or copies of tied embeddings."""
    one_chunk = (model.num_layers + model.num_decoder_layers,)
    return _chunk(model, one_chunk, 0, ParallelConfig(), model.vocab_size)


def active_parameters(model: ModelConfig) -> int:
    """Number of parameters used for one token: only ``topk`` experts of each layer."""
    total = total_parameters(model)
    if model.experts is None:
        return total
    inactive_share = 1 - model.experts.topk / model.experts.num_experts
    experts = sum(expert_parameters(model, layer) for layer in range(model.num_layers))
    return total - round(inactive_share * experts)


def expert_parameters(model: ModelConfig, layer: int) -> int:
    """Number of parameters of all routed experts of a layer (counted from 0); 0 if it has none."""
    if model.experts is None or not model.has_experts(layer):
        return 0
    width = model.experts.ffn_hidden_size
    of_one = mlp_matrices(model) * model.hidden_size * width
    if model.experts.add_bias:
        of_one += (mlp_matrices(model) - 1) * width + model.hidden_size
    return model.experts.num_experts * of_one


def rank_parameters(
    model: ModelConfig,
    layout: Sequence[int],
    parallel: ParallelConfig,
    pp_rank: int,
) -> int:
    """Number of parameters of all model chunks on one (tensor, pipeline) rank, the same for every tensor-parallel rank.

    Vocabulary padding and copies of tied embeddings are included.

    Args:
        model: Model config.
        layout: Number of layers of each chunk in pipeline order, a T5's encoder before its decoder. Virtual stage v of
            pipeline rank p is chunk v * pp + p.
        parallel: Layout.
        pp_rank: Pipeline rank.
    """
    padded = model.padded_vocab_size(parallel.tp)
    count = 0
    for chunk in range(pp_rank, len(layout), parallel.pp):
        count += _chunk(model, layout, chunk, parallel, padded)
    return count


def adapter_parameters(model: ModelConfig) -> int:
    """Number of parameters of all LoRA adapters; 0 without LoRA."""
    return sum(_parameters_by_linear(model).values())


def expert_adapter_parameters(model: ModelConfig) -> int:
    """Number of parameters of the adapters of all routed experts."""
    counts = _parameters_by_linear(model)
    return sum(count for name, count in counts.items() if _ROUTED in name)


def active_adapter_parameters(model: ModelConfig) -> int:
    """Number of parameters of the adapters that a token goes through: those of ``topk`` experts of each layer."""
    count = adapter_parameters(model)
    if model.experts is None:
        return count
    experts = expert_adapter_parameters(model)
    return count - experts + experts * model.experts.topk // model.experts.num_experts


def _parameters_by_linear(model: ModelConfig) -> dict[str, int]:
    """Number of parameters of the adapters of each linear in all layers, by its name in ``Adapters.linears``."""
    if model.lora is None:
        return {}
    counts = {}
    for name, parts in model.lora.linears:
        in_size, out_sizes = _sizes_of(model, name)
        if len(parts) == 1:
            out_sizes = (sum(out_sizes),)
        modules = module_of_matrices(len(out_sizes), len(parts))
        out_sizes = tuple(
            sum(size for size, module in zip(out_sizes, modules, strict=True) if module == number)
            for number in range(len(parts))
        )
        size = sum(
            in_size + out for out, is_adapted in zip(out_sizes, parts, strict=True) if is_adapted
        )
        counts[name] = model.layers_with(name) * model.lora.rank_of(name) * size
        if model.experts is not None and _ROUTED in name:
            counts[name] *= model.experts.num_experts
    return counts


def _sizes_of(model: ModelConfig, name: str) -> tuple[int, tuple[int, ...]]:
    """Input size of a linear, and output sizes of the matrices fused in it; of one routed expert."""
    linear = name.rpartition(".")[2]
    width = model.ffn_hidden_size
    if model.experts is not None:
        if _ROUTED in name:
            width = model.experts.ffn_hidden_size
        elif ".shared_experts." in name:
            width = model.experts.shared_ffn_hidden_size
    return layer_linears(replace(model, ffn_hidden_size=width))[linear]


def trained_with_lora(model: ModelConfig) -> int:
    """Number of parameters that a model with adapters trains: theirs, and those of a classification head."""
    count = adapter_parameters(model)
    if model.trains_head_with_lora:
        count += model.num_labels * (model.hidden_size + model.classifier_bias)
    return count


def chunk_layout(
    model: ModelConfig, parallel: ParallelConfig, override: object = None
) -> tuple[int, ...]:
    """Number of layers of each chunk in pipeline order; ``override`` may set that of a T5."""
    if model.architecture == "t5":
        return t5_layout(model, parallel, override)
    return parallel.layers_per_chunk(model.num_layers)


def _chunk(
    model: ModelConfig,
    layout: Sequence[int],
    chunk: int,
    parallel: ParallelConfig,
    vocab_size: int,
) -> int:
    tp = parallel.tp
    start = sum(layout[:chunk])
    end = start + layout[chunk]
    is_first = chunk == 0
    is_last = chunk == len(layout) - 1
    embedding = vocab_size // tp * model.hidden_size
    count = sum(_layer(model, layer, parallel) for layer in range(start, end))
    if model.position_embedding_type == "relative":
        # A table for encoder and decoder each, if in this chunk.
        buckets = model.relative_attention_num_buckets * model.num_attention_heads // tp
        count += (start < model.num_layers) * buckets
        count += (end > model.num_layers) * buckets
    if model.architecture == "t5" and start < model.num_layers <= end:
        count += _norm(model)
    if is_first:
        count += embedding
        count += model.num_tokentypes * model.hidden_size
        count += model.embedding_layernorm * _norm(model)
        if model.position_embedding_type == "learned_absolute":
            count += (model.max_position_embeddings + model.position_offset) * model.hidden_size
    if is_last:
        count += _norm(model)
        if model.architecture == "bert":
            count += _bert_head_parameters(model, vocab_size // tp)
        elif not model.has_output_layer:
            count += model.num_labels * (model.hidden_size + model.classifier_bias)
        # A tied output layer on another stage than the embedding is a copy, kept equal by an all-reduce of gradients.
        if model.has_output_layer and not (model.share_embeddings_and_output_weights and is_first):
            count += embedding
    return count


def _bert_head_parameters(model: ModelConfig, vocab_rows: int) -> int:
    """Parameters of a BERT's head, without the weight of the output layer."""
    count = 0
    for in_size, out_size, _ in head_linears(model, vocab_rows):
        count += (in_size + 1) * out_size
    if model.has_output_layer:
        # Two parameters of a norm for each channel, but no weight of the output layer.
        count += (2 - vocab_rows) * model.hidden_size
    return count


def layer_linears(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Input size of each linear of a layer, and the output sizes of the matrices fused in it."""
    h = model.hidden_size
    ffn = model.ffn_hidden_size
    q = model.num_attention_heads * model.kv_channels
    kv = model.num_query_groups * model.kv_channels
    queries = (q,) * (1 + model.attention_output_gate)
    return {
        **_latent_linears(model),
        **_linear_attention_linears(model),
        "linear_qkv": (h, (*queries, kv, kv)),
        "linear_q": (h, (q,)),
        "linear_kv": (h, (kv, kv)),
        "linear_proj": (model.num_attention_heads * model.value_width, (h,)),
        "linear_fc1": (h, (ffn,) * (mlp_matrices(model) - 1)),
        "linear_fc2": (ffn, (h,)),
    }


def _latent_linears(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The same of the linears of queries, keys and values in latent attention; none in others."""
    latent = model.latent_attention
    if latent is None:
        return {}
    h = model.hidden_size
    heads = model.num_attention_heads
    queries = heads * model.kv_channels
    linears: dict[str, tuple[int, tuple[int, ...]]] = {}
    if latent.q_lora_rank is None:
        linears["linear_q_proj"] = (h, (queries,))
    else:
        linears["linear_q_down_proj"] = (h, (latent.q_lora_rank,))
        linears["linear_q_up_proj"] = (latent.q_lora_rank, (queries,))
    expanded = heads * (latent.qk_head_dim + latent.v_head_dim)
    linears["linear_kv_down_proj"] = (h, (latent.cached_width,))
    linears["linear_kv_up_proj"] = (latent.kv_lora_rank, (expanded,))
    return linears


def _linear_attention_linears(model: ModelConfig) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The same of linear attention; none in other models."""
    linear = model.linear_attention
    if linear is None:
        return {}
    h = model.hidden_size
    return {"in_proj": (h, linear.sizes), "out_proj": (linear.value_size, (h,))}


def _layer(
    model: ModelConfig,
    layer: int,
    parallel: ParallelConfig,
) -> int:
    """Number of parameters of one layer (counted from 0, a T5's decoder after its encoder) on one rank.

    Linears are split over tp; norms, routers and biases of row-parallel linears are replicated.
    """
    h = model.hidden_size
    linears = layer_linears(model)
    num_attentions = 1 + (layer >= model.num_layers)
    qkv = sum(linears["linear_qkv"][1])
    up = sum(linears["linear_fc1"][1])
    width = model.ffn_hidden_size
    experts = None
    if model.experts is not None and model.has_experts(layer):
        experts = model.experts
        width = experts.shared_ffn_hidden_size
    # Key/value heads are split even if there are fewer than ranks: each rank keeps some of their rows.
    split = num_attentions * attention_weights(model, layer) + mlp_matrices(model) * h * width
    latents = latent_sizes(model)
    split -= h * sum(latents)
    split += model.add_bias_linear * up
    is_linear = model.has_linear_attention(layer)
    if is_linear:
        split += _recurrence(model)
    else:
        split += model.add_qkv_bias * qkv + model.attention_sinks * model.num_attention_heads
    norms = model.pre_norms * (num_attentions + model.has_mlp_norm) + 2 * model.post_norms
    replicated = norms * _norm(model)
    replicated += model.add_bias_linear * h
    if is_linear:
        assert model.linear_attention is not None
        replicated += model.linear_attention.value_head_dim
    else:
        replicated += model.has_attention_output_bias * h
    if model.qk_layernorm and not is_linear:
        heads = 2
        if model.qk_layernorm_of_all_heads:
            heads = model.num_attention_heads + model.num_query_groups
        replicated += heads * _norm(model, model.kv_channels)
    replicated += 2 * (model.activation == "xielu")
    replicated += h * sum(latents)
    if model.latent_attention is not None:
        replicated += model.latent_attention.add_bias * sum(latents)
        # Norms; the keys with positions have none.
        replicated += sum(latents) - model.latent_attention.qk_pos_emb_head_dim
    if experts is not None:
        # The router, and the gate of the shared MLP.
        replicated += experts.num_experts * (h + experts.add_bias)
        replicated += h * (width > 0 and experts.has_shared_gate)
    routed = expert_parameters(model, layer) // parallel.ep
    return split // parallel.tp + replicated + routed


def _recurrence(model: ModelConfig) -> int:
    """Number of parameters of linear attention besides its linears, which are split over tp."""
    linear = model.linear_attention
    assert linear is not None
    return linear.conv_size * linear.conv_kernel_dim + 2 * linear.num_value_heads


def attention_weights(model: ModelConfig, layer: int) -> int:
    """Number of weights of the linears of one attention of a layer."""
    if model.has_linear_attention(layer):
        linears = _linear_attention_linears(model).values()
        return sum(columns * sum(rows) for columns, rows in linears)
    if model.latent_attention is not None:
        of_proj = model.num_attention_heads * model.value_width * model.hidden_size
        linears = _latent_linears(model).values()
        return of_proj + sum(columns * sum(rows) for columns, rows in linears)
    of_keys = 2 * model.num_query_groups * model.kv_channels
    of_proj = model.num_attention_heads * model.kv_channels
    return model.hidden_size * (model.query_rows + of_keys + of_proj)


def latent_sizes(model: ModelConfig) -> tuple[int, ...]:
    """Outputs of the projections from hidden states to latents, whose weights each rank has; none without latents."""
    latent = model.latent_attention
    if latent is None:
        return ()
    if latent.q_lora_rank is None:
        return (latent.cached_width,)
    return (latent.q_lora_rank, latent.cached_width)


def mlp_matrices(model: ModelConfig) -> int:
    """Number of matrices of an MLP."""
    return 3 if model.gated_linear_unit else 2


def _norm(model: ModelConfig, width: int | None = None) -> int:
    has_bias = model.normalization == "LayerNorm" and model.norm_bias
    return (width or model.hidden_size) * (1 + has_bias)


def head_linears(
    model: ModelConfig, vocab_rows: int, seq_length: int = 1
) -> list[tuple[int, int, int]]:
    """Input size, output size and tokens of a row for each linear after the final norm."""
    h = model.hidden_size
    linears = []
    if model.architecture != "bert" and model.has_output_layer:
        return [(h, vocab_rows, seq_length)]
    if model.has_pooler:
        linears.append((h, h, 1))
    if model.has_output_layer:
        linears.append((h, h, seq_length))
        linears.append((h, vocab_rows, seq_length))
    if model.task == "pretraining":
        linears.append((h, 2, 1))
    elif not model.has_output_layer:
        tokens = seq_length
        if model.task == "sequence_classification":
            tokens = 1
        linears.append((h, model.num_labels, tokens))
    return linears
