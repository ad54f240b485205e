"""How does an encoder-decoder continue? The encoder reads the prompts once, and the decoder starts from one token.

In the first pass pipeline stages send what they send in training, the states of both stacks; the cross-attention of
every layer keeps its keys and values, and from then on stages send the decoder's newest token only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.engine.slots.kv_cache import KeyValueCache
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts, check_rows
from lightning_megatron.models.config import ModelConfig


def started(input_ids: Tensor, attention_mask: Tensor | None, start_token: int) -> Prompts:
    """What the decoder continues, one token in each row, and what the encoder reads, as it is.

    Args:
        input_ids: [b, s_enc].
        attention_mask: [b, s_enc], 1 for tokens and 0 for padding; None for no padding.
        start_token: What the decoder reads first.
    """
    mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.long()
    source = input_ids.long()
    lengths = source.new_ones(len(source))
    return Prompts(
        tokens=torch.full_like(source[:, :1], start_token),
        lengths=lengths,
        is_padded=False,
        longest=1,
        # What stands for padding need not be a token of the vocabulary, and the embedding is asked for it.
        source=source if mask is None else source * mask,
        source_mask=mask,
    )


def check_options(options: GenerationOptions, model: ModelConfig) -> None:
    """Refuse what has no meaning for encoder-decoders; of other models nothing.

    Raises:
        ConfigError: If a first token is asked for.
    """
    if model.architecture == "t5" and options.bos_token_id is not None:
        raise ConfigError(
            f"bos_token_id={options.bos_token_id} stands before texts that are continued, and the texts of "
            f"{model.family} start with its decoder_start_token_id={model.decoder_start_token_id}; leave it out"
        )


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
