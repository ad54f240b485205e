"""One model of each family as wide as GPU kernels want it: heads of 64, sequences of 96; and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.families.parity import VOCAB_SIZE, Rows, padded_sentences, tiny_model

_SEQ_LENGTH = 96
"""Not 64: with a mask cuDNN has NaN gradients, in transformers too, where s % 128 == 64 (torch 2.11)."""
_LENGTHS = (96, 60, 25, 75)
_HIDDEN = 256
_GPT2_LIKE = {"n_layer": 4, "n_embd": _HIDDEN, "n_head": 4, "n_positions": 96}
_GPT2_DROPOUTS = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
_LLAMA_LIKE = {
    "num_hidden_layers": 4,
    "hidden_size": _HIDDEN,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_FALCON = {"num_hidden_layers": 4, "hidden_size": _HIDDEN, "num_attention_heads": 4, "max_position_embeddings": 96}
_BERT = {
    "num_hidden_layers": 4,
    "hidden_size": _HIDDEN,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_T5 = {"d_model": _HIDDEN, "d_kv": 64, "d_ff": 512, "num_layers": 3, "num_decoder_layers": 4, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2_LIKE | _GPT2_DROPOUTS),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA_LIKE | {"sliding_window": 20}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA_LIKE | {"head_dim": 64}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2_LIKE | _GPT2_DROPOUTS),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 4, "hidden_size": _HIDDEN, "n_head": 4}),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon_alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "megatron-bert": ("MegatronBertForPreTraining", "MegatronBertConfig", _BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
}

NAMES = tuple(_MODELS)


def wide_model(name: str) -> tuple[Any, Rows]:
    """The Hugging Face model, fp32 on the CPU, and a padded batch of four rows."""
    import transformers

    model_class, config_class, fields = _MODELS[name]
    config = getattr(transformers, config_class)(vocab_size=VOCAB_SIZE, **fields)
    model = tiny_model(getattr(transformers, model_class), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # As large as in the tiny models, whose width is 32; T5 does not scale its scores.
                scale = (32 / _HIDDEN) ** 0.5
                parameter *= scale / 8 if key.endswith("Attention.q.weight") else scale
    rows: Callable[[], Rows] = _pairs if config.is_encoder_decoder else _ROWS.get(name, _sentences)
    return model, rows()


def _sentences() -> Rows:
    return padded_sentences(_LENGTHS, _SEQ_LENGTH)


def _masked_pairs() -> Rows:
    """About half of the tokens are to be told; labels of the order of sentences."""
    hidden = torch.rand(len(_LENGTHS), _SEQ_LENGTH, generator=torch.Generator().manual_seed(6)) < 0.5
    return [
        {
            **row,
            "labels": row["labels"].masked_fill(hidden[i], -100),
            "token_type_ids": (torch.arange(_SEQ_LENGTH) > 8).long(),
            "next_sentence_label": torch.tensor(i % 2),
        }
        for i, row in enumerate(_sentences())
    ]


def _pairs() -> Rows:
    """Sources, and targets of half their length."""
    return [
        {
            "input_ids": row["input_ids"],
            "attention_mask": row["attention_mask"],
            "labels": row["labels"][: _SEQ_LENGTH // 2].clone(),
            "decoder_attention_mask": torch.ones(_SEQ_LENGTH // 2, dtype=torch.long),
        }
        for row in _sentences()
    ]


_ROWS: dict[str, Callable[[], Rows]] = {"megatron-bert": _masked_pairs}
