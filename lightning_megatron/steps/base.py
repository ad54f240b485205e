"""What the objectives share: sums over targets, metrics weighed by them, and checks of a batch's numbers."""

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
    """The term of losses and their weights, both of any one shape."""
    return LossTerm((losses.float() * weights).sum(), weights.sum())


def target_weights(mask: Tensor, batch: Batch) -> Tensor:
    """``mask`` of targets, [b] or [b, n], times the weights of rows and of tokens that the user's batch has; fp32."""
    mask = mask.float()
    if "sample_mask" in batch:
        rows = batch["sample_mask"].float()
        mask = mask * (rows if mask.dim() == 1 else rows[:, None])
    return mask * batch["loss_mask"].float() if "loss_mask" in batch and mask.dim() > 1 else mask


# ---- metrics --------------------------------------------------------------------------------------------------------


class WeightedMean(Metric):
    """The mean of values by their weights, NaN if nothing has any; a NaN among the values is not dropped."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Take in values and their weights, both of any one shape."""
        self.total += (values * weights).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """[]: the mean."""
        return self.total / self.weight


class Perplexity(WeightedMean):
    """exp of the mean loss over all tokens with a weight."""

    def compute(self) -> Tensor:
        """[]: the perplexity."""
        return torch.exp(super().compute())


def vocab_parallel_argmax(logits: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """The token with the largest logit, of several the first, as ``argmax`` over the whole vocabulary finds it.

    Every rank of ``tp_group`` must call; two numbers a position travel.

    Args:
        logits: [..., v/tp], this rank's shard; padding of the vocabulary is -inf.
        tp_group: The TP group.

    Returns:
        [...], int64, the same on every rank of the group.
    """
    largest, token = logits.float().max(dim=-1)
    token = token + dist.get_rank(tp_group) * logits.shape[-1]
    if dist.get_world_size(tp_group) == 1:
        return token
    largest_of_shard = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    token = token.masked_fill(largest_of_shard < largest, torch.iinfo(token.dtype).max)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=tp_group)
    return token


# ---- checks on the host: an error names the key, the place, the value, the rule and the fix --------------------------


def rename_keys(
    batch: Batch,
    known: Collection[str],
    needed: Mapping[str, str],
    user: str,
    aliases: Mapping[str, str] | None = None,
) -> Batch:
    """The batch by the names that are understood; raise unless it has what is needed, nothing else, and nothing twice.

    Args:
        batch: By the user's names.
        known: Names that are understood.
        needed: Names that must be there, with what an error adds that says that one is not.
        user: Who understands them, for the error.
        aliases: Other names for known ones.

    Raises:
        DataError: With the key, and what else there is.
    """
    names = {**{name: name for name in known}, **{alias: n for alias, n in (aliases or {}).items() if n in known}}
    found: dict[str, str] = {}
    for key in batch:
        if key not in names:
            raise DataError(
                f"batch key {key!r} is not understood by {user}; use {', '.join(sorted(names))}, or prepare_batch"
            )
        if names[key] in found:
            raise DataError(f"batch keys {found[names[key]]!r} and {key!r} mean the same; leave one of them out")
        found[names[key]] = key
    for name, hint in needed.items():
        if name not in found:
            raise DataError(f"batch keys {', '.join(sorted(batch))} have no {name!r}, which {user} needs; add it{hint}")
    return {name: batch[key] for name, key in found.items()}


def check_values(name: str, values: Tensor, right: Tensor, rule: str) -> None:
    """Raise unless all ``values`` are ``right``, a bool tensor of their shape.

    Raises:
        DataError: With the first number that is not, and the rule.
    """
    if not right.all():
        place = (~right).nonzero()[0].tolist()
        raise DataError(f"{name}{place} is {values[tuple(place)].item()} and must be {rule}; correct the data")


