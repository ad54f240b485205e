"""Inputs of generation and logits: prompts and rows from texts, calls and batches, checked and laid out.

Also a model's special tokens, and stop strings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.convert.companions import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.data.tokenizer_files import panics_as_errors
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.generate.options import GenerationOptions, options_from
from lightning_megatron.generate.pipeline import ModelInputs
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import bert, t5
from lightning_megatron.steps.base import Batch
from lightning_megatron.steps.batch_checks import check_token_inputs, check_tokens

if TYPE_CHECKING:
    from transformers import StopStringCriteria

_MEGATRON_NAMES = {
    "bert": bert.MEGATRON_NAMES,
    "gpt": {"text": "input_ids"},
    "t5": t5.MEGATRON_NAMES,
}
"""Hugging Face's names for the keys of Megatron's samples, by architecture."""

_INPUT_NAMES = {
    "bert": ("input_ids", "attention_mask", "token_type_ids", "position_ids"),
    "gpt": ("input_ids", "attention_mask", "position_ids"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


def inputs_from_batch(
    batch: Mapping[str, Tensor], model: ModelConfig, *, for_generation: bool
) -> Batch:
    """Model inputs from a batch, by Hugging Face's names, without rows that only fill it up (``sample_mask`` 0).

    Megatron's samples (``text``, ``text_enc``, ...) are read as in training. Without ``decoder_input_ids`` a T5's
    decoder reads the labels shifted to the right by one. For generation, the decoder's inputs in a batch with
    ``labels`` are answers to learn, and are left out.

    Args:
        batch: With any keys; those that are no inputs are ignored.
        model: Config of the model.
        for_generation: Whether the rows are prompts (a GPT's under Hugging Face's names only) rather than complete
            rows.

    Raises:
        DataError: If there are no tokens.
    """
    names, read = _MEGATRON_NAMES[model.architecture], _INPUT_NAMES[model.architecture]
    if for_generation:
        names = names if model.architecture == "t5" else {}
        read = tuple(
            x
            for x in read
            if x != "position_ids" and ("labels" not in batch or not x.startswith("decoder"))
        )
    names = {**names, **{name: name for name in read}}
    inputs = {name: batch[key] for key, name in names.items() if key in batch and name in read}
    if "input_ids" not in inputs:
        purpose = "prompts" if for_generation else "logits"
        or_megatron = " (or 'text_enc')" if model.architecture == "t5" else ""
        raise DataError(
            f"batch: expected 'input_ids'{or_megatron} for {purpose}, got {', '.join(sorted(batch))}"
        )
    if not for_generation and model.architecture == "gpt" and "text" in batch:
        inputs["input_ids"] = batch["text"][:, :-1].clamp(min=0)
    if model.architecture == "t5":
        if not for_generation and "decoder_input_ids" not in inputs:
            if "labels" not in batch:
                raise DataError(
                    f"batch: expected 'decoder_input_ids' or 'labels', got {', '.join(sorted(batch))}"
                )
            inputs["decoder_input_ids"] = t5.shift_right(batch["labels"].long(), model)
        inputs = {
            name: t5.visible_keys(x) if name.endswith("mask") else x for name, x in inputs.items()
        }
    if "sample_mask" in batch:
        inputs = {name: tensor[batch["sample_mask"] != 0] for name, tensor in inputs.items()}
    return inputs


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts as model inputs, and how new tokens are chosen; the same on all ranks."""

    prefix: Tensor
    """[b, s], int64: tokens that precede the new ones in the result."""
    prompts: ModelInputs
    """Model inputs of all prompts, or of one replica's."""
    options: GenerationOptions
    """As given; the fields below also depend on the model."""
    min_new_tokens: int
    """New tokens of a row before an end-of-sequence token or a stop sequence may end it."""
    max_new_tokens: int
    """Maximum number of new tokens per row."""
    eos_token_ids: tuple[int, ...]
    """End-of-sequence tokens."""
    pad_token_id: int
    """Padding token after the end of a row."""
    vocab_size: int
    """Without vocabulary padding."""
    stop_strings: StopStringCriteria | None
    """Stop criterion for stop strings; None if there are none."""
    samples: bool
    """Whether tokens are sampled."""
    can_end: bool
    """Whether rows can end before they have the maximum number of tokens."""


