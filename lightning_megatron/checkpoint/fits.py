"""Whether a run can continue from a checkpoint, or begin with its weights: the fields that must be equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.checkpoint.state import EXPERT_BIAS, RunState
from lightning_megatron.errors import CheckpointError

MAY_DIFFER = {
    "activation_dropout",
    "add_attention_output_bias",
    "attention_dropout",
    "attention_output_dropout",
    "classifier_dropout",
    "decoder_start_token_id",
    "embedding_dropout",
    "experts.load_balancing_loss_coef",
    "family",
    "hidden_dropout",
    "init_method_std",
    "lora_dropout",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "pad_token_id",
    "problem_type",
    "scaled_residual_init",
}
"""Fields of a model's description that may differ between a run and its checkpoint; any other difference makes it
another model."""

POSITION_FIELDS = {
    "query_scaling_beta",
    "query_scaling_length",
    "rope_scaling",
    "rotary_base",
    "rotary_base_of_windows",
    "sliding_window",
    "sliding_window_layers",
}
"""Fields of positions and attention range that may differ in a new run with the checkpoint's weights, but not when a
run resumes."""

VISIBLE_IN_WEIGHTS = {
    "add_bias_linear",
    "add_qkv_bias",
    "architecture",
    "classifier_bias",
    "embedding_layernorm",
    "lora",
    "num_labels",
    "num_tokentypes",
    "position_embedding_type",
    "qk_layernorm",
    "share_embeddings_and_output_weights",
    "task",
    "vocab_size",
}
"""Fields that may differ although the weights that both models have mean the same: one model has more weights, or other
rows of the vocabulary."""


def check_fits(
    run: RunState,
    meta: Mapping[str, Any],
    path: Path,
) -> None:
    """Raise unless ``run`` can continue from the checkpoint at ``path``.

    Raises:
        CheckpointError: If the model or the optimizer is another one.
    """
    if run.optimizer is None:
        check_same(run, meta, path, MAY_DIFFER | POSITION_FIELDS)
        return
    check_same(run, meta, path, MAY_DIFFER)
    if not meta["has_optimizer"]:
        raise CheckpointError(
            f"checkpoint {path} holds only weights; resume from a full one, or begin a new run with "
            "MegatronStrategy(load_from=...) or load_weights_only=True"
        )
    for name, value in run.optimizer.state_format.items():
        saved = meta["optimizer_format"].get(name)
        if saved != value:
            raise CheckpointError(
                f"checkpoint {path} holds the state of another optimizer: {name} {saved} there and {value} here; use "
                "the same, or MegatronStrategy(load_weights_only=True)"
            )


def check_same(
    run: RunState,
    meta: Mapping[str, Any],
    path: Path,
    free: set[str],
) -> None:
    """Raise if a weight that ``run`` and the checkpoint both have would be used differently.

    Args:
        run: The run.
        meta: Content of the checkpoint's ``meta.pt``.
        path: The checkpoint, for messages.
        free: Fields of the model's description that may differ.

    Raises:
        CheckpointError: If another field differs, or the checkpoint has only adapters and the run no base for them.
    """
    saved = _flatten(meta["model_description"])
    expected = _flatten(run.model_description)
    for name in (*expected, EXPERT_BIAS):
        # Checkpoints written before there were adapters, or of models without biases, lack these fields.
        is_comparable = name in saved or name in ("lora", EXPERT_BIAS)
        if name in free or not is_comparable:
            continue
        if saved.get(name) != expected.get(name):
            raise CheckpointError(
                f"checkpoint {path} is of another model: {name}={saved.get(name)} there and {expected.get(name)} here; "
                "give the model's config the checkpoint's values"
            )
    if meta.get("part") == "adapters" and run.base is None:
        raise CheckpointError(
            f"checkpoint {path}: expected a complete model, got the adapters of {meta['base']}; begin with that: "
            "MegatronModule(model=..., pretrained=True, lora=...), or MegatronModule.load_from_checkpoint"
        )


def _flatten(description: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a model's description: the experts' fields become ``experts.num_experts`` and so on."""
    flat = dict(description)
    experts = flat.get("experts")
    if isinstance(experts, Mapping):
        del flat["experts"]
        for name, value in experts.items():
            flat[f"experts.{name}"] = value
    return flat
