"""mT5 (Xue et al. 2021): T5 v1.1 in many languages; its decoder's output is never scaled."""

from __future__ import annotations

from lightning_megatron.convert.families import t5
from lightning_megatron.convert.family import Family

FAMILY = Family(
    model_type="mt5",
    describe=t5.describe,
    describe_weights=t5.describe_weights,
    rules=t5.rules,
    architectures={"seq2seq_lm": "MT5ForConditionalGeneration"},
    base_prefix="",
    buffers=t5.FAMILY.buffers,
    required=t5.FAMILY.required,
)
