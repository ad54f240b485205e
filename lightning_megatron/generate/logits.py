"""What does the model predict at every position? Whole logits of whole rows, wherever their parts are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.model_rows import ModelRows, check_model_rows, on_host
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.sharing import check_agreement, gathered, own_rows, rows_of_copies
from lightning_megatron.generate.stages import Stages
from lightning_megatron.models.config import ModelConfig


class Logits:
    """Computes logits with one model: fp32, on the device of the weights, padding of the vocabulary left out.

    They are ``[b, s, vocab_size]``; s is the length of the decoder's rows if there is a decoder. Those of a BERT's
    other heads are ``[b, num_labels]`` (``sequence_classification``) or ``[b, s, num_labels]``.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: ModelConfig,
        topology: Topology,
        *,
        last_stage_only: bool = False,
    ) -> None:
        """Connect the parts.

        Args:
            chunks: This rank's (wrapped) model chunks.
            model: What they compute.
            topology: This rank's place.
            last_stage_only: Give them to the ranks of the last pipeline stage alone, which have them anyway, and None
                to the others.
        """
        self._chunks = chunks
        self._model = model
        self._topology = topology
        self._device = next(chunks[0].parameters()).device
        self._is_kept = topology.is_last_stage or not last_stage_only
        self._is_sent = topology.parallel.pp > 1 and not last_stage_only

    def of_shared_rows(self, rows: ModelRows) -> Tensor | None:
        """Logits of rows that all copies of the model have and share; every rank of the world must call alike.

        Raises:
            ConfigError: On all ranks alike, before anything runs, if the model cannot read a row.
        """
        # What a caller gave may be no tensor at all.
        given = ModelRows(**{name: on_host(value) for name, value in vars(rows).items()})
        on_all_ranks_alike(lambda: check_model_rows(given, self._model))
        check_agreement("logits", *given.tensors)
        counts = rows_of_copies(self._topology, len(given))
        own = own_rows(self._topology, counts)
        logits = self._of_copy(given.each(lambda tensor: tensor[own]))
        # A data-parallel group lies within one stage.
        return None if logits is None else gathered(self._topology, logits, counts)

    def of_own_rows(self, rows: ModelRows) -> Tensor | None:
        """Logits of rows that only this copy of the model has, perhaps none; all its ranks must call alike.

        Raises:
            ConfigError: On all these ranks, if the model cannot read a row.
        """
        if len(rows) > 0:
            check_model_rows(rows.each(Tensor.cpu), self._model)
        return self._of_copy(rows)

    def _of_copy(self, rows: ModelRows) -> Tensor | None:
        # Every rank must enter, also those of a copy without rows: weights may still be on their way to it.
        with generating(self._chunks) as models:
            logits = torch.empty(self._shape(rows) if self._is_kept else 0, dtype=torch.float32, device=self._device)
            if len(rows) == 0:
                return logits if self._is_kept else None
            batch = rows.each(lambda tensor: tensor.long().to(self._device)).next_tokens()
            computed = Stages(models, self._topology, len(rows)).logits(batch, every_position=True)
            if computed is not None:
                logits = (computed[..., : self._model.vocab_size] if self._predicts_tokens else computed).contiguous()
            if self._is_sent:
                dist.broadcast(logits, self._topology.last_stage, group=self._topology.pp_group)
            return logits if self._is_kept else None

    @property
    def _predicts_tokens(self) -> bool:
        return self._model.architecture != "bert" or self._model.has_output_layer

    def _shape(self, rows: ModelRows) -> tuple[int, ...]:
        if self._predicts_tokens:
            return (len(rows), rows.length, self._model.vocab_size)
        if self._model.task == "sequence_classification":
            return (len(rows), self._model.num_labels)
        return (len(rows), rows.length, self._model.num_labels)
