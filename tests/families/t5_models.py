"""Tiny T5 models of each kind for comparisons with transformers, with random weights on the CPU."""

import functools
from typing import Any

import torch

from tests.families.parity import tiny_model
from tests.models import T5, VOCAB_SIZE


def t5_config(config_class: str, **fields: Any) -> Any:
    import transformers

    tokens = {"vocab_size": VOCAB_SIZE, "decoder_start_token_id": 2, "pad_token_id": 1}
    return getattr(transformers, config_class)(
        **{**T5, **tokens, "layer_norm_epsilon": 1e-5, **fields}
    )


def _tiny(model_class: Any, config: Any) -> Any:
    """``tiny_model`` with smaller queries: T5 does not scale its scores, and large ones would amplify rounding."""
    model = tiny_model(model_class, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("Attention.q.weight"):
                parameter *= config.d_kv**-0.5
    return model


def _untied(model: Any) -> Any:
    """Untie the output layer, as transformers does when it loads different weights; new models are always tied."""
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(weight.flip(0).clone())
    model.all_tied_weights_keys.pop("lm_head.weight")
    return model


@functools.cache
def t5() -> Any:
    """The original T5: ReLU, tied embeddings, outputs scaled before the head."""
    from transformers import T5ForConditionalGeneration

    return _tiny(T5ForConditionalGeneration, t5_config("T5Config", feed_forward_proj="relu"))


@functools.cache
def t5_1_1() -> Any:
    """T5 1.1: gated GELU, untied embeddings, outputs not scaled."""
    from transformers import T5ForConditionalGeneration

    config = t5_config("T5Config", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    return _untied(_tiny(T5ForConditionalGeneration, config))


@functools.cache
def mt5() -> Any:
    """mT5: tied embeddings, as transformers creates it, outputs not scaled."""
    from transformers import MT5ForConditionalGeneration

    return _tiny(
        MT5ForConditionalGeneration,
        t5_config("MT5Config", num_layers=2, feed_forward_proj="gated-silu"),
    )
