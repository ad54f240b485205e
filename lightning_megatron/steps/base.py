"""Shared parts of the train steps: weighted loss terms, metrics, vocabulary-parallel argmax, and batch validation."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_megatron.engine.schedule import Batch, LossFunc, LossTerm, Output, TrainStep
from lightning_megatron.errors import DataError
from lightning_megatron.models.config import ModelConfig

__all__ = ["Batch", "LossFunc", "LossTerm", "Output", "TrainStep"]

IGNORE_INDEX = -100
"""Hugging Face's label for "no target here"."""

IGNORED_LABELS = (-100, -1)
"""Hugging Face's and Megatron's labels for "no target here"."""


def loss_term(losses: Tensor, weights: Tensor) -> LossTerm:
    """Weighted sum of losses and sum of weights, both of the same shape."""
    return LossTerm((losses.float() * weights).sum(), weights.sum())


def target_weights(mask: Tensor, batch: Batch) -> Tensor:
    """Weights of targets, fp32: ``mask``, [b] or [b, n], times ``sample_mask`` and ``loss_mask`` if in the batch."""
    mask = mask.float()
    if "sample_mask" in batch:
        row_weights = batch["sample_mask"].float()
        mask = mask * (row_weights if mask.dim() == 1 else row_weights[:, None])
    return mask * batch["loss_mask"].float() if "loss_mask" in batch and mask.dim() > 1 else mask


# ---- metrics --------------------------------------------------------------------------------------------------------


class WeightedMean(Metric):
    """Weighted mean; NaN if the weights sum to 0. NaN values are not dropped."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        """Create the sums of weighted values and of weights."""
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add values and their weights, both of the same shape."""
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, []."""
        return self.total / self.weight


class Perplexity(WeightedMean):
    """exp of the weighted mean loss of tokens."""

    def compute(self) -> Tensor:
        """Return the perplexity, []."""
        return torch.exp(super().compute())


def vocab_parallel_argmax(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Argmax over the vocabulary; of several largest logits the first, as ``argmax`` of the full logits.

    Collective over ``tp_group``: two all-reduces of one value per position.

    Args:
        logits: [..., v/tp], this rank's shard; vocabulary padding is -inf.
        tp_group: The tensor-parallel group.

    Returns:
        Token ids, [...] int64, the same on every rank of the group.
    """
    largest, token = logits.float().max(dim=-1)
    token = token + dist.get_rank(tp_group) * logits.shape[-1]
    if dist.get_world_size(tp_group) == 1:
        return token
    shard_largest = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    token = token.masked_fill(shard_largest < largest, torch.iinfo(token.dtype).max)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    return token


# ---- checks on the host: an error names the key, the position, the value, the rule and the fix -----------------------


def rename_keys(
    batch: Batch,
    known: Collection[str],
    required: Mapping[str, str],
    user: str,
    aliases: Mapping[str, str] | None = None,
) -> Batch:
    """Rename a batch's keys from aliases to known names, and check that none is unknown, missing or duplicate.

    Args:
        batch: By the user's names.
        known: Known names.
        required: Required names, with a hint that is appended to the error if one is missing.
        user: Name of the train step, for errors.
        aliases: Alias of each known name that has one.

    Raises:
        DataError: With the key, and the alternatives.
    """
    names = {
        **{name: name for name in known},
        **{alias: n for alias, n in (aliases or {}).items() if n in known},
    }
    keys: dict[str, str] = {}
    for key in batch:
        if key not in names:
            raise DataError(
                f"batch key {key!r} is not understood by {user}; use {', '.join(sorted(names))}, or prepare_batch"
            )
        if names[key] in keys:
            raise DataError(
                f"batch keys {keys[names[key]]!r} and {key!r} mean the same; leave one of them out"
            )
        keys[names[key]] = key
    for name, hint in required.items():
        if name not in keys:
            raise DataError(
                f"batch keys {', '.join(sorted(batch))} have no {name!r}, which {user} needs; add it{hint}"
            )
    return {name: batch[key] for name, key in keys.items()}


