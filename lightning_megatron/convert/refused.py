"""Which Hugging Face families are known, and cannot be computed? Each with the reason that its users are told."""

from __future__ import annotations

_POST_NORM = (
    "it normalizes after each block (post-LN) and its embeddings, and the engine's layers normalize before; "
    "use model_type='megatron-bert', the pre-LN BERT"
)

REFUSED: dict[str, str] = {
    "bert": _POST_NORM,
    "roberta": _POST_NORM,
    "xlm-roberta": _POST_NORM,
    "camembert": _POST_NORM,
    "electra": _POST_NORM,
    "distilbert": _POST_NORM,
    "albert": f"all its layers share one set of weights, and {_POST_NORM}",
    "deberta": f"its attention mixes contents and relative positions, and {_POST_NORM}",
    "deberta-v2": f"its attention mixes contents and relative positions, and {_POST_NORM}",
    "bart": "it normalizes after each block (post-LN), and the engine's layers normalize before; use model_type='t5'",
}
"""``model_type`` -> why not, and what to use instead."""
