"""Generator of docs/families.md: each family's differences from GPT-2, and its measured errors against transformers.

``python -m tests.families.cards`` compares each family in three layouts, compares generated texts, and writes the page
(three minutes on two cores); with names of families only their rows are new. ``test_every_family.py`` checks that the
page is up to date.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any

from lightning_megatron.convert.registry import (
    REFUSED_TYPES,
    known_families,
    model_config,
    rules_of,
)
from lightning_megatron.models.config import ModelConfig
from tests.families.parity import Rows, check_family
from tests.families.parity import padded_sentences as sentences
from tests.families.t5_models import mt5, t5
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.families.test_megatron_bert import CASES as BERTS
from tests.families.test_megatron_bert import bert_model
from tests.families.test_t5 import CASES as T5S
from tests.generate.models import ENCODER_DECODERS, MODELS, NO_END, compare, make_call
from tests.parity.training import FOUR_RANKS, TP2, Layout
from tests.ranks import ROOT

PAGE = ROOT / "docs" / "families.md"
LAYOUTS = {"1 rank": Layout(), "tp2": TP2, "tp2 pp2 sp": FOUR_RANKS}
ELSEWHERE = {
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "dots1",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v3",
    "ernie4_5_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
}
"""Families with experts, compared in tests/families/test_experts.py."""
_WORDS: dict[str, str] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": "gated MLP",
    "rope_scaling": "scaled rotary positions",
    "parallel_attention": "attention beside the MLP",
    "embedding_layernorm": "normalized embeddings",
    "qk_layernorm": "normalized queries and keys",
    "qk_layernorm_of_all_heads": "over all heads at once",
    "qk_layernorm_after_rotary": "after rotation",
    "norm_bias": "LayerNorm without bias",
    "zero_centered_norms": "norms of 1 + weight",
    "pre_norms": "no norms before blocks",
    "post_norms": "norms behind blocks",
    "sliding_window": "windows",
    "rotary_base_of_windows": "a theta for layers with windows",
    "rotary_percent": "heads rotated in part",
    "rotary_interleaved": "neighbours rotated in pairs",
    "no_rope_layers": "layers without positions",
    "position_offset": "positions from row 2 on",
    "attention_softcap": "capped scores",
    "logits_softcap": "capped logits",
    "embedding_multiplier": "multiplied embeddings",
    "residual_multiplier": "multiplied residuals",
    "logits_multiplier": "multiplied logits",
    "query_scaling_beta": "queries multiplied by position",
    "linear_attention": "gated delta nets",
    "attention_output_gate": "gates of attention",
}
"""Text on the page for ``ModelConfig`` fields that differ from GPT-2's."""
_POSITIONS = {
    "rope": "rotary",
    "alibi": "ALiBi",
    "relative": "relative positions",
    "learned_absolute": "learned",
}


def models() -> dict[str, Callable[[], tuple[Any, Rows]]]:
    """Functions that create a tiny Hugging Face model of each family, with rows for it."""
    t5_rows = next(iter(T5S.values()))[2]
    head, _, bert_rows = next(iter(BERTS.values()))
    gpts = {name: (lambda name=name: (gpt_model(name, {}), sentences())) for name in FAMILIES}
    others = {"t5": lambda: (t5(), t5_rows), "mt5": lambda: (mt5(), t5_rows)}
    found = {
        **gpts,
        **others,
        "megatron-bert": lambda: (bert_model(*head), bert_rows),
    }
    return dict(sorted(found.items()))


def description(hf_model: Any) -> str:
    """Return the cells that need no comparison: classes, features, and the digest of the family's table."""
    family = known_families()[hf_model.config.model_type]
    model = model_config(hf_model.config)
    words = [_POSITIONS[model.position_embedding_type]]
    words += [words_of for field, words_of in _WORDS.items() if field in _not_default(model)]
    if model.activation == "xielu":
        words.append("xIELU")
    if model.num_query_groups != model.num_attention_heads:
        words.append("grouped queries" if model.num_query_groups > 1 else "one key and value")
    return f"{', '.join(family.classes.values())} | {', '.join(words)} | {_digest(model)}"


