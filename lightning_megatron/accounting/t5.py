"""How many parameters does each rank of a T5 hold, and how many operations does training on one row take?

Pure arithmetic, as in ``parameters.py`` and ``flops.py``, which count models of one stack.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatron.accounting.flops import TRAINING_OVER_FORWARD, AttentionCount
from lightning_megatron.models.config import ModelConfig


def t5_total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, each counted once: no padding of the vocabulary, no copies on other stages."""
    embedding = model.vocab_size * model.hidden_size
    head = 0 if model.share_embeddings_and_output_weights else embedding
    encoder = model.num_layers * _layer(model, tp=1, is_decoder=False)
    decoder = model.num_decoder_layers * _layer(model, tp=1, is_decoder=True)
    return embedding + encoder + decoder + 2 * (_table(model, tp=1) + model.hidden_size) + head


def t5_rank_parameters(model: ModelConfig, layout: Sequence[int], *, tp: int, pp: int, pp_rank: int) -> int:
    """Parameters of all model chunks on one (tensor, pipeline) rank, copies included.

    Args:
        model: Its shape.
        layout: Layers of encoder and decoder in each chunk, in the order of the pipeline.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        pp_rank: Which pipeline stage.
    """
    return sum(_chunk(model, layout, tp, chunk) for chunk in range(pp_rank, len(layout), pp))


def t5_parameter_lines(model: ModelConfig, layout: Sequence[int], *, tp: int, pp: int) -> list[str]:
    """The log's lines about the parameters of every (tensor, pipeline) rank."""
    lines = [f"Number of parameters of the model: {t5_total_parameters(model)}"]
    if len(layout) > 1:
        lines.append(
            f"Layers of each chunk, in the order of the pipeline: {', '.join(map(str, layout))} "
            f"(the first {model.num_layers} are the encoder's)"
        )
    for pp_rank in range(pp):
        count = t5_rank_parameters(model, layout, tp=tp, pp=pp, pp_rank=pp_rank)
        lines += [f"Number of parameters on (tensor, pipeline) rank ({t}, {pp_rank}): {count}" for t in range(tp)]
    return lines


def t5_model_flops_per_row(
    model: ModelConfig,
    encoder_length: int,
    decoder_length: int,
    padded_vocab_size: int,
    attention: AttentionCount = "causal",
) -> float:
    """Operations of training (forward and backward pass) on one pair of sequences, over all ranks.

    With the heads' width q = heads x head width, a row's multiply-adds are, for s_e and s_d tokens:
    ``L_e * s_e * (4 h q + mlp + 2 q s_e) + L_d * (s_d * (6 h q + mlp + q s_d + 2 q s_e) + 2 s_e h q) + s_d * h * V``.

    Args:
        model: Its shape.
        encoder_length: Tokens s_e of the encoder.
        decoder_length: Tokens s_d of the decoder.
        padded_vocab_size: Rows V of the output layer that is really computed.
        attention: ``causal`` counts half of the decoder's attention to itself, as above; ``full`` all of it.
    """
    h, s_e, s_d = model.hidden_size, encoder_length, decoder_length
    q = model.num_attention_heads * model.kv_channels
    mlp = h * model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
    encoder = s_e * (4 * h * q + mlp + 2 * q * s_e)
    own_keys = s_d / 2 if attention == "causal" else s_d
    decoder = s_d * (6 * h * q + mlp + 2 * q * own_keys + 2 * q * s_e) + 2 * s_e * h * q
    multiply_adds = model.num_layers * encoder + model.num_decoder_layers * decoder + s_d * h * padded_vocab_size
    return TRAINING_OVER_FORWARD * 2.0 * multiply_adds


def _chunk(model: ModelConfig, layout: Sequence[int], tp: int, chunk: int) -> int:
    start = sum(layout[:chunk])
    end = start + layout[chunk]
    encoder = max(0, min(end, model.num_layers) - min(start, model.num_layers))
    decoder = layout[chunk] - encoder
    is_first, is_last = chunk == 0, chunk == len(layout) - 1
    embedding_shard = model.padded_vocab_size(tp) // tp * model.hidden_size
    count = encoder * _layer(model, tp, is_decoder=False) + decoder * _layer(model, tp, is_decoder=True)
    count += ((encoder > 0) + (decoder > 0)) * _table(model, tp)
    if start < model.num_layers <= end:
        count += model.hidden_size
    if is_first:
        count += embedding_shard
    if is_last:
        count += model.hidden_size
        # A tied output layer on another stage than the embedding is a copy.
        if not (model.share_embeddings_and_output_weights and is_first):
            count += embedding_shard
    return count


def _table(model: ModelConfig, tp: int) -> int:
    return model.relative_attention_num_buckets * model.num_attention_heads // tp


def _layer(model: ModelConfig, tp: int, *, is_decoder: bool) -> int:
    """One layer on one of ``tp`` ranks: matrices are split, norms are not; T5 has no biases."""
    h, attentions = model.hidden_size, 2 if is_decoder else 1
    attention = 4 * h * model.num_attention_heads * model.kv_channels
    mlp = h * model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
    return (attentions * attention + mlp) // tp + (attentions + 1) * h
