"""Rows of tokens that a model continues or gives logits of: taken from texts, calls and batches, checked, and laid out.

Also what tells how texts end: a model's special tokens, and stop strings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.convert.hugging_face import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import bert, t5
from lightning_megatron.steps.base import check_beside_tokens, check_tokens

if TYPE_CHECKING:
    from transformers import StopStringCriteria

_MEGATRON_NAMES = {"bert": bert.MEGATRON_NAMES, "gpt": {"text": "input_ids"}, "t5": t5.MEGATRON_NAMES}
"""What Megatron's samples call what Hugging Face calls otherwise, by architecture."""

_READ = {
    "bert": ("input_ids", "attention_mask", "token_type_ids", "position_ids"),
    "gpt": ("input_ids", "attention_mask", "position_ids"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


class _Rows:
    """A dataclass some of whose fields are tensors with a row for each sample."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with each tensor changed."""
        tensors: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class Inputs(_Rows):
    """What a caller or a batch gives, by Hugging Face's names."""

    input_ids: Tensor
    """[b, s]."""
    attention_mask: Tensor | None = None
    """[b, s], 1 for tokens and 0 for padding on any side (logits of a GPT: also numbers of segments); None for no
    padding."""
    decoder_input_ids: Tensor | None = None
    """[b, s_dec], what the decoder of a T5 reads or continues; None for other models, or for its start token alone."""
    decoder_attention_mask: Tensor | None = None
    """[b, s_dec], 0 where the decoder shall not look; None for no padding."""
    token_type_ids: Tensor | None = None
    """[b, s], of a BERT; None for 0 everywhere."""
    position_ids: Tensor | None = None
    """[b, s]; None for 0, 1, 2, ..."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens per row of which there are logits."""
        return (self.input_ids if self.decoder_input_ids is None else self.decoder_input_ids).shape[1]

    def next_tokens(self) -> NextTokens:
        """As a model without a cache reads them."""
        if self.decoder_input_ids is not None:
            return NextTokens(
                tokens=self.decoder_input_ids,
                positions=None,
                mask=self.decoder_attention_mask,
                longest=self.length,
                source=self.input_ids,
                source_mask=self.attention_mask,
            )
        positions = self.position_ids
        return NextTokens(
            tokens=self.input_ids,
            positions=positions,
            mask=self.attention_mask,
            longest=self.length if positions is None else int(positions.max()) + 1,
            token_types=self.token_type_ids,
        )


@dataclass(frozen=True, kw_only=True)
class NextTokens(_Rows):
    """What the model reads in one pass, behind what its caches hold."""

    tokens: Tensor
    """[b, s], int64."""
    positions: Tensor | None
    """[b, s], int64; None for 0, 1, 2, ..."""
    mask: Tensor | None
    """[b, cached + s], int64, 0 for padding; None for no padding."""
    longest: int
    """Tokens of the longest row of all copies, these included."""
    source: Tensor | None = None
    """What an encoder reads, [b, s_enc] int64; [b, 0] once the caches hold it. None for models without one."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source, also when it is read already; None for no padding."""
    token_types: Tensor | None = None
    """[b, s], int64, of a BERT; None for 0 everywhere."""

    def rows(self, first: int, stop: int) -> NextTokens:
        """Some of the rows."""
        return self.each(lambda tensor: tensor[first:stop])

    @property
    def width(self) -> int:
        """Tokens per row, of the encoder, too."""
        return self.tokens.shape[1] + (0 if self.source is None else self.source.shape[1])

    @property
    def is_token(self) -> Tensor:
        """[b, s], int64, of prompts: 1 for tokens, 0 for padding."""
        return torch.ones_like(self.tokens) if self.mask is None else self.mask


def inputs_of_batch(batch: Mapping[str, Tensor], model: ModelConfig, *, to_continue: bool) -> Inputs:
    """What ``model`` reads of a batch, without the rows that fill it up (``sample_mask`` is 0).

    Megatron's samples (``text``, ``text_enc``, ...) are read as in training. Without ``decoder_input_ids`` a T5's
    decoder reads the labels shifted to the right by one; where prompts are continued, what it is given to learn from
    answers them: with ``labels`` in the batch its rows are left out.

    Args:
        batch: Of any key; those that say nothing about what is read are ignored.
        model: What reads it.
        to_continue: Whether these are prompts (a GPT's go by Hugging Face's names only) rather than whole rows.

    Raises:
        DataError: If there are no tokens.
    """
    names, read = _MEGATRON_NAMES[model.architecture], _READ[model.architecture]
    if to_continue:
        names = names if model.architecture == "t5" else {}
        read = tuple(x for x in read if x != "position_ids" and ("labels" not in batch or not x.startswith("decoder")))
    names = {**names, **{name: name for name in read}}
    found = {ours: batch[theirs] for theirs, ours in names.items() if theirs in batch and ours in read}
    if "input_ids" not in found:
        what = "which predict continues" if to_continue else "which logits are of"
        megatrons = " (or 'text_enc')" if model.architecture == "t5" else ""
        raise DataError(f"batch keys {', '.join(sorted(batch))} have no 'input_ids'{megatrons}, {what}; add them")
    if not to_continue and model.architecture == "gpt" and "text" in batch:
        found["input_ids"] = batch["text"][:, :-1].clamp(min=0)
    if model.architecture == "t5":
        if not to_continue and "decoder_input_ids" not in found:
            if "labels" not in batch:
                raise DataError(f"batch: expected 'decoder_input_ids' or 'labels', got {', '.join(sorted(batch))}")
            found["decoder_input_ids"] = t5.shifted_right(batch["labels"].long(), model)
        found = {name: t5.visible_keys(x) if name.endswith("mask") else x for name, x in found.items()}
    rows = Inputs(**found)
    return rows if "sample_mask" not in batch else rows.each(lambda tensor: tensor[batch["sample_mask"] != 0])


# ---- checks, on the host ---------------------------------------------------------------------------------------------


def check_prompts(inputs: Inputs, model: ModelConfig, options: GenerationOptions) -> None:
    """Refuse what the model cannot continue. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: If the tensors are no [b, s] of tokens and of 0 and 1, a prompt is empty, a token is not in the
            vocabulary, the text would outgrow the table of positions or what the options allow, or a model is given
            what its kind does not read.
    """
    for name, (tokens, mask) in _rows_of(inputs, model).items():
        real = tokens
        if mask is not None:
            if empty := (mask.sum(-1) == 0).nonzero().flatten().tolist():
                raise ConfigError(f"the prompts {empty} are empty ({name} have padding only); give each a token")
            real = tokens[mask == 1]
        check_in_vocabulary(name, (int(real.min()), int(real.max())), model.vocab_size)
    if model.architecture != "t5":
        check_length(inputs.input_ids, inputs.attention_mask, model, options)
    elif options.bos_token_id is not None:
        raise ConfigError(
            f"bos_token_id={options.bos_token_id} is for texts that are continued; give decoder_input_ids"
        )


def check_rows(inputs: Inputs, model: ModelConfig) -> None:
    """Refuse rows that a model cannot read of which logits are asked. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: With the name, the value, the rule and the fix.
    """
    rows = _rows_of(inputs, model, segments=model.architecture == "gpt")
    if model.architecture == "t5" and inputs.decoder_input_ids is None:
        raise ConfigError(f"{model.family} needs decoder_input_ids here, what its decoder reads; give them")
    for name, (tokens, _) in rows.items():
        check_tokens(name, tokens, model)  # padding is looked up, too
    given = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}
    check_beside_tokens(given, len(inputs), inputs.input_ids.shape[1], model)


def _rows_of(inputs: Inputs, model: ModelConfig, *, segments: bool = False) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Tokens by their name, with their mask or None for no padding.

    Raises:
        ConfigError: If the model does not read what is given, tokens are no [b, s] of integers, or a mask is no [b, s]
            of 0 and 1, unless it has numbers of ``segments``.
    """
    given = {name: tensor for name, tensor in vars(inputs).items() if tensor is not None}
    for name in given:
        if name not in _READ[model.architecture]:
            raise ConfigError(f"{name} are nothing that {model.family} reads; leave them out")
    if "decoder_attention_mask" in given and "decoder_input_ids" not in given:
        raise ConfigError(f"{model.family} needs decoder_input_ids here, what its decoder reads; give them")
    rows = {}
    for name in [each for each in given if each.endswith("input_ids")]:
        tokens, mask_name = given[name], name.replace("input_ids", "attention_mask")
        is_whole = isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.dtype != torch.bool
        if not is_whole or tokens.dim() != 2 or tokens.numel() == 0:
            raise ConfigError(f"{name}: expected a tensor of integers, [prompts, tokens], got {_kind(tokens)}")
        mask: Any = given.get(mask_name)
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape):
            raise ConfigError(f"{mask_name}: expected the shape {list(tokens.shape)} of {name}, got {_kind(mask)}")
        if mask is not None and not segments and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigError(f"{mask_name}: expected 1 for tokens and 0 for padding, got other numbers")
        rows[name] = (tokens, mask)
    if "decoder_input_ids" in rows:
        expected, got = len(inputs.input_ids), len(rows["decoder_input_ids"][0])
        if expected != got:
            raise ConfigError(f"decoder_input_ids: expected {expected} rows, as input_ids have, got {got}")
    return rows


def check_length(
    input_ids: Tensor, attention_mask: Tensor | None, model: ModelConfig, options: GenerationOptions
) -> GenerationOptions:
    """The options with the lengths that these prompts leave; of a T5 what its decoder continues.

    Raises:
        ConfigError: If the text would outgrow the table of positions or what the options allow.
    """
    width, limit = input_ids.shape[1], model.max_position_embeddings
    if not model.has_position_table:
        return options.settled(width)
    longest = width if attention_mask is None else int(attention_mask.sum(-1).max())
    room = limit + 1 - longest  # the last new token is not read again
    settled = options.settled(width, room)
    if settled.num_new_tokens > room:
        name, most = ("max_new_tokens", room) if options.max_length is None else ("max_length", width + room)
        fix = f"cut the prompts to {limit} tokens" if room < 1 else f"use {name} of at most {most}"
        given = getattr(options, name) or settled.num_new_tokens
        raise ConfigError(
            f"a prompt of {longest} tokens and {name}={given} need more positions than the model's "
            f"max_position_embeddings={limit}; {fix}"
        )
    return settled


def check_in_vocabulary(name: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    """Refuse tokens outside the vocabulary.

    Raises:
        ConfigError: With the first one.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"{name}: expected tokens of the vocabulary, 0 to {vocab_size - 1}, got {token}")


