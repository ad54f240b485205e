"""How does an encoder-decoder continue? The encoder reads the prompts once, and the decoder starts from one token.

In the first pass pipeline stages send what they send in training, the states of both stacks; the cross-attention of
every layer keeps its keys and values, and from then on stages send the decoder's newest token only.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.engine.slots.kv_cache import KeyValueCache
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompt_checks import check_readable, check_rows
from lightning_megatron.generate.prompts import Given, Prompts, aligned
from lightning_megatron.models.config import ModelConfig


def decoder_rows(given: Given, start_token: int) -> Given:
    """The same with what the decoder continues, which begins with its start token.

    As Hugging Face's ``generate``: the token is put before rows none of which begins with it.

    Args:
        given: On the host.
        start_token: What the decoder reads first.
    """
    tokens, mask = given.decoder_input_ids, given.decoder_attention_mask
    if tokens is None:
        return replace(given, decoder_input_ids=torch.full((len(given.input_ids), 1), start_token))
    tokens = tokens.long()
    if bool((tokens[:, 0] != start_token).all()):
        tokens = torch.cat((torch.full_like(tokens[:, :1], start_token), tokens), dim=-1)
        mask = None if mask is None else torch.cat((torch.ones_like(mask[:, :1]), mask), dim=-1)
    return replace(given, decoder_input_ids=tokens, decoder_attention_mask=mask)


def started(given: Given) -> Prompts:
    """What the decoder continues, and what the encoder reads, as it is.

    Args:
        given: From ``decoder_rows``.
    """
    assert given.decoder_input_ids is not None
    mask = given.attention_mask
    mask = None if mask is None or bool(mask.all()) else mask.long()
    source = given.input_ids.long()
    return replace(
        aligned(given.decoder_input_ids, given.decoder_attention_mask),
        # What stands for padding need not be a token of the vocabulary, and the embedding is asked for it.
        source=source if mask is None else source * mask,
        source_mask=mask,
    )


def check_decoder(given: Given, options: GenerationOptions, model: ModelConfig) -> None:
    """Refuse what a decoder cannot continue, and what has no meaning for this kind of model.

    Raises:
        ConfigError: If a T5 shall begin with a first token, another model is given rows for a decoder, or these are no
            rows of tokens, as many as the encoder's.
    """
    tokens, mask = given.decoder_input_ids, given.decoder_attention_mask
    if model.architecture != "t5":
        for name, tensor in (("decoder_input_ids", tokens), ("decoder_attention_mask", mask)):
            if tensor is not None:
                raise ConfigError(f"{name} are for encoder-decoders, which {model.family} is not; leave them out")
        return
    if options.bos_token_id is not None:
        raise ConfigError(
            f"bos_token_id={options.bos_token_id} stands before texts that are continued, and a {model.family} starts "
            "its own with decoder_start_token_id; leave it out, or give decoder_input_ids"
        )
    if tokens is None:
        if mask is not None:
            raise ConfigError("decoder_attention_mask has no decoder_input_ids that it says something about; give them")
        return
    check_readable(tokens, mask, model.vocab_size, "decoder_input_ids")
    _check_as_many(given.input_ids, tokens)


def check_decoder_rows(input_ids: Tensor, decoder_input_ids: Tensor | None, model: ModelConfig) -> None:
    """Refuse what the decoder of ``model`` cannot read. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: If it reads nothing, the model has no decoder apart from an encoder, the rows are not as many as
            the encoder's, or a token is not in the vocabulary.
    """
    if (model.architecture == "t5") != (decoder_input_ids is not None):
        if decoder_input_ids is None:
            raise ConfigError(f"logits of {model.family} need decoder_input_ids, what its decoder reads; give them")
        raise ConfigError(f"decoder_input_ids are for encoder-decoders, which {model.family} is not; leave them out")
    if decoder_input_ids is None:
        return
    check_rows(decoder_input_ids, None, model, name="decoder_input_ids")
    _check_as_many(input_ids, decoder_input_ids)


def _check_as_many(input_ids: Tensor, decoder_input_ids: Tensor) -> None:
    if len(decoder_input_ids) != len(input_ids):
        raise ConfigError(
            f"decoder_input_ids have {len(decoder_input_ids)} rows and input_ids {len(input_ids)}; give each row of "
            "the encoder one of the decoder"
        )


class SourceCache(KeyValueCache):
    """Keys and values of the encoder's output in one layer of the decoder; nothing comes to them later."""

    def __init__(self) -> None:
        """Memory is taken when the keys come."""
        super().__init__(0)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the whole source, or return them if these are none; as ``KeyValueCache.append``."""
        if self.length == 0:
            self.capacity = key.shape[2]
        return super().append(key, value)

    def select(self, rows: Tensor) -> None:
        """Copy rows if there are more or fewer of them now; else row i and row ``rows[i]`` have the same prompt."""
        if self._keys is not None and len(rows) != len(self._keys):
            super().select(rows)
