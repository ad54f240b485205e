"""Values of config fields that change transformers' logits change ours equally, or are refused.

Each field of a tiny model's config is changed to a few other values, one at a time, and the same weights are loaded
wherever their shapes still fit. Values that transformers refuses, or that change nothing there, are left out.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.errors import CheckpointError, ConfigError
from tests.families.parity import (
    padded_sentences,
    pretrained_module,
    real_positions,
    record_outputs,
)
from tests.families.test_experts import FAMILIES as EXPERTS
from tests.families.test_experts import mixture
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.marks import exhaustive
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

_ROWS = padded_sentences()
_TOLERANCE = 5e-5
_UNCHANGED = 1e-6
_MOST_LAYERS = 8
_KINDS = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention")
_ACTIVATIONS = ("gelu", "relu", "silu", "gelu_pytorch_tanh")
_ROPE: dict[str, Any] = {
    "factor": 3.0,
    "attention_factor": 0.7,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "mscale": 0.5,
    "mscale_all_dim": 0.5,
    "partial_rotary_factor": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 6,
    "alpha": 5.0,
    "llama_4_scaling_beta": 0.4,
    "low_freq_factor": 2.0,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 1],
}
"""Keys of ``rope_parameters`` that are added."""
_SCALED = {"factor": 3.0, "original_max_position_embeddings": 8}


class _Variant(NamedTuple):
    """A model with one changed field."""

    field: str
    value: Any
    model: Any
    logits: Tensor


def _other_values(name: str, value: Any) -> list[Any]:
    """Values to try in place of ``value``."""
    if isinstance(value, str):
        return [each for each in _ACTIVATIONS if value in _ACTIVATIONS and each != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value - 1, 0), 0, 1]
    if isinstance(value, float):
        return [1.7 * value + 0.05, 0.0, 1.0, 0.3]
    if isinstance(value, list):
        kinds = [[kind] * len(value) for kind in _KINDS if set(_KINDS).intersection(value)]
        return [value[::-1], value[:-1], [], [0], [1], *kinds]
    if isinstance(value, dict):
        return _other_ropes(value)
    return [True, 2, 0.5, 5, "gelu"]


def _other_ropes(rope: dict[str, Any]) -> list[Any]:
    others: list[Any] = [None]
    for name, value in rope.items():
        for other in _other_values(name, value):
            others.append({**rope, name: other})
    for kind in ("linear", "dynamic", "yarn"):
        others.append({**rope, **_SCALED, "rope_type": kind})
    for name, value in _ROPE.items():
        if name not in rope:
            others.append({**rope, name: value})
    return others


def _model_of(family: str) -> Any:
    return mixture(family) if family in EXPERTS else gpt_model(family, {})


def _logits_of(model: Any) -> Tensor:
    batch = {
        name: torch.stack([row[name] for row in _ROWS]) for name in ("input_ids", "attention_mask")
    }
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    return logits


def _changed_model(
    model: Any,
    name: str,
    value: Any,
) -> Any:
    """A model of the same weights, as far as their shapes fit, whose config has another value."""
    from transformers import AutoModelForCausalLM

    fields = copy.deepcopy(model.config.to_dict())
    del fields["model_type"]
    config = type(model.config)(**{**fields, name: value})
    if config.num_hidden_layers > _MOST_LAYERS:
        raise ValueError(f"{config.num_hidden_layers} layers")
    torch.manual_seed(3)
    # Falcon: see gpt_model.
    if model.config.model_type == "falcon":
        changed = type(model)(config)
    else:
        changed = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    own = changed.state_dict()
    weights = {
        key: tensor
        for key, tensor in model.state_dict().items()
        if key in own and own[key].shape == tensor.shape
    }
    changed.load_state_dict(weights, strict=False)
    return changed.float().eval()


def _variants(model: Any) -> Iterator[_Variant]:
    from transformers import PretrainedConfig

    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    common.discard("tie_word_embeddings")
    before = _logits_of(_changed_model(model, "use_cache", False))
    for field in dataclasses.fields(type(model.config)):
        if field.name in common:
            continue
        for value in _other_values(field.name, getattr(model.config, field.name)):
            try:
                changed = _changed_model(model, field.name, value)
                logits = _logits_of(changed)
            except Exception:  # noqa: S112 (it is no value of transformers)
                continue
            is_same = logits.shape == before.shape and torch.allclose(
                logits, before, atol=_UNCHANGED
            )
            if not is_same and logits.isfinite().all():
                yield _Variant(field.name, value, changed, logits)


def _compared_fields(family: str) -> tuple[int, list[str]]:
    """How many values were compared, and those with which our logits are others."""
    count = 0
    wrong = []
    for variant in _variants(_model_of(family)):
        try:
            error = _error(variant)
        except (CheckpointError, ConfigError):
            continue
        count += 1
        if not error < _TOLERANCE:
            wrong.append(f"{variant.field}={variant.value!r}: {error:.2g}")
    return count, wrong


def _error(variant: _Variant) -> float:
    """Largest difference of our logits at real positions."""
    with tempfile.TemporaryDirectory() as directory:
        variant.model.save_pretrained(directory)
        module = pretrained_module(directory)
        module.train_step = recorder = record_outputs(module.train_step)
        loader: DataLoader[Any] = DataLoader(_ROWS, batch_size=len(_ROWS))  # type: ignore[arg-type]
        trainer_of(Case(layout=Layout(), steps=1)).validate(module, loader, verbose=False)
    (logits,) = (torch.cat(parts) for parts in recorder.outputs)
    real = real_positions(variant.model, _ROWS)
    width = variant.logits.shape[-1]
    return float((logits[..., :width] - variant.logits)[real].abs().max())


@pytest.mark.parametrize("family", [exhaustive(name) for name in (*EXPERTS, *FAMILIES)])
def test_values_of_config_fields_change_the_logits_as_in_transformers(family: str) -> None:
    ((count, wrong),) = run_ranks(_compared_fields, 1, family, timeout=900)
    assert not wrong
    assert count > 5
