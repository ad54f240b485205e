"""How many parameters does each rank of a layout hold?

Pure arithmetic on the model's shape, so that a layout can be judged, and the log's first lines written, before any
weight exists. Layers are split evenly over stages and chunks; ``ParallelConfig.check_model`` refuses anything else.
"""

from __future__ import annotations

from lightning_megatron.accounting.bert import bert_head_parameters
from lightning_megatron.models.config import ModelConfig


def total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, each counted once: no padding of the vocabulary, no copy of a tied embedding."""
    embedding = model.vocab_size * model.hidden_size
    is_copy = model.share_embeddings_and_output_weights or not model.has_output_layer
    head = _head_parameters(model, model.vocab_size) + (0 if is_copy else embedding)
    layers = model.num_layers * _layer_parameters(model, tp=1)
    return embedding + _input_parameters(model) + layers + _norm_parameters(model) + head


def chunk_parameters(model: ModelConfig, *, tp: int, num_chunks: int, chunk: int) -> int:
    """Parameters of one model chunk on one tensor-parallel rank.

    Args:
        model: Its shape.
        tp: Tensor parallel size.
        num_chunks: Chunks that the layers are cut into: pp, or pp x vpp if interleaved.
        chunk: Place of the chunk in the model's order, from 0. Virtual stage v of pipeline rank p is chunk v * pp + p.
    """
    embedding_shard = model.padded_vocab_size(tp) // tp * model.hidden_size
    is_first, is_last = chunk == 0, chunk == num_chunks - 1
    count = model.num_layers // num_chunks * _layer_parameters(model, tp)
    if is_first:
        count += embedding_shard + _input_parameters(model)
    if is_last:
        count += _norm_parameters(model) + _head_parameters(model, model.padded_vocab_size(tp) // tp)
        # A tied output layer on another stage than the embedding is a copy, kept equal by an all-reduce of gradients.
        if model.has_output_layer and not (model.share_embeddings_and_output_weights and is_first):
            count += embedding_shard
    return count


def rank_parameters(model: ModelConfig, *, tp: int, pp: int, pp_rank: int, vpp: int | None = None) -> int:
    """Parameters of all model chunks on one (tensor, pipeline) rank; the same for every tensor-parallel rank.

    Args:
        model: Its shape.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        pp_rank: Which pipeline stage.
        vpp: Model chunks per stage; None for one.
    """
    chunks = [virtual_stage * pp + pp_rank for virtual_stage in range(vpp or 1)]
    return sum(chunk_parameters(model, tp=tp, num_chunks=pp * (vpp or 1), chunk=chunk) for chunk in chunks)


def vocabulary_line(model: ModelConfig, tp: int) -> str:
    """The log's line about the vocabulary."""
    padded = model.padded_vocab_size(tp)
    return (
        f"Padded vocabulary: {model.vocab_size} tokens + {padded - model.vocab_size} dummy tokens = {padded} "
        f"(a multiple of make_vocab_size_divisible_by={model.make_vocab_size_divisible_by} x tp={tp})"
    )


def parameter_lines(model: ModelConfig, *, tp: int, pp: int, vpp: int | None = None) -> list[str]:
    """The log's lines about the vocabulary and the parameters of every (tensor, pipeline) rank."""
    lines = [vocabulary_line(model, tp), f"Number of parameters of the model: {total_parameters(model)}"]
    for pp_rank in range(pp):
        count = rank_parameters(model, tp=tp, pp=pp, pp_rank=pp_rank, vpp=vpp)
        lines += [f"Number of parameters on (tensor, pipeline) rank ({t}, {pp_rank}): {count}" for t in range(tp)]
    return lines


def _input_parameters(model: ModelConfig) -> int:
    """What stands beside the embedding of tokens: learned positions, types of tokens, and its norm."""
    count = model.num_tokentypes * model.hidden_size
    if model.embedding_layernorm:
        count += _norm_parameters(model)
    if model.position_embedding_type == "learned_absolute":
        count += model.max_position_embeddings * model.hidden_size
    return count


def _head_parameters(model: ModelConfig, vocab_rows: int) -> int:
    """What follows the final norm, but for the weight of the output layer."""
    return bert_head_parameters(model, vocab_rows) if model.architecture == "bert" else 0


def _norm_parameters(model: ModelConfig, width: int | None = None) -> int:
    """One norm, over the hidden size if no other width is given."""
    return (model.hidden_size if width is None else width) * (2 if model.normalization == "LayerNorm" else 1)


def _layer_parameters(model: ModelConfig, tp: int) -> int:
    """One layer on one of ``tp`` ranks: the linears are split, norms and biases of row-parallel linears are not."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    q = model.num_attention_heads * model.kv_channels
    # Fewer key/value heads than ranks are split, too: each rank keeps a part of their rows.
    qkv = q + 2 * model.num_query_groups * model.kv_channels
    up = ffn * (2 if model.gated_linear_unit else 1)
    split = qkv * h + q * h + up * h + ffn * h
    num_norms = model.parallel_attention_norms if model.parallel_attention else 2
    whole = num_norms * _norm_parameters(model)
    if model.qk_layernorm:
        whole += 2 * _norm_parameters(model, model.kv_channels)
    if model.add_qkv_bias:
        split += qkv
    if model.has_attention_output_bias:
        whole += h
    if model.add_bias_linear:
        split += up
        whole += h
    return split // tp + whole
