"""What does the model predict at every position? Whole logits of whole rows, wherever their parts are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.prompts import check_rows
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.sharing import check_agreement, gathered, own_rows, rows_of_copies
from lightning_megatron.generate.stages import NextTokens, Stages
from lightning_megatron.models.config import ModelConfig


def whole_logits(
    chunks: Sequence[torch.nn.Module],
    model: ModelConfig,
    topology: Topology,
    input_ids: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """[b, s, vocab_size] fp32 on every rank, on the device of the weights; every rank of the world must call alike.

    Args:
        chunks: This rank's (wrapped) model chunks.
        model: What they compute.
        topology: This rank's place.
        input_ids: [b, s], the same on every rank; rows are divided among the copies of the model.
        attention_mask: [b, s], 1 for tokens and 0 for padding; positions count padding too, as in Hugging Face's
            models. None for no padding.

    Raises:
        ConfigError: On all ranks alike, before anything runs, if the model cannot read a row.
    """
    tokens = input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids
    mask = attention_mask.cpu() if isinstance(attention_mask, Tensor) else attention_mask
    on_all_ranks_alike(lambda: check_rows(tokens, mask, model))
    check_agreement("logits", tokens, mask)
    counts = rows_of_copies(topology, len(input_ids))
    own = own_rows(topology, counts)
    device = next(chunks[0].parameters()).device
    with generating(chunks) as models:
        shape = (counts[topology.dp_rank], input_ids.shape[1], model.vocab_size)
        logits = torch.empty(shape, dtype=torch.float32, device=device)
        if len(logits) > 0:
            batch = NextTokens(
                tokens=input_ids[own].long().to(device),
                positions=None,
                mask=None if attention_mask is None else attention_mask[own].long().to(device),
                longest=input_ids.shape[1],
            )
            computed = Stages(models, topology, len(logits)).logits(batch, every_position=True)
            if computed is not None:
                logits = computed[..., : model.vocab_size].contiguous()
            if topology.parallel.pp > 1:
                dist.broadcast(logits, topology.last_stage, group=topology.pp_group)
        return gathered(topology, logits, counts)
