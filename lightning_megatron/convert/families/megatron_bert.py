"""Megatron-BERT (Shoeybi et al. 2019): BERT with norms before each block, and the heads of five tasks."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import LAYER, Family, Rule, activation, qkv_order
from lightning_megatron.convert.gpt_tables import linear, norm
from lightning_megatron.models.config import ModelConfig

_HEADS = {
    "pretraining": (
        ("lm_head.dense", "cls.predictions.transform.dense"),
        ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
        ("pooler.dense", "bert.pooler.dense"),
        ("binary_head", "cls.seq_relationship"),
    ),
    "masked_lm": (
        ("lm_head.dense", "cls.predictions.transform.dense"),
        ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    ),
    "sequence_classification": (
        ("pooler.dense", "bert.pooler.dense"),
        ("classification_head.dense", "classifier"),
    ),
    "token_classification": (("token_head.dense", "classifier"),),
    "question_answering": (("token_head.dense", "qa_outputs"),),
}
"""Task -> its modules with a weight and a bias, ours and theirs."""


def _describe(hf: Any) -> ModelConfig:
    return ModelConfig(
        family="megatron-bert",
        architecture="bert",
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_attention_heads,
        kv_channels=hf.hidden_size // hf.num_attention_heads,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        num_tokentypes=hf.type_vocab_size,
        layernorm_epsilon=hf.layer_norm_eps,
        activation=activation(hf.hidden_act),
        embedding_dropout=hf.hidden_dropout_prob,
        hidden_dropout=hf.hidden_dropout_prob,
        attention_dropout=hf.attention_probs_dropout_prob,
        classifier_dropout=hf.hidden_dropout_prob,
        num_labels=hf.num_labels,
        problem_type=hf.problem_type,
        pad_token_id=-1 if hf.pad_token_id is None else hf.pad_token_id,
        init_method_std=hf.initializer_range,
        scaled_residual_init=False,
    )


def _rules(model: ModelConfig) -> list[Rule]:
    layer, hf = "encoder.layers.", f"bert.encoder.layer.{LAYER}."
    modules = (
        ("encoder.final_layernorm.", "bert.encoder.ln"),
        (layer + "self_attention.linear_qkv.layer_norm_", hf + "attention.ln"),
        (layer + "self_attention.linear_proj.", hf + "attention.output.dense"),
        (layer + "mlp.linear_fc1.layer_norm_", hf + "ln"),
        (layer + "mlp.linear_fc1.", hf + "intermediate.dense"),
        (layer + "mlp.linear_fc2.", hf + "output.dense"),
        *((f"{ours}.", theirs) for ours, theirs in _HEADS[model.task]),
    )
    rules = [
        *linear("embedding.word_embeddings", ("bert.embeddings.word_embeddings",)),
        *linear("embedding.position_embeddings", ("bert.embeddings.position_embeddings",)),
        *linear("embedding.tokentype_embeddings", ("bert.embeddings.token_type_embeddings",)),
        *(rule for ours, theirs in modules for rule in norm(ours, theirs, model)),
        *linear(
            layer + "self_attention.linear_qkv",
            tuple(f"{hf}attention.self.{name}" for name in ("query", "key", "value")),
            has_bias=True,
            rows=(model.hidden_size,) * 3,
            order=qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels),
        ),
    ]
    if model.task in ("pretraining", "masked_lm"):
        rules.append(Rule(megatron="output_layer.bias", hugging_face=("cls.predictions.bias",)))
    return rules


FAMILIES = (
    Family(
        model_type="megatron-bert",
        describe=_describe,
        rules=_rules,
        architectures={
            "pretraining": "MegatronBertForPreTraining",
            "masked_lm": "MegatronBertForMaskedLM",
            "sequence_classification": "MegatronBertForSequenceClassification",
            "token_classification": "MegatronBertForTokenClassification",
            "question_answering": "MegatronBertForQuestionAnswering",
        },
        base_prefix="bert.",
        buffers=("*embeddings.position_ids",),
        required={
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            # Untied, Hugging Face's head has two biases of which one is never used.
            "tie_word_embeddings": (True,),
            "position_embedding_type": ("absolute",),
        },
    ),
)