def build_request(
    batch: Batch,
    arguments: Mapping[str, Any],
    model: ModelConfig,
    special: SpecialTokens | None = None,
    on_tokens: object = None,
) -> Request:
    """Build the request of a ``generate`` call and check it. Reads the tensors, which should be on the host.

    Args:
        batch: Prompts by Hugging Face's names. Without a mask there is no padding, except that, as in Hugging Face, the
            model's padding token is padding if it is no end-of-sequence token (transformers 5.23 does this for GPTs
            only; a T5 shall not read padding either).
        arguments: Fields of ``GenerationOptions``; None means not given, as in Hugging Face's ``generate``.
        model: Config of the model.
        special: The model's special tokens.
        on_tokens: Callback for new tokens, if any.

    Raises:
        ConfigError: If an option is wrong, the tensors are not [b, s] of tokens and of 0 and 1, a prompt is empty, a
            token is not in the vocabulary, a sequence would outgrow the position embeddings or the options, or an input
            is not one of the model's.
    """
    options = options_from(arguments, on_tokens)
    special = special or SpecialTokens()
    eos = special.eos if options.eos_token_id is None else options.eos_token_ids
    pad = special.pad if options.pad_token_id is None else options.pad_token_id
    if (
        "attention_mask" not in batch
        and isinstance(batch["input_ids"], Tensor)
        and pad is not None
        and pad not in eos
    ):
        batch = {**batch, "attention_mask": batch["input_ids"].ne(pad).long()}
    for name, (tokens, mask) in _read_rows(batch, model, for_generation=True).items():
        if mask is not None:
            if empty := (mask.sum(-1) == 0).nonzero().flatten().tolist():
                raise ConfigError(
                    f"the prompts {empty} are empty ({name} have padding only); give each a token"
                )
            tokens = tokens.masked_fill(mask == 0, 0)
        _check_in_vocabulary(name, tokens, model)
    for sequence in ((options.bos_token_id or 0,), *options.stop_sequences):
        _check_in_vocabulary("bos_token_id or stop_sequences", torch.tensor(sequence), model)
    criterion = (
        stop_strings(options.stop_texts, options.tokenizer, model.vocab_size)
        if options.stop_texts
        else None
    )
    start = model.decoder_start_token_id if special.start is None else special.start
    prefix, prompts = _prefix_and_prompts(batch, options.bos_token_id, start, model)
    limit = model.max_position_embeddings if model.has_position_table else None
    min_new, max_new = options.new_token_limits(prefix.shape[1], prompts.longest, limit)
    _warn_beyond_trained_positions(prompts.longest, max_new, model)
    return Request(
        prefix=prefix,
        prompts=prompts,
        options=options,
        min_new_tokens=min_new,
        max_new_tokens=max_new,
        eos_token_ids=eos,
        pad_token_id=next((token for token in (pad, *eos) if token is not None), 0),
        vocab_size=model.vocab_size,
        stop_strings=criterion,
        samples=options.samples,
        can_end=bool(eos or options.stop_sequences or criterion),
    )


