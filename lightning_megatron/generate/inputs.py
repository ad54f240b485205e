"""Rows of tokens that a model continues or gives logits of: taken from texts, calls and batches, checked, and laid out.

Also what tells how texts end: a model's special tokens, and stop strings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.convert.hugging_face import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.generate.options import GenerationOptions, options_from
from lightning_megatron.generate.pipeline import ModelInputs
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import bert, t5
from lightning_megatron.steps.base import Batch, check_token_inputs, check_tokens

if TYPE_CHECKING:
    from transformers import StopStringCriteria

_MEGATRON_NAMES = {"bert": bert.MEGATRON_NAMES, "gpt": {"text": "input_ids"}, "t5": t5.MEGATRON_NAMES}
"""What Megatron's samples call what Hugging Face calls otherwise, by architecture."""

_READ = {
    "bert": ("input_ids", "attention_mask", "token_type_ids", "position_ids"),
    "gpt": ("input_ids", "attention_mask", "position_ids"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


def inputs_from_batch(batch: Mapping[str, Tensor], model: ModelConfig, *, for_generation: bool) -> Batch:
    """What ``model`` reads of a batch, by Hugging Face's names, without the rows that fill it up (``sample_mask`` 0).

    Megatron's samples (``text``, ``text_enc``, ...) are read as in training. Without ``decoder_input_ids`` a T5's
    decoder reads the labels shifted to the right by one; where prompts are continued, what it is given to learn from
    answers them: with ``labels`` in the batch its rows are left out.

    Args:
        batch: Of any key; those that say nothing about what is read are ignored.
        model: What reads it.
        for_generation: Whether these are prompts (a GPT's go by Hugging Face's names only) rather than whole rows.

    Raises:
        DataError: If there are no tokens.
    """
    names, read = _MEGATRON_NAMES[model.architecture], _READ[model.architecture]
    if for_generation:
        names = names if model.architecture == "t5" else {}
        read = tuple(x for x in read if x != "position_ids" and ("labels" not in batch or not x.startswith("decoder")))
    names = {**names, **{name: name for name in read}}
    found = {ours: batch[theirs] for theirs, ours in names.items() if theirs in batch and ours in read}
    if "input_ids" not in found:
        what = "which predict continues" if for_generation else "which logits are of"
        megatrons = " (or 'text_enc')" if model.architecture == "t5" else ""
        raise DataError(f"batch keys {', '.join(sorted(batch))} have no 'input_ids'{megatrons}, {what}; add them")
    if not for_generation and model.architecture == "gpt" and "text" in batch:
        found["input_ids"] = batch["text"][:, :-1].clamp(min=0)
    if model.architecture == "t5":
        if not for_generation and "decoder_input_ids" not in found:
            if "labels" not in batch:
                raise DataError(f"batch: expected 'decoder_input_ids' or 'labels', got {', '.join(sorted(batch))}")
            found["decoder_input_ids"] = t5.shift_right(batch["labels"].long(), model)
        found = {name: t5.visible_keys(x) if name.endswith("mask") else x for name, x in found.items()}
    if "sample_mask" in batch:
        found = {name: tensor[batch["sample_mask"] != 0] for name, tensor in found.items()}
    return found


# ---- what is asked, checked on the host ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    """Prompts as a model reads them, and what decides about the tokens behind them; the same on all ranks."""

    prefix: Tensor
    """[b, s], int64: what the new tokens stand behind in the result."""
    prompts: ModelInputs
    """The rows, or those of one copy of the model."""
    options: GenerationOptions
    """As given; what a model has a say in follows."""
    min_new_tokens: int
    """New tokens of a row before one that ends texts is chosen, or a stop sequence ends it."""
    max_new_tokens: int
    """New tokens of a row."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a row."""
    pad_token_id: int
    """What stands behind the end of a row."""
    vocab_size: int
    """Without padding."""
    stop_strings: StopStringCriteria | None
    """What finds the texts that end rows."""
    samples: bool
    """Whether tokens are drawn."""
    can_end: bool
    """Whether a row can end before it is full."""


def build_request(
    given: Batch,
    arguments: Mapping[str, Any],
    model: ModelConfig,
    ends: SpecialTokens | None = None,
    on_tokens: object = None,
) -> Request:
    """What ``generate`` is asked, if the model can do it; reads the tensors, which should be on the host.

    Args:
        given: Prompts by Hugging Face's names. Without a mask there is no padding, except that, as in Hugging Face, a
            padding token of the model that does not end texts is padding (transformers 5.23 sees to that for GPTs only;
            a T5 shall not read padding either).
        arguments: Fields of ``GenerationOptions``; None, as in Hugging Face's generate, is what nobody has said
            anything about.
        model: What continues them.
        ends: The model's own.
        on_tokens: What shall be called with each new token, if anything.

    Raises:
        ConfigError: If an option is wrong, the tensors are no [b, s] of tokens and of 0 and 1, a prompt is empty, a
            token is not in the vocabulary, the text would outgrow the table of positions or what the options allow, or
            a model is given what its kind does not read.
    """
    options = options_from(arguments, on_tokens)
    ends = ends or SpecialTokens()
    eos = ends.eos if options.eos_token_id is None else options.eos_token_ids
    pad = ends.pad if options.pad_token_id is None else options.pad_token_id
    if "attention_mask" not in given and isinstance(given["input_ids"], Tensor) and pad is not None and pad not in eos:
        given = {**given, "attention_mask": given["input_ids"].ne(pad).long()}
    for name, (tokens, mask) in _rows_of(given, model, for_generation=True).items():
        if mask is not None:
            if empty := (mask.sum(-1) == 0).nonzero().flatten().tolist():
                raise ConfigError(f"the prompts {empty} are empty ({name} have padding only); give each a token")
            tokens = tokens.masked_fill(mask == 0, 0)
        _check_in_vocabulary(name, tokens, model)
    for run in ((options.bos_token_id or 0,), *options.stop_sequences):
        _check_in_vocabulary("bos_token_id or stop_sequences", torch.tensor(run), model)
    strings = stop_strings(options.stop_texts, options.tokenizer, model.vocab_size) if options.stop_texts else None
    start = model.decoder_start_token_id if ends.start is None else ends.start
    prefix, prompts = _beginnings(given, options.bos_token_id, start, model)
    limit = model.max_position_embeddings if model.has_position_table else None
    fewest, most = options.new_token_limits(prefix.shape[1], prompts.longest, limit)
    return Request(
        prefix=prefix,
        prompts=prompts,
        options=options,
        min_new_tokens=fewest,
        max_new_tokens=most,
        eos_token_ids=eos,
        pad_token_id=next((token for token in (pad, *eos) if token is not None), 0),
        vocab_size=model.vocab_size,
        stop_strings=strings,
        samples=options.samples,
        can_end=bool(eos or options.stop_sequences or strings),
    )


def _beginnings(given: Batch, bos: int | None, start: int, model: ModelConfig) -> tuple[Tensor, ModelInputs]:
    """What new tokens stand behind, [b, s], and the rows as the model reads them.

    As in Hugging Face's ``generate``, ``start`` is put before what a T5's decoder continues if no row begins with it.
    """
    if model.architecture != "t5":
        before, mask = given["input_ids"].long(), given.get("attention_mask")
        if bos is not None:
            before, mask = prepend_token(before, mask, bos)
        return before, aligned(before, mask)
    if bos is not None:
        raise ConfigError(f"bos_token_id={bos} is for texts that are continued; give decoder_input_ids")
    first, mask = torch.full((len(given["input_ids"]), 1), start), given.get("decoder_attention_mask")
    before = given.get("decoder_input_ids", first).long()
    if bool((before[:, 0] != start).all()):
        before = torch.cat((first, before), dim=-1)
        mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), dim=-1)
    # Padding of the source need not be a token of the vocabulary either.
    source, source_mask = given["input_ids"].long(), given.get("attention_mask")
    if source_mask is None or bool(source_mask.all()):
        return before, replace(aligned(before, mask), source=source)
    source_mask = source_mask.long()
    return before, replace(aligned(before, mask), source=source * source_mask, source_mask=source_mask)


