"""Each GPT family's table accounts for every tensor and every config field of Hugging Face's model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lightning_megatron.accounting import total_parameters
from lightning_megatron.convert.registry import config_object, family_of, model_config
from lightning_megatron.errors import ConfigError
from tests.families.test_gpts import CONFIGS


def _on_meta(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_object(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_of_parameters_is_that_of_the_model(name: str) -> None:
    assert total_parameters(model_config(CONFIGS[name])) == sum(p.numel() for p in _on_meta(name).parameters())


CHANGES_NOTHING = {
    "use_cache": "is about generation",
    "bos_token_id": "is about generation",
    "eos_token_id": "is about generation",
    "pad_token_id": "is told by the mask; see described() of family.py",
    "keys_to_ignore_at_inference": "is about generation",
    "attribute_map": "is about names",
    "summary_type": "is of GPT2DoubleHeadsModel",
    "summary_use_proj": "is of GPT2DoubleHeadsModel",
    "summary_activation": "is of GPT2DoubleHeadsModel",
    "summary_proj_to_labels": "is of GPT2DoubleHeadsModel",
    "summary_first_dropout": "is of GPT2DoubleHeadsModel",
    "reorder_and_upcast_attn": "is about the rounding of 16-bit scores",
    "attention_softmax_in_fp32": "is about the rounding of 16-bit scores",
    "scale_attention_softmax_in_fp32": "is about the rounding of 16-bit scores",
    "use_sliding_window": "is in sliding_window and layer_types already",
    "max_window_layers": "is in layer_types already",
    "no_rope_layer_interval": "is in no_rope_layers already",
    "original_max_position_embeddings": "is in rope_parameters already",
    "embd_pdrop": "is read by no model of transformers but GPT-2's and GPT-BigCode's, which we read",
    "is_decoder": "is read by no model of GPT-NeoX's; other families refuse it",
    "classifier_dropout": "is of heads that we do not have",
    "pretraining_tp": "is read with slow_but_exact",
    "num_kv_heads": "is read with the architectures that have it",
    "num_ln_in_parallel_attn": "is read with the architecture that has it",
}


class _Watched:
    """A config object that remembers which fields were read."""

    def __init__(self, config: Any) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("model_type", sorted({config["model_type"] for config in CONFIGS.values()}))
def test_every_config_field_is_read_or_checked_or_changes_nothing(model_type: str) -> None:
    # A field that a new version of transformers brings fails here until someone has decided about it.
    from transformers import PretrainedConfig

    family, read = family_of(model_type), set[str]()
    for fields in CONFIGS.values():
        if fields["model_type"] == model_type:
            watched = _Watched(config_object(fields))
            family.describe(watched)
            read |= watched.read
    own = {field.name for field in dataclasses.fields(type(config_object(fields_of(model_type))))}
    own -= {field.name for field in dataclasses.fields(PretrainedConfig)} - {"tie_word_embeddings"}
    names = type(config_object(fields_of(model_type))).attribute_map
    read |= {names.get(name, name) for name in read}
    undecided = own - read - family.required.keys() - CHANGES_NOTHING.keys()
    assert not undecided, f"fields of {model_type} configs that nobody has decided about: {sorted(undecided)}"


def fields_of(model_type: str) -> dict[str, Any]:
    return next(fields for fields in CONFIGS.values() if fields["model_type"] == model_type)


@pytest.mark.parametrize("model", [None, 5, [], object()])
def test_what_is_no_config_is_refused_with_what_is_one(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"model is a {type(model).__name__}; give a Hugging Face config object"):
        model_config(model)