def _kind(thing: object) -> str:
    return f"{thing.dtype} {list(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"


# ---- layout ----------------------------------------------------------------------------------------------------------


def aligned(input_ids: Tensor, attention_mask: Tensor | None) -> NextTokens:
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
    return NextTokens(tokens=tokens, positions=positions, mask=mask if shortest < longest else None, longest=longest)


def _padded_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=-1, stable=True)
    return tokens.gather(-1, order), mask.gather(-1, order)


def with_first_token(input_ids: Tensor, attention_mask: Tensor | None, token: int) -> tuple[Tensor, Tensor | None]:
    """The rows with ``token`` before the first of their own, if not all of them begin with it already.

    Args:
        input_ids: [b, s].
        attention_mask: [b, s], 1 for tokens and 0 for padding on any side; None for no padding.
        token: What texts begin with.

    Returns:
        Tokens and mask, [b, s + 1] with the padding on the left, of which a row that begins with ``token`` has one
        more. Or what was given.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    begins = input_ids.gather(-1, mask.argmax(dim=-1, keepdim=True)) == token
    if bool(begins.all()):
        return input_ids, attention_mask
    tokens = torch.cat((torch.full_like(input_ids[:, :1], token), input_ids), dim=-1)
    return _padded_left(tokens, torch.cat(((~begins).to(mask.dtype), mask), dim=-1))


def decoder_start(inputs: Inputs, token: int) -> tuple[Tensor, Tensor | None]:
    """What the decoder of a T5 continues, and its mask, [b, s_dec].

    As in Hugging Face's ``generate``, ``token`` is put before rows none of which begins with it.

    Args:
        inputs: On the host.
        token: What the decoder reads first.
    """
    tokens, mask = inputs.decoder_input_ids, inputs.decoder_attention_mask
    if tokens is None:
        return torch.full((len(inputs), 1), token), None
    tokens = tokens.long()
    if bool((tokens[:, 0] != token).all()):
        tokens = torch.cat((torch.full_like(tokens[:, :1], token), tokens), dim=-1)
        mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), dim=-1)
    return tokens, mask


def with_source(decoder: NextTokens, inputs: Inputs) -> NextTokens:
    """The rows of a decoder with what its encoder reads, as it is; padding outside the vocabulary becomes token 0."""
    mask, source = inputs.attention_mask, inputs.input_ids.long()
    if mask is None or bool(mask.all()):
        return replace(decoder, source=source)
    return replace(decoder, source=source * mask.long(), source_mask=mask.long())


# ---- texts -----------------------------------------------------------------------------------------------------------


def encoded(texts: Sequence[str], tokenizer: Any, *, add_bos: bool = False) -> tuple[Tensor, Tensor]:
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


def continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of the tokens ``new`` as it reads behind ``prompt``: the space between words is often the latter's."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)
    whole: str = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return whole[len(before) :]


def new_texts(
    tokenizer: Any, written: Tensor, input_ids: Tensor, attention_mask: Tensor | None, *, is_answer: bool = False
) -> list[str]:
    """What was written to each prompt, special tokens left out.

    Args:
        tokenizer: Of transformers.
        written: What ``generate`` returned, [b * n, s + new]: n texts of each prompt.
        input_ids: The prompts that it was given, [b, s].
        attention_mask: [b, s]; None for no padding.
        is_answer: Whether it is the decoder of a T5 that has written: [b * n, 1 + new], without the prompts.
    """
    if is_answer:
        texts: list[str] = tokenizer.batch_decode(written[:, 1:], skip_special_tokens=True)
        return texts
    copies, width = len(written) // len(input_ids), input_ids.shape[1]
    masks = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool().cpu()
    return [
        continuation(tokenizer, row[:width][masks[index // copies]].tolist(), row[width:].tolist())
        for index, row in enumerate(written.cpu())
    ]


# ---- special tokens --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """What a model's own files say about the ends of a text."""

    eos: tuple[int, ...] = ()
    """Tokens that end it."""
    pad: int | None = None
    """What fills rows that ended before others."""
    start: int | None = None
    """What a decoder apart from an encoder reads first; None if only the model's config says so."""


