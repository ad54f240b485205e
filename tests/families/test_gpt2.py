"""GPT-2: learned positions, a tied head, matrices that Hugging Face keeps transposed."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.families.parity import LAYOUTS, VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


@functools.cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_layer=4,
        n_embd=32,
        n_head=4,
        n_inner=48,
        n_positions=24,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return tiny_model(AutoModelForCausalLM, config)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gpt2_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())