def _not_default(model: ModelConfig) -> dict[str, Any]:
    return {
        field.name: getattr(model, field.name)
        for field in fields(model)
        if field.default is MISSING or getattr(model, field.name) != field.default
    }


def _digest(model: ModelConfig) -> str:
    """Return a digest of the tiny model's config fields and weight rules, which changes when one of them does."""
    rules = [
        (
            rule.megatron,
            rule.hugging_face,
            rule.rows,
            None if rule.order is None else rule.order.tolist(),
        )
        for rule in rules_of(model)
    ]
    described = (sorted(_not_default(model).items()), rules)
    digest = hashlib.sha256(repr(described).encode()).hexdigest()
    return digest[:8]


def _texts(family: str) -> str:
    names = [name for name, (model_type, _) in MODELS.items() if model_type == family]
    names += [name for name in ENCODER_DECODERS if name == family]
    for name in names:
        compare(
            [make_call(name, max_new_tokens=12, **NO_END)],
            LAYOUTS["tp2 pp2 sp"],
        )
    return "equal" if names else "none"


def _compared(family: str) -> str:
    """Compare a family, and return its row."""
    hf_model, rows = models()[family]()
    comparisons = [check_family(hf_model, layout, rows) for layout in LAYOUTS.values()]
    errors = [f"{result.logits_error:.0e}" for result in comparisons]
    errors += [
        f"{max(getattr(x, name) for x in comparisons):.0e}"
        for name in ("loss_error", "gradient_error")
    ]
    row = f"| {family} | {description(hf_model)} | {' | '.join(errors)} | bit-equal | {_texts(family)} |"
    print(row, flush=True)
    return row


def lines_of_page() -> dict[str, str]:
    """Return the rows that the page has, by family."""
    lines = [line for line in PAGE.read_text().splitlines() if "bit-equal" in line]
    return {line.strip("| ").split(" | ")[0]: line for line in lines}


def _updated(families: Iterable[str]) -> str:
    """Return the page with new rows of ``families``, and of others as it has them."""
    rows = lines_of_page()
    for family in families:
        rows[family] = _compared(family)
    return page(rows[family] for family in sorted(rows))


def refusals() -> str:
    """Return the page's table of refused configs, from the registry."""
    lines = ["| model type | config field | why, or which values are taken |", "|---|---|---|"]
    lines += [f"| {model_type} | | {reason} |" for model_type, reason in REFUSED_TYPES.items()]
    for name, family in sorted(known_families().items()):
        for field, taken in family.required.items():
            lines.append(
                f"| {name} | `{field}` | {' or '.join(f'`{value!r}`' for value in taken)} |"
            )
    return "\n".join(lines)


_PAGE = """# Families

`python -m tests.families.cards` has made this page: each family as a tiny model with random weights, in fp32, beside
the class of transformers, in three layouts. Errors are the largest: of logits absolute (they are of size 1 to 10), of
the loss relative, of each parameter's gradient relative to its norm plus a twentieth of the norm of all gradients.
Texts are of 12 tokens, greedy, of four prompts with padding, in the last layout. `table` changes when what we make of
a config or its weights does.

`lightning-megatron verify MODEL_DIR` makes such a card of real weights, on your machine ([verify](commands.md#verify)).

{rows}

## Refused by name

A config that would change the result in a way that is not computed is an error that names the field.

{refusals}
"""


def page(rows: Iterable[str]) -> str:
    """Return the complete page.

    Args:
        rows: Rows of the table of families.
    """
    head = [
        "family",
        "classes",
        "has",
        "table",
        *(f"logits, {name}" for name in LAYOUTS),
        "loss",
        "gradients",
    ]
    head += ["weights and config, both ways", "texts"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows]
    return _PAGE.format(rows="\n".join(lines), refusals=refusals())


if __name__ == "__main__":
    PAGE.write_text(_updated(sys.argv[1:] or models()))