def _prefix_and_prompts(
    inputs: Batch, bos: int | None, start: int, model: ModelConfig
) -> tuple[Tensor, ModelInputs]:
    """Tokens that precede the new ones in the result, [b, s], and the prompts as model inputs.

    As in Hugging Face's ``generate``, ``start`` is prepended to the prompts of a T5's decoder if none begins with it.
    """
    if model.architecture != "t5":
        prefix, mask = inputs["input_ids"].long(), inputs.get("attention_mask")
        if bos is not None:
            prefix, mask = prepend_token(prefix, mask, bos)
        return prefix, left_padded(prefix, mask)
    if bos is not None:
        raise ConfigError(
            f"bos_token_id={bos} is for prompts of GPTs; give the decoder_input_ids of a T5"
        )
    start_column, mask = (
        torch.full((len(inputs["input_ids"]), 1), start),
        inputs.get("decoder_attention_mask"),
    )
    prefix = inputs.get("decoder_input_ids", start_column).long()
    if bool((prefix[:, 0] != start).all()):
        prefix = torch.cat((start_column, prefix), dim=-1)
        mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), dim=-1)
    # Padding of the source need not be in the vocabulary either.
    source, source_mask = inputs["input_ids"].long(), inputs.get("attention_mask")
    if source_mask is None or bool(source_mask.all()):
        return prefix, replace(left_padded(prefix, mask), source=source)
    source_mask = source_mask.long()
    return prefix, replace(
        left_padded(prefix, mask), source=source * source_mask, source_mask=source_mask
    )


def check_rows(inputs: Batch, model: ModelConfig) -> None:
    """Raise if the model cannot compute logits of the rows. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: With the name, the value, the rule and the fix.
    """
    for name, (tokens, _) in _read_rows(inputs, model, for_generation=False).items():
        check_tokens(name, tokens, model)  # padding is embedded, too
    check_token_inputs(inputs, len(inputs["input_ids"]), inputs["input_ids"].shape[1], model)


def _warn_beyond_trained_positions(longest: int, max_new: int, model: ModelConfig) -> None:
    """Warn once of rows longer than those that a model with rotary positions was trained on: it computes any length."""
    trained = model.max_position_embeddings
    if model.position_embedding_type != "rope" or not trained or longest + max_new <= trained:
        return
    rank_zero_warn(
        f"a prompt of {longest} tokens and max_new_tokens={max_new} go beyond the model's max_position_embeddings="
        f"{trained}: expect poor tokens from there on; use max_new_tokens of at most {max(trained - longest, 0)}, or a "
        "model for longer texts"
    )