def check_rows(given: Batch, model: ModelConfig) -> None:
    """Refuse rows that a model cannot read of which logits are asked. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: With the name, the value, the rule and the fix.
    """
    for name, (tokens, _) in _rows_of(given, model, for_generation=False).items():
        check_tokens(name, tokens, model)  # padding is looked up, too
    check_token_inputs(given, len(given["input_ids"]), given["input_ids"].shape[1], model)


def _rows_of(given: Batch, model: ModelConfig, *, for_generation: bool) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Tokens by their name, with their mask or None for no padding.

    Raises:
        ConfigError: If the model does not read what is given, tokens are no [b, s] of integers, or a mask is no [b, s]
            of 0 and 1, or of numbers of segments where a GPT's rows are only read.
    """
    for name in given:
        if name not in _READ[model.architecture]:
            raise ConfigError(f"{name} are nothing that {model.family} reads; leave them out")
    needs_decoder = "decoder_attention_mask" in given or (model.architecture == "t5" and not for_generation)
    if needs_decoder and "decoder_input_ids" not in given:
        raise ConfigError(f"{model.family} needs decoder_input_ids here, what its decoder reads; give them")
    has_segments = model.architecture == "gpt" and not for_generation
    rows = {}
    for name in [each for each in given if each.endswith("input_ids")]:
        tokens, mask_name = given[name], name.replace("input_ids", "attention_mask")
        is_whole = isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.dtype != torch.bool
        if not is_whole or tokens.dim() != 2 or tokens.numel() == 0:
            raise ConfigError(f"{name}: expected a tensor of integers, [prompts, tokens], got {_kind(tokens)}")
        mask: Any = given.get(mask_name)
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape):
            raise ConfigError(f"{mask_name}: expected the shape {list(tokens.shape)} of {name}, got {_kind(mask)}")
        if mask is not None and not has_segments and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigError(f"{mask_name}: expected 1 for tokens and 0 for padding, got other numbers")
        rows[name] = (tokens, mask)
    if "decoder_input_ids" in rows:
        expected, got = len(given["input_ids"]), len(rows["decoder_input_ids"][0])
        if expected != got:
            raise ConfigError(f"decoder_input_ids: expected {expected} rows, as input_ids have, got {got}")
    return rows


def _check_in_vocabulary(name: str, tokens: Tensor, model: ModelConfig) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= model.vocab_size)].tolist()
    if wrong:
        raise ConfigError(f"{name}: expected tokens of the vocabulary, 0 to {model.vocab_size - 1}, got {wrong[0]}")


def _kind(thing: object) -> str:
    return f"{thing.dtype} {list(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"


# ---- layout ----------------------------------------------------------------------------------------------------------


def whole_rows(given: Batch) -> ModelInputs:
    """Rows of which logits are asked, as a model without a cache reads them."""
    has_source, positions = "decoder_input_ids" in given, given.get("position_ids")
    tokens = given["decoder_input_ids" if has_source else "input_ids"]
    return ModelInputs(
        tokens=tokens,
        positions=positions,
        mask=given.get("decoder_attention_mask" if has_source else "attention_mask"),
        longest=tokens.shape[1] if positions is None else int(positions.max()) + 1,
        source=given["input_ids"] if has_source else None,
        source_mask=given.get("attention_mask") if has_source else None,
        token_types=given.get("token_type_ids"),
    )


def aligned(input_ids: Tensor, attention_mask: Tensor | None) -> ModelInputs:
    """Prompts as the model reads them, wherever their padding was: it goes to the left, and positions count from 0.

    All rows then end at the same place, so that each new token of all rows has one place in the cache.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
    """
    tokens = input_ids.long()
    mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
    lengths = mask.sum(-1)
    longest, shortest = int(lengths.max()), int(lengths.min())
    # What stands for padding need not be a token of the vocabulary, and the embedding is asked for it.
    tokens, mask = (each[:, -longest:] for each in _padded_left(tokens * mask, mask))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return ModelInputs(tokens=tokens, positions=positions, mask=mask if shortest < longest else None, longest=longest)


def _padded_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=-1, stable=True)
    return tokens.gather(-1, order), mask.gather(-1, order)


def prepend_token(input_ids: Tensor, attention_mask: Tensor | None, token: int) -> tuple[Tensor, Tensor]:
    """The rows with ``token`` before the first of their own, if not all of them begin with it already, and their mask.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding on any side; None for no padding.
        token: What texts begin with.

    Returns:
        Tokens and mask, [b, s + 1] with the padding on the left, of which a row that begins with ``token`` has one
        more; or [b, s] as given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    begins = input_ids.gather(-1, mask.argmax(dim=-1, keepdim=True)) == token
    if bool(begins.all()):
        return input_ids, mask
    tokens = torch.cat((torch.full_like(input_ids[:, :1], token), input_ids), dim=-1)
    return _padded_left(tokens, torch.cat(((~begins).to(mask.dtype), mask), dim=-1))