def check_values(name: str, values: Tensor, is_valid: Tensor, rule: str) -> None:
    """Raise unless all ``values`` are valid.

    Args:
        name: The batch's key.
        values: Of any shape.
        is_valid: Bool, of the same shape.
        rule: Condition for valid values, for the error.

    Raises:
        DataError: With the first invalid value, and the rule.
    """
    if not is_valid.all():
        index = (~is_valid).nonzero()[0].tolist()
        raise DataError(
            f"{name}{index} is {values[tuple(index)].item()} and must be {rule}; correct the data"
        )


def check_range(
    name: str, values: Tensor, limit: int | None, rule: str, ignored: tuple[int, ...] = ()
) -> None:
    """Raise unless all ``values`` are in 0..limit-1 or in ``ignored``.

    Args:
        name: The batch's key.
        values: Integers of any shape.
        limit: Exclusive upper bound; None for no limit.
        rule: Name of the limit, e.g. ``vocab_size``.
        ignored: Labels for "no target here".

    Raises:
        DataError: With the first value out of range.
    """
    is_valid = values >= 0 if limit is None else (values >= 0) & (values < limit)
    if ignored:
        is_valid |= torch.isin(values, torch.tensor(ignored, dtype=values.dtype))
    allowed = "at least 0" if limit is None else f"in 0..{limit - 1} ({rule}={limit})"
    check_values(
        name, values, is_valid, f"{allowed}, or -100 for no target" if ignored else allowed
    )


def check_shape(name: str, tensor: Tensor, rule: str, *shapes: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has one of ``shapes``.

    Raises:
        DataError: With its shape, the expected ones and the rule.
    """
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise DataError(
            f"{name} has the shape {list(tensor.shape)} and must have {expected} ({rule}); correct it"
        )


def check_integers(name: str, tensor: Tensor, rule: str, *shapes: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has an integer dtype and, if given, one of ``shapes``.

    Raises:
        DataError: With the dtype or the shape, and the rule.
    """
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        raise DataError(
            f"{name} is {tensor.dtype} and must be an integer type ({rule}); use {name}.long()"
        )
    if shapes:
        check_shape(name, tensor, rule, *shapes)


def check_tokens(
    name: str,
    tokens: Tensor,
    model: ModelConfig,
    *,
    shortest: int = 1,
    ignored: tuple[int, ...] = (),
) -> None:
    """Raise unless ``tokens`` are rows of token ids that fit the model's vocabulary and maximum length.

    Args:
        name: The batch's key.
        tokens: The batch's tensor.
        model: The model's config.
        shortest: Minimum row length; the last ``shortest - 1`` tokens of a row are targets only.
        ignored: As for ``check_range``.

    Raises:
        DataError: If the shape, the dtype, a token or the length is wrong.
    """
    if tokens.dim() != 2 or tokens.shape[1] < shortest:
        raise DataError(
            f"{name}: expected [rows, tokens >= {shortest}], got shape {list(tokens.shape)}; correct it"
        )
    check_integers(name, tokens, "token ids")
    check_range(name, tokens, model.vocab_size, "vocab_size", ignored)
    length, limit = tokens.shape[1] - shortest + 1, model.max_position_embeddings
    if model.has_position_table and length > limit:
        raise DataError(
            f"{name}: expected at most max_position_embeddings={limit} tokens, got {length}; truncate them"
        )


def check_token_inputs(batch: Batch, rows: int, length: int, model: ModelConfig) -> None:
    """Check the inputs of GPT and BERT other than tokens: attention mask, positions, token types, and loss weights.

    Raises:
        DataError: If one has a different shape than the tokens, or a value out of range.
    """
    for name in ("attention_mask", "position_ids", "token_type_ids", "loss_mask"):
        if name in batch:
            check_shape(name, batch[name], "one value per input token", (rows, length))
    if "sample_mask" in batch:
        check_shape("sample_mask", batch["sample_mask"], "one weight per row", (rows,))
    positions = model.max_position_embeddings if model.has_position_table else None
    limits = {
        "position_ids": (positions, "max_position_embeddings"),
        "token_type_ids": (max(model.num_tokentypes, 1), "type_vocab_size"),
    }
    for name, (limit, rule) in limits.items():
        if name in batch:
            check_integers(name, batch[name], "they index an embedding table")
            check_range(name, batch[name], limit, rule)
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        check_range("attention_mask", mask, None, "")
        if not torch.equal(mask.long().to(mask.dtype), mask):
            raise DataError(
                "attention_mask: expected integers, got fractions; use 0 for padding, else segment numbers"
            )