def _read_rows(
    inputs: Batch, model: ModelConfig, *, for_generation: bool
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Check rows and return their tokens by name, each with its mask or None for no padding.

    Raises:
        ConfigError: If an input is not one of the model's, tokens are not [b, s] integers, or a mask is not [b, s] of 0
            and 1 or, for logits of a GPT, of segment numbers.
    """
    for name in inputs:
        if name not in _INPUT_NAMES[model.architecture]:
            raise ConfigError(f"{name} is no input of {model.family}; leave it out")
    needs_decoder = "decoder_attention_mask" in inputs or (
        model.architecture == "t5" and not for_generation
    )
    if needs_decoder and "decoder_input_ids" not in inputs:
        raise ConfigError(
            f"{model.family} needs decoder_input_ids here, the tokens of its decoder; give them"
        )
    has_segments = model.architecture == "gpt" and not for_generation
    rows = {}
    for name in [key for key in inputs if key.endswith("input_ids")]:
        tokens, mask_name = inputs[name], name.replace("input_ids", "attention_mask")
        is_integer = (
            isinstance(tokens, Tensor)
            and not tokens.is_floating_point()
            and tokens.dtype != torch.bool
        )
        if not is_integer or tokens.dim() != 2 or tokens.numel() == 0:
            raise ConfigError(
                f"{name}: expected a tensor of integers, [prompts, tokens], got {_describe(tokens)}"
            )
        mask: Any = inputs.get(mask_name)
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape):
            raise ConfigError(
                f"{mask_name}: expected the shape {list(tokens.shape)} of {name}, got {_describe(mask)}"
            )
        if mask is not None and not has_segments and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigError(
                f"{mask_name}: expected 1 for tokens and 0 for padding, got other values"
            )
        rows[name] = (tokens, mask)
    if "decoder_input_ids" in rows:
        expected, got = len(inputs["input_ids"]), len(rows["decoder_input_ids"][0])
        if expected != got:
            raise ConfigError(
                f"decoder_input_ids: expected {expected} rows, as input_ids have, got {got}"
            )
    return rows


def _check_in_vocabulary(name: str, tokens: Tensor, model: ModelConfig) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= model.vocab_size)].tolist()
    if wrong:
        raise ConfigError(
            f"{name}: expected tokens of the vocabulary, 0 to {model.vocab_size - 1}, got {wrong[0]}"
        )


def _describe(value: object) -> str:
    return (
        f"{value.dtype} {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


# ---- layout ----------------------------------------------------------------------------------------------------------


def inputs_for_logits(inputs: Batch) -> ModelInputs:
    """Model inputs of complete rows, for logits without KV caches."""
    has_source, positions = "decoder_input_ids" in inputs, inputs.get("position_ids")
    tokens = inputs["decoder_input_ids" if has_source else "input_ids"]
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=inputs.get("decoder_attention_mask" if has_source else "attention_mask"),
        longest=tokens.shape[1] if positions is None else int(positions.max()) + 1,
        source=inputs["input_ids"] if has_source else None,
        source_mask=inputs.get("attention_mask") if has_source else None,
        token_types=inputs.get("token_type_ids"),
    )


def left_padded(input_ids: Tensor, attention_mask: Tensor | None) -> ModelInputs:
    """Prompts as model inputs, with padding moved to the left and positions counted from 0.

    All rows then end in the same column, so that each new token of all rows has the same cache slot.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
    """
    tokens = input_ids.long()
    mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
    lengths = mask.sum(-1)
    longest, shortest = int(lengths.max()), int(lengths.min())
    # Padding need not be a token of the vocabulary, but is embedded.
    tokens, mask = (tensor[:, -longest:] for tensor in _pad_left(tokens * mask, mask))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=mask if shortest < longest else None,
        longest=longest,
    )


def _pad_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=-1, stable=True)
    return tokens.gather(-1, order), mask.gather(-1, order)


def prepend_token(
    input_ids: Tensor, attention_mask: Tensor | None, token: int
) -> tuple[Tensor, Tensor]:
    """Prepend ``token`` to the rows, unless all of them begin with it already; returns tokens and mask.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding on any side; None for no padding.
        token: Beginning-of-sequence token.

    Returns:
        Tokens and mask, [b, s + 1] with the padding on the left, one column more of it in rows that begin with
        ``token`` already; or [b, s] as given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    begins = input_ids.gather(-1, mask.argmax(dim=-1, keepdim=True)) == token
    if bool(begins.all()):
        return input_ids, mask
    tokens = torch.cat((torch.full_like(input_ids[:, :1], token), input_ids), dim=-1)
    return _pad_left(tokens, torch.cat(((~begins).to(mask.dtype), mask), dim=-1))


# ---- tokenization ----------------------------------------------------------------------------------------------------


def encode_prompts(
    texts: Sequence[str], tokenizer: Any, *, add_bos: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of prompts, [b, s] each, padded on the left.

    Args:
        texts: One or more prompts.
        tokenizer: Of transformers; the special tokens that it adds itself are included.
        add_bos: Whether to prepend the tokenizer's beginning-of-sequence token where it is missing.

    Raises:
        ConfigError: If a prompt has no tokens, or the tokenizer no beginning-of-sequence token.
    """
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise ConfigError(
            "add_bos: expected a tokenizer with a bos_token, got one without; leave it out"
        )
    with panics_as_errors(getattr(tokenizer, "name_or_path", "tokenizer")):
        rows: list[list[int]] = [tokenizer.encode(text) for text in texts]
    if add_bos:
        rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ConfigError(
                f"the prompt {text!r} has no token to continue; give it text, or --add-bos"
            )
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded([torch.tensor(row) for row in rows]), padded(
        [torch.ones(len(row), dtype=torch.long) for row in rows]
    )


def decode_completion(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the tokens ``new`` after ``prompt``; decoded alone they could lose the space before the first word."""
    prompt_text = tokenizer.decode(list(prompt), skip_special_tokens=True)
    text: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return text[len(prompt_text) :]


def decode_completions(
    tokenizer: Any,
    sequences: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    is_t5: bool = False,
) -> list[str]:
    """Text of each completion, without special tokens.

    Args:
        tokenizer: Of transformers.
        sequences: What ``generate`` returned, [b * n, s + new]: n sequences per prompt.
        input_ids: The prompts, [b, s].
        attention_mask: [b, s]; None for no padding.
        is_t5: Whether the sequences are those of a T5's decoder: [b * n, 1 + new], without the prompts.
    """
    if is_t5:
        texts: list[str] = tokenizer.batch_decode(sequences[:, 1:], skip_special_tokens=True)
        return texts
    copies, width = len(sequences) // len(input_ids), input_ids.shape[1]
    masks = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
    return [
        decode_completion(
            tokenizer, row[:width][masks[index // copies]].tolist(), row[width:].tolist()
        )
        for index, row in enumerate(sequences.cpu())
    ]


# ---- special tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """A model's special tokens for generation, as its own files define them."""

    eos: tuple[int, ...] = ()
    """End-of-sequence tokens."""
    pad: int | None = None
    """Padding token."""
    start: int | None = None
    """First token of a T5's decoder; None for that of the model's config."""


def special_tokens(model: HFConfigLike) -> SpecialTokens:
    """Special tokens that Hugging Face's ``generate`` uses by default.

    They are those of ``generation_config.json``, or without that file those of the config.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is not a JSON object.
    """
    file = Path(model) / GENERATION_CONFIG_FILE if isinstance(model, (str, Path)) else None
    start: int | None = None
    if file is not None and file.is_file():
        fields = read_json(file)
        # In Hugging Face's order of precedence (transformers 5.23, generation/utils.py, _prepare_special_tokens).
        start = fields.get("decoder_start_token_id")
        start = fields.get("bos_token_id") if start is None else start
    else:
        fields = {
            name: getattr(config_object(model), name, None)
            for name in ("eos_token_id", "pad_token_id")
        }
    eos = fields.get("eos_token_id")
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return SpecialTokens(eos=eos_token_ids, pad=fields.get("pad_token_id"), start=start)


# ---- stop strings ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _stop_criterion(strings: tuple[str, ...], tokenizer: Any, size: int) -> StopStringCriteria:
    """Stop criterion, which takes a second or two for 128,000 tokens; ``size`` changes when tokens are added."""
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ConfigError(
            f"stop_strings={strings!r} cannot be written with the tokens of the tokenizer"
        ) from error


def stop_strings(strings: Sequence[str], tokenizer: Any, vocab_size: int) -> StopStringCriteria:
    """Stop criterion that finds rows whose last token completes one of the strings, however they are tokenized.

    It works with tensors alone and does not synchronize host and device. It reads the last ``maximum_token_len`` tokens
    of a row, one for each character of the longest string. The last row of its ``embedding_vec``, [vocabulary, n]
    int32, stands for no token.

    Args:
        strings: The stop strings.
        tokenizer: Of transformers, or the directory of one.
        vocab_size: Of the model.

    Raises:
        ConfigError: If the tokenizer is not one of transformers, belongs to another model, or has no token that can end
            one of the strings.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        tokenizer = _load_tokenizer(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"stop_strings: expected a tokenizer of transformers or its directory, got {tokenizer!r}"
        )
    check_vocabulary(tokenizer, tokenizer.name_or_path, vocab_size)
    return _stop_criterion(tuple(strings), tokenizer, len(tokenizer))


_load_tokenizer = functools.lru_cache(maxsize=4)(load_tokenizer)
