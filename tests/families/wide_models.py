"""One model of each family as wide as GPU kernels want it: heads of 64, sequences of 96; and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.families.parity import VOCAB_SIZE, Rows, padded_sentences, tiny_model
from tests.families.t5_models import t5_config
from tests.families.test_gpts import FAMILIES, changes_of, gpt_model

_SEQ_LENGTH = 96
"""Not 64: with a mask cuDNN has NaN gradients, in transformers too, where s % 128 == 64 (torch 2.11)."""
_LENGTHS = (96, 60, 25, 75)
_HIDDEN = 256
_WIDE = {
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), _HIDDEN),
    **dict.fromkeys(("n_inner", "intermediate_size", "d_ff", "ffn_dim"), 2 * _HIDDEN),
    "word_embed_proj_dim": _HIDDEN,
    **dict.fromkeys(("n_positions", "max_position_embeddings"), _SEQ_LENGTH),
    **dict.fromkeys(("head_dim", "d_kv"), 64),
    "sliding_window": 20,
}
_BERT = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_BERT |= {name: _WIDE[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}

NAMES = (*FAMILIES, "falcon_alibi", "megatron-bert", "t5", "mt5")


def _wide(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _WIDE[name] for name in fields if name in _WIDE}


def _model(name: str) -> Any:
    import transformers

    if name in FAMILIES:
        return gpt_model(name, _wide(FAMILIES[name][1]))
    if name == "falcon_alibi":
        return gpt_model("falcon", {**_wide(FAMILIES["falcon"][1]), **changes_of("falcon", "rw")})
    if name == "megatron-bert":
        config = transformers.MegatronBertConfig(vocab_size=VOCAB_SIZE, **_BERT)
        return tiny_model(transformers.MegatronBertForPreTraining, config)
    kind = name.upper()
    config = t5_config(f"{kind}Config", **{each: _WIDE[each] for each in ("d_model", "d_kv", "d_ff")})
    return tiny_model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def wide_model(name: str) -> tuple[Any, Rows]:
    """The Hugging Face model, fp32 on the CPU, and a padded batch of four rows."""
    model = _model(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # As large as in the tiny models, whose width is 32; T5 does not scale its scores.
                scale = (32 / _HIDDEN) ** 0.5
                parameter *= scale / 8 if key.endswith("Attention.q.weight") else scale
    rows: Callable[[], Rows] = _pairs if model.config.is_encoder_decoder else _ROWS.get(name, _sentences)
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