def check_range(name: str, values: Tensor, limit: int | None, rule: str, ignored: tuple[int, ...] = ()) -> None:
    """Raise unless all ``values`` are at least 0 and below ``limit``, or ``ignored`` ones.

    Args:
        name: The batch's key.
        values: Of any shape, integers.
        limit: Smallest number that is too large; None for no limit.
        rule: What sets the limit, e.g. ``vocab_size``.
        ignored: Labels for "no target here".

    Raises:
        DataError: With the first number that is out of range.
    """
    right = values >= 0 if limit is None else (values >= 0) & (values < limit)
    if ignored:
        right |= torch.isin(values, torch.tensor(ignored, dtype=values.dtype))
    allowed = "at least 0" if limit is None else f"in 0..{limit - 1} ({rule}={limit})"
    check_values(name, values, right, f"{allowed}, or -100 for no target" if ignored else allowed)


def check_shape(name: str, tensor: Tensor, rule: str, *shapes: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has one of ``shapes``.

    Raises:
        DataError: With its shape, the right ones and what sets them.
    """
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(list(each)) for each in shapes)
        raise DataError(f"{name} has the shape {list(tensor.shape)} and must have {expected} ({rule}); correct it")


def check_integers(name: str, tensor: Tensor, rule: str, *shapes: tuple[int, ...]) -> None:
    """Raise unless ``tensor`` has an integer dtype, and one of ``shapes`` if there are any.

    Raises:
        DataError: With the dtype, or the shape, and why it must be another one.
    """
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        raise DataError(f"{name} is {tensor.dtype} and must be an integer type ({rule}); use {name}.long()")
    if shapes:
        check_shape(name, tensor, rule, *shapes)


def check_tokens(
    name: str, tokens: Tensor, model: ModelConfig, *, shortest: int = 1, ignored: tuple[int, ...] = ()
) -> None:
    """Raise unless ``tokens`` are rows of the vocabulary's numbers, as long as the model can read.

    Args:
        name: The batch's key.
        tokens: What is there.
        model: Knows the vocabulary and the longest row.
        shortest: Tokens that a row must have; all but that many less one are read.
        ignored: As for ``check_range``.
    """
    if tokens.dim() != 2 or tokens.shape[1] < shortest:
        raise DataError(f"{name} has the shape {list(tokens.shape)}; give [rows, tokens], at least {shortest} each")
    check_integers(name, tokens, "they number rows of the embedding")
    check_range(name, tokens, model.vocab_size, "vocab_size", ignored)
    length, limit = tokens.shape[1] - shortest + 1, model.max_position_embeddings
    if model.has_position_table and length > limit:
        raise DataError(f"{name} has {length} tokens per row to read, max_position_embeddings={limit}; cut them")


def check_token_inputs(batch: Batch, rows: int, length: int, model: ModelConfig) -> None:
    """Check what stands beside the tokens of GPT and BERT: mask or segments, positions, types, and weights.

    Raises:
        DataError: If one has another shape than the tokens, or a number out of range.
    """
    for name in ("attention_mask", "position_ids", "token_type_ids", "loss_mask"):
        if name in batch:
            check_shape(name, batch[name], "one number for each token that the model reads", (rows, length))
    if "sample_mask" in batch:
        check_shape("sample_mask", batch["sample_mask"], "one weight per row", (rows,))
    positions = model.max_position_embeddings if model.has_position_table else None
    limits = {
        "position_ids": (positions, "max_position_embeddings"),
        "token_type_ids": (max(model.num_tokentypes, 1), "type_vocab_size"),
    }
    for name, (limit, rule) in limits.items():
        if name in batch:
            check_integers(name, batch[name], "they number rows of a table")
            check_range(name, batch[name], limit, rule)
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        check_range("attention_mask", mask, None, "")
        if not torch.equal(mask.long().to(mask.dtype), mask):
            raise DataError("attention_mask has fractions; give 1 for tokens and 0 for padding, or segments' numbers")
