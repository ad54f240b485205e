"""Megatron-BERT (Shoeybi et al. 2019): BERT with norms before each block, and the heads of five tasks."""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import LAYER, DecoderNames, Family, Rule, described, linear, stack_rules
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
    own = {
        "architecture": "bert",
        "num_query_groups": hf.num_attention_heads,
        "num_tokentypes": hf.type_vocab_size,
        "layernorm_epsilon": hf.layer_norm_eps,
        **dict.fromkeys(("embedding_dropout", "hidden_dropout", "classifier_dropout"), hf.hidden_dropout_prob),
        "attention_dropout": hf.attention_probs_dropout_prob,
        "num_labels": hf.num_labels,
        "problem_type": hf.problem_type,
        "pad_token_id": -1 if hf.pad_token_id is None else hf.pad_token_id,
    }
    return described(hf, own)


_NAMES = DecoderNames(
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


def _rules(model: ModelConfig) -> list[Rule]:
    rules = [
        *linear("embedding.word_embeddings", ("bert.embeddings.word_embeddings",)),
        *linear("embedding.position_embeddings", ("bert.embeddings.position_embeddings",)),
        *linear("embedding.tokentype_embeddings", ("bert.embeddings.token_type_embeddings",)),
        *stack_rules(_NAMES, model, "encoder"),
        *(rule for ours, theirs in _HEADS[model.task] for rule in linear(ours, (theirs,), has_bias=True)),
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
