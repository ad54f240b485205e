"""Checks of a batch on the host: an error names the key, the position, the value, the rule and the fix."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_megatron.engine.objective import Batch
from lightning_megatron.errors import DataError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.rank_zero import rank_zero_warn


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
    names = {name: name for name in known}
    for alias, name in (aliases or {}).items():
        if name in known:
            names[alias] = name
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


def check_values(
    name: str,
    values: Tensor,
    is_valid: Tensor,
    rule: str,
) -> None:
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
    name: str,
    values: Tensor,
    limit: int | None,
    rule: str,
    ignored: tuple[int, ...] = (),
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
    is_valid = values >= 0
    allowed = "at least 0"
    if limit is not None:
        is_valid &= values < limit
        allowed = f"in 0..{limit - 1} ({rule}={limit})"
    if ignored:
        is_valid |= torch.isin(values, torch.tensor(ignored, dtype=values.dtype))
        allowed += ", or -100 for no target"
    check_values(name, values, is_valid, allowed)


def check_weights(name: str, weights: Tensor) -> None:
    """Raise unless ``weights`` can weight losses, whose sum is divided by theirs.

    Raises:
        DataError: With the first one that is negative or not finite.
    """
    is_valid = weights >= 0
    if weights.is_floating_point():
        is_valid &= weights.isfinite()
    check_values(name, weights, is_valid, "a weight, finite and at least 0")


def check_shape(
    name: str,
    tensor: Tensor,
    rule: str,
    *shapes: tuple[int, ...],
) -> None:
    """Raise unless ``tensor`` has one of ``shapes``.

    Raises:
        DataError: With its shape, the expected ones and the rule.
    """
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise DataError(
            f"{name} has the shape {list(tensor.shape)} and must have {expected} ({rule}); correct it"
        )


def check_integers(
    name: str,
    tensor: Tensor,
    rule: str,
    *shapes: tuple[int, ...],
) -> None:
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
    length = tokens.shape[1] - shortest + 1
    limit = model.max_position_embeddings
    if model.has_position_table and length > limit:
        raise DataError(
            f"{name}: expected at most max_position_embeddings={limit} tokens, got {length}; truncate them"
        )


def check_rows_have_tokens(
    name: str,
    mask: Tensor,
    sample_mask: Tensor | None,
) -> None:
    """Raise if a row that counts is all padding, so that it has no last token.

    Args:
        name: The batch's key of the mask.
        mask: [b, s], 0 for padding.
        sample_mask: [b], 0 for rows that do not count; None if all count.

    Raises:
        DataError: With the first such row.
    """
    is_empty = (mask == 0).all(dim=1)
    if sample_mask is not None:
        is_empty &= sample_mask != 0
    if is_empty.any():
        raise DataError(
            f"{name}[{int(is_empty.nonzero()[0])}] is 0 everywhere, and the head reads the last token of a row; leave "
            "empty rows out"
        )


def check_token_inputs(
    batch: Batch,
    rows: int,
    length: int,
    model: ModelConfig,
) -> None:
    """Check the inputs of GPT and BERT other than tokens: attention mask, positions, token types, and loss weights.

    Raises:
        DataError: If one has a different shape than the tokens, or a value out of range.
    """
    for name in ("attention_mask", "position_ids", "token_type_ids", "loss_mask"):
        if name in batch:
            check_shape(name, batch[name], "one value per input token", (rows, length))
    if "loss_mask" in batch:
        check_weights("loss_mask", batch["loss_mask"])
    if "sample_mask" in batch:
        check_shape("sample_mask", batch["sample_mask"], "one weight per row", (rows,))
        check_weights("sample_mask", batch["sample_mask"])
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
        if model.linear_attention is not None:
            _check_segments_are_runs(mask, model)


def warn_of_padding_that_predicts(batch: Batch, is_target: Tensor) -> None:
    """Warn once of losses at padding: there hidden states have no meaning, and are other than those of transformers.

    Args:
        batch: By Hugging Face's names.
        is_target: [b, s] bool, by the position that predicts.
    """
    if "attention_mask" not in batch:
        return
    at_padding = is_target & (batch["attention_mask"] == 0)
    if "loss_mask" in batch:
        at_padding &= batch["loss_mask"] != 0
    if bool(at_padding.any()):
        rank_zero_warn(
            "labels: expected -100 where padding (attention_mask 0) would predict them, got targets: they count in the "
            "loss, with other values than in transformers; set them to -100"
        )


def drop_without_effect(batch: Batch) -> None:
    """Remove positions 0, 1, 2, ... and a mask of ones from a GPT's batch: attention without a mask is faster.

    The mask stays beside other positions, as it says that they begin no segments.
    """
    mask = batch.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        return
    positions = batch.get("position_ids")
    if positions is not None and bool((positions == torch.arange(positions.shape[1])).all()):
        del batch["position_ids"]
    if mask is not None and "position_ids" not in batch:
        del batch["attention_mask"]


def _check_segments_are_runs(mask: Tensor, model: ModelConfig) -> None:
    """Check that no segment of a row goes on after another one, as a state cannot go back to it.

    Args:
        mask: [b, s], segment numbers; padding, 0, may be anywhere.
        model: The model, for the message.

    Raises:
        DataError: With the first such row.
    """
    if not bool((mask > 1).any()):
        return
    for number, row in enumerate(mask):
        tokens = row[row != 0]
        runs = torch.unique_consecutive(tokens)
        if len(runs) != len(torch.unique(tokens)):
            raise DataError(
                f"attention_mask[{number}]: expected each segment's tokens one after the other for a {model.family} "
                "model, whose linear attention reads a row from its first token to its last, got a segment that goes "
                "on after another; sort the row by segment"
            )