def end_tokens(model: HFConfigLike) -> EndTokens:
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
    return EndTokens(eos=several, pad=fields.get("pad_token_id"), start=start)


# ---- stop strings ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _criteria(strings: tuple[str, ...], tokenizer: Any, size: int) -> StopStringCriteria:
    """Takes a second or two for 128,000 tokens; ``size`` changes when tokens are added."""
    from transformers import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError as error:
        raise ConfigError(f"stop_strings={strings!r} can be written with no token of the tokenizer") from error


def stop_strings(strings: Sequence[str], tokenizer: Any) -> StopStringCriteria:
    """What says of rows of tokens whether their last token completes one of the texts, however they are spelled.

    It works with tensors alone: the device never waits for the host. It asks about the last ``maximum_token_len``
    tokens of a row, one for each letter of the longest text. The last row of its ``embedding_vec``, [vocabulary, n]
    int32, stands for no token at all.

    Args:
        strings: The texts.
        tokenizer: Of transformers, or the folder of one.

    Raises:
        ConfigError: If the tokenizer is none, or knows no token that could end one of the texts.
    """
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, (str, Path)):
        tokenizer = _loaded(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"stop_strings: expected a tokenizer of transformers or its folder, got {tokenizer!r}")
    return _criteria(tuple(strings), tokenizer, len(tokenizer))


_loaded = functools.lru_cache(maxsize=4)(load_tokenizer)
