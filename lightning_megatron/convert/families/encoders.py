"""Models with an encoder: Megatron-BERT, T5, T5 v1.1 and mT5.

Megatron-BERT (Shoeybi et al. 2019): BERT with pre-norm blocks, and the heads of five tasks. T5 (Raffel et al. 2020),
v1.1 and mT5 (Xue et al. 2021): encoder and decoder, relative position biases, unscaled attention scores.

Tied embeddings of T5
---------------------
A T5 config does not determine whether the output layer is tied. The published configs of v1.1 have
``tie_word_embeddings=False``; transformers 5 always sets it to True, and keeps only that the decoder's output is not
scaled. A model built from a config is tied. ``from_pretrained`` also ties, unless the files have both
``shared.weight`` and ``lm_head.weight`` and they differ. ``hugging_face.resolve_tied_output`` does the same.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.decoder_rules import (
    DecoderNames,
    linear,
    norm,
    output_layer,
    stack_rules,
)
from lightning_megatron.convert.family import Family
from lightning_megatron.convert.model_fields import LLAMA, Fields, activation
from lightning_megatron.convert.rules import LAYER, Rule, qkv_order
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

_LM_HEAD = (
    ("lm_head.dense", "cls.predictions.transform.dense"),
    ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
)
_POOLER = ("pooler.dense", "bert.pooler.dense")
_HEADS = {
    "pretraining": (
        "PreTraining",
        (*_LM_HEAD, _POOLER, ("binary_head", "cls.seq_relationship")),
    ),
    "masked_lm": ("MaskedLM", _LM_HEAD),
    "sequence_classification": (
        "SequenceClassification",
        (_POOLER, ("classification_head.dense", "classifier")),
    ),
    "token_classification": (
        "TokenClassification",
        (("token_head.dense", "classifier"),),
    ),
    "question_answering": (
        "QuestionAnswering",
        (("token_head.dense", "qa_outputs"),),
    ),
}
"""Task -> suffix of its Hugging Face class, and (Megatron's, Hugging Face's) names of modules with weight and bias."""


def _bert(hf: Any) -> Fields:
    return {
        "embedding_dropout": hf.hidden_dropout_prob,
        "classifier_dropout": hf.hidden_dropout_prob,
        "num_labels": hf.num_labels,
        "problem_type": hf.problem_type,
        "pad_token_id": -1 if hf.pad_token_id is None else hf.pad_token_id,
    }


_BERT_NAMES = DecoderNames(
    base="bert.",
    final_norm="encoder.ln",
    layer=f"encoder.layer.{LAYER}.",
    input_norm="attention.ln",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    proj="attention.output.dense",
    mlp_norm="ln",
    fc1=("intermediate.dense",),
    fc2="output.dense",
)


def _bert_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    rules = [
        *linear("embedding.word_embeddings", ("bert.embeddings.word_embeddings",)),
        *linear("embedding.position_embeddings", ("bert.embeddings.position_embeddings",)),
        *linear("embedding.tokentype_embeddings", ("bert.embeddings.token_type_embeddings",)),
        *stack_rules(names, model, "encoder"),
    ]
    _, heads = _HEADS[model.task]
    for megatron, hugging_face in heads:
        rules += linear(megatron, (hugging_face,), has_bias=True)
    if model.task in ("pretraining", "masked_lm"):
        rules.append(Rule(megatron="output_layer.bias", hugging_face=("cls.predictions.bias",)))
    return rules


# ---- T5 --------------------------------------------------------------------------------------------------------------

_UNLIMITED = 1 << 30
"""``max_position_embeddings``: relative positions beyond the table share its last row, so no sequence is too long."""


def _t5_fields(hf: Any) -> Fields:
    """Fields of T5 and mT5; mT5 has no ``scale_decoder_outputs`` and never scales."""
    if hf.num_decoder_layers < 1:
        raise ConfigError(
            f"num_decoder_layers={hf.num_decoder_layers} must be at least 1; correct the model's config"
        )
    buckets = hf.relative_attention_num_buckets
    farthest = hf.relative_attention_max_distance
    if not 4 <= buckets < 2 * farthest:
        raise ConfigError(
            f"relative_attention_num_buckets={buckets}: expected at least 4, and fewer than 2 x "
            f"relative_attention_max_distance={farthest}, as distant positions share rows; correct the model's config"
        )
    pad = 0 if hf.pad_token_id is None else hf.pad_token_id
    # If unset transformers does not shift labels; T5 starts with the padding token.
    start = getattr(hf, "decoder_start_token_id", None)
    return {
        "num_decoder_layers": hf.num_decoder_layers,
        "activation": activation(hf.dense_act_fn),
        "gated_linear_unit": hf.is_gated_act,
        "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": farthest,
        "scale_decoder_outputs": getattr(hf, "scale_decoder_outputs", False),
        "decoder_start_token_id": pad if start is None else start,
        "pad_token_id": pad,
        "share_embeddings_and_output_weights": True,
        "embedding_dropout": hf.dropout_rate,
        "hidden_dropout": hf.dropout_rate,
        "attention_dropout": hf.dropout_rate,
        "activation_dropout": hf.dropout_rate,
    }


def _t5_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """Rules of all weights of T5 and mT5."""
    embedding = linear("embedding.word_embeddings", ("shared",))
    return (
        embedding
        + _t5_stack(model, "encoder")
        + _t5_stack(model, "decoder")
        + output_layer(model, names.output)
    )


def _t5_stack(model: ModelConfig, stack: str) -> list[Rule]:
    mlp = "layer.1." if stack == "encoder" else "layer.2."  # behind cross-attention
    up = ("wi_0", "wi_1") if model.gated_linear_unit else ("wi",)
    names = DecoderNames(
        base=f"{stack}.",
        final_norm="final_layer_norm",
        layer=f"block.{LAYER}.",
        input_norm="layer.0.layer_norm",
        qkv=tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
        proj="layer.0.SelfAttention.o",
        mlp_norm=mlp + "layer_norm",
        fc1=tuple(f"{mlp}DenseReluDense.{name}" for name in up),
        fc2=mlp + "DenseReluDense.wo",
    )
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    rules = [
        *linear(f"{stack}_relative_pos_emb.relative_attention_bias", (table,)),
        *stack_rules(names, model, stack),
    ]
    if stack == "decoder":
        rules += _cross_attention_rules(model)
    return rules


def _cross_attention_rules(model: ModelConfig) -> list[Rule]:
    megatron = "decoder.layers."
    hf = f"decoder.block.{LAYER}."
    attention = hf + "layer.1.EncDecAttention."
    heads = model.num_attention_heads
    width = heads * model.kv_channels
    return [
        *norm(megatron + "pre_cross_attn_layernorm.", hf + "layer.1.layer_norm", model),
        *linear(megatron + "cross_attention.linear_q", (attention + "q",)),
        *linear(
            megatron + "cross_attention.linear_kv",
            (attention + "k", attention + "v"),
            rows=(width, width),
            order=qkv_order(0, heads, model.kv_channels),
        ),
        *linear(megatron + "cross_attention.linear_proj", (attention + "o",)),
    ]


_T5 = {
    **LLAMA,
    "architecture": "t5",
    "position_embedding_type": "relative",
    "max_position_embeddings": _UNLIMITED,
    "softmax_scale": 1.0,
}


def _t5(model_type: str, architecture: str) -> Family:
    return Family(
        name=model_type,
        architectures={"seq2seq_lm": architecture},
        heads={},
        defaults=_T5,
        custom_fields=_t5_fields,
        names=DecoderNames(base=""),
        rules=_t5_rules,
        required={"is_decoder": (False,), "is_encoder_decoder": (True,)},
    )


_CLASSES = {task: f"MegatronBertFor{name}" for task, (name, _) in _HEADS.items()}

FAMILIES = (
    Family(
        name="megatron-bert",
        architectures=_CLASSES,
        heads={},
        defaults={"architecture": "bert"},
        custom_fields=_bert,
        names=_BERT_NAMES,
        rules=_bert_rules,
        required={
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            # Untied, Hugging Face's head has a second bias that is never used.
            "tie_word_embeddings": (True,),
            "position_embedding_type": ("absolute",),
        },
    ),
    _t5("t5", "T5ForConditionalGeneration"),
    _t5("mt5", "MT5ForConditionalGeneration"),
)