# ---- texts -----------------------------------------------------------------------------------------------------------


def encode_prompts(texts: Sequence[str], tokenizer: Any, *, add_bos: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask of the texts, [b, s] each, with padding on the left.

    Args:
        texts: One or more.
        tokenizer: Of transformers; the special tokens that it adds itself are among the tokens.
        add_bos: Whether each text shall begin with the tokenizer's first token.

    Raises:
        ConfigError: If a text has no token, or the tokenizer no first token.
    """
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise ConfigError("the tokenizer has no first token of texts (bos_token) to put before prompts; leave it out")
    rows: list[list[int]] = [tokenizer.encode(text) for text in texts]
    if add_bos:
        rows = [row if row[:1] == [bos] else [bos, *row] for row in rows]
    for text, row in zip(texts, rows, strict=True):
        if not row:
            raise ConfigError(f"the prompt {text!r} has no token to continue; give it text, or --add-bos")
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    return padded([torch.tensor(row) for row in rows]), padded([torch.ones(len(row), dtype=torch.long) for row in rows])


def decode_completion(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the tokens ``new`` as it reads behind ``prompt``: the space between words is often the latter's."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return whole[len(before) :]


def decode_completions(
    tokenizer: Any, written: Tensor, input_ids: Tensor, attention_mask: Tensor | None, *, is_t5: bool = False
) -> list[str]:
    """What was written to each prompt, special tokens left out.

    Args:
        tokenizer: Of transformers.
        written: What ``generate`` returned, [b * n, s + new]: n texts of each prompt.
        input_ids: The prompts that it was given, [b, s].
        attention_mask: [b, s]; None for no padding.
        is_t5: Whether it is the decoder of a T5 that has written: [b * n, 1 + new], without the prompts.
    """
    if is_t5:
        texts: list[str] = tokenizer.batch_decode(written[:, 1:], skip_special_tokens=True)
        return texts
    copies, width = len(written) // len(input_ids), input_ids.shape[1]
    masks = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
    return [
        decode_completion(tokenizer, row[:width][masks[index // copies]].tolist(), row[width:].tolist())
        for index, row in enumerate(written.cpu())
    ]


# ---- special tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """What a model's own files say about the ends of a text."""

    eos: tuple[int, ...] = ()
    """Tokens that end it."""
    pad: int | None = None
    """What fills rows that ended before others."""
    start: int | None = None
    """What a decoder apart from an encoder reads first; None if only the model's config says so."""


def special_tokens(model: HFConfigLike) -> SpecialTokens:
    """Those that Hugging Face's ``generate`` takes where a call names none.

    They are those of ``generation_config.json``, or without that file those of the config.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is no JSON object.
    """
    file = Path(model) / GENERATION_CONFIG_FILE if isinstance(model, (str, Path)) else None
    start: int | None = None
    if file is not None and file.is_file():
        fields = read_json(file)
        # In Hugging Face's order of precedence (transformers 5.23, generation/utils.py, _prepare_special_tokens).
        start = fields.get("decoder_start_token_id")
        start = fields.get("bos_token_id") if start is None else start
    else:
        fields = {name: getattr(config_object(model), name, None) for name in ("eos_token_id", "pad_token_id")}
    eos = fields.get("eos_token_id")
    several = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return SpecialTokens(eos=several, pad=fields.get("pad_token_id"), start=start)


# ---- stop strings ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _criteria(strings: tuple[str, ...], tokenizer: Any, size: int) -> StopStringCriteria:
    """Takes a second or two for 128,000 tokens; ``size`` changes when tokens are added."""
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ConfigError(f"stop_strings={strings!r} can be written with no token of the tokenizer") from error


def stop_strings(strings: Sequence[str], tokenizer: Any, vocab_size: int) -> StopStringCriteria:
    """What says of rows of tokens whether their last token completes one of the texts, however they are spelled.

    It works with tensors alone: the device never waits for the host. It asks about the last ``maximum_token_len``
    tokens of a row, one for each letter of the longest text. The last row of its ``embedding_vec``, [vocabulary, n]
    int32, stands for no token at all.

    Args:
        strings: The texts.
        tokenizer: Of transformers, or the folder of one.
        vocab_size: Of the model.

    Raises:
        ConfigError: If the tokenizer is none, is another model's, or knows no token that could end one of the texts.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        tokenizer = _loaded(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"stop_strings: expected a tokenizer of transformers or its folder, got {tokenizer!r}")
    check_vocabulary(tokenizer, tokenizer.name_or_path, vocab_size)
    return _criteria(tuple(strings), tokenizer, len(tokenizer))


_loaded = functools.lru_cache(maxsize=4)(load_tokenizer)
