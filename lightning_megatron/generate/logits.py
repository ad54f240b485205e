"""What does the model predict at every position? Whole logits of whole rows, wherever their parts are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.encoder_decoder import check_decoder_rows
from lightning_megatron.generate.passes import NextTokens
from lightning_megatron.generate.prompts import check_rows
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.sharing import check_agreement, gathered, own_rows, rows_of_copies
from lightning_megatron.generate.stages import Stages
from lightning_megatron.models.config import ModelConfig


def whole_logits(
    chunks: Sequence[torch.nn.Module],
    model: ModelConfig,
    topology: Topology,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    decoder_input_ids: Tensor | None = None,
) -> Tensor:
    """[b, s, vocab_size] fp32 on every rank, on the device of the weights; every rank of the world must call alike.

    With a decoder s is the length of its rows.

    Args:
        chunks: This rank's (wrapped) model chunks.
        model: What they compute.
        topology: This rank's place.
        input_ids: [b, s], the same on every rank; rows are divided among the copies of the model.
        attention_mask: [b, s], 1 for tokens and 0 for padding; positions count padding too, as in Hugging Face's
            models. None for no padding.
        decoder_input_ids: [b, s_dec], what the decoder of an encoder-decoder reads; None for other models.

    Raises:
        ConfigError: On all ranks alike, before anything runs, if the model cannot read a row.
    """
    tokens = input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids
    mask = attention_mask.cpu() if isinstance(attention_mask, Tensor) else attention_mask
    decoder_tokens = decoder_input_ids.cpu() if isinstance(decoder_input_ids, Tensor) else decoder_input_ids
    on_all_ranks_alike(lambda: check_rows(tokens, mask, model))
    on_all_ranks_alike(lambda: check_decoder_rows(tokens, decoder_tokens, model))
    check_agreement("logits", tokens, mask, decoder_tokens)
    counts = rows_of_copies(topology, len(input_ids))
    own = own_rows(topology, counts)
    device = next(chunks[0].parameters()).device
    with generating(chunks) as models:
        length = (input_ids if decoder_input_ids is None else decoder_input_ids).shape[1]
        shape = (counts[topology.dp_rank], length, model.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=device)
        if len(logits) > 0:
            rows = [None if x is None else x[own].long().to(device) for x in (mask, decoder_tokens)]
            batch = _batch(tokens[own].long().to(device), *rows)
            computed = Stages(models, topology, len(logits)).logits(batch, every_position=True)
            if computed is not None:
                logits = computed[..., : model.vocab_size].contiguous()
            if topology.parallel.pp > 1:
                dist.broadcast(logits, topology.last_stage, group=topology.pp_group)
        return gathered(topology, logits, counts)


def _batch(tokens: Tensor, mask: Tensor | None, decoder_tokens: Tensor | None) -> NextTokens:
    if decoder_tokens is None:
        return NextTokens(tokens=tokens, positions=None, mask=mask, longest=tokens.shape[1])
    longest = decoder_tokens.shape[1]
    return NextTokens(
        tokens=decoder_tokens, positions=None, mask=None, longest=longest, source=tokens, source_mask=mask
    )
