"""How do all ranks together continue prompts? Checked alike, dealt to the copies of the model, gathered in order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.beams import search
from lightning_megatron.generate.decoding import Continuations, decode
from lightning_megatron.generate.end_tokens import EndTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts, aligned, check_prompts, check_tokens
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.sampling import uniform_numbers
from lightning_megatron.models.config import ModelConfig


class Generator:
    """Continues prompts with one model; every rank of the world must call alike."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: ModelConfig,
        topology: Topology,
        device: torch.device,
        ends: EndTokens,
    ) -> None:
        """Connect the parts.

        Args:
            chunks: This rank's (wrapped) model chunks.
            model: What they compute.
            topology: This rank's place.
            device: Where they compute.
            ends: The model's own.
        """
        self._chunks = chunks
        self._model = model
        self._topology = topology
        self._device = device
        self._ends = ends

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None, options: GenerationOptions) -> Tensor:
        """Prompts and what follows them: [b, s + new], on the device of ``input_ids``.

        Args:
            input_ids: [b, s], the same on every rank; rows are divided among the copies of the model.
            attention_mask: [b, s], 1 for tokens and 0 for padding on any side. None: no padding, except that, as in
                Hugging Face, a padding token of the model that does not end texts is padding.
            options: How tokens are chosen.

        Raises:
            ConfigError: On all ranks alike, before anything runs, if a prompt cannot be continued.
        """
        options = self._with_own_tokens(options)
        on_host = input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids
        mask = self._mask_of(on_host, attention_mask, options)
        on_all_ranks_alike(lambda: self._check(on_host, mask, options))
        _check_agreement(on_host, mask, options)
        prompts, repeats = aligned(on_host, mask), options.num_return_sequences
        if options.num_beams == 1:
            prompts, repeats = prompts.repeated(repeats), 1
        counts = self._rows_of_copies(len(prompts.tokens))
        with generating(self._chunks) as models:
            own = self._continued(models, prompts, options, counts)
            written = self._gathered(own, [count * repeats for count in counts])
        longest = int(written.lengths.max())
        given = input_ids.long().repeat_interleave(options.num_return_sequences, dim=0)
        return torch.cat((given, written.tokens[:, :longest].to(given.device)), dim=-1)

    def _continued(
        self, models: list[Any], prompts: Prompts, options: GenerationOptions, counts: list[int]
    ) -> Continuations:
        """What this copy of the model adds to its rows."""
        first = sum(counts[: self._topology.dp_rank])
        stop = first + counts[self._topology.dp_rank]
        if stop == first:
            return Continuations(
                tokens=torch.empty((0, options.max_new_tokens), dtype=torch.long, device=self._device),
                lengths=torch.empty((0,), dtype=torch.long, device=self._device),
            )
        rows = prompts.rows(first, stop).to(self._device)
        if options.num_beams > 1:
            return search(models, self._topology, rows, options, self._model.vocab_size)
        uniform = uniform_numbers(options.seed, options.max_new_tokens, len(prompts.tokens))[:, first:stop]
        return decode(models, self._topology, rows, options, self._model.vocab_size, uniform)

    def _with_own_tokens(self, options: GenerationOptions) -> GenerationOptions:
        eos = self._ends.eos if options.eos_token_id is None else options.eos_token_ids
        pad = self._ends.pad if options.pad_token_id is None else options.pad_token_id
        return replace(options, eos_token_id=eos, pad_token_id=pad)

    def _mask_of(self, input_ids: Tensor, attention_mask: Tensor | None, options: GenerationOptions) -> Tensor | None:
        if attention_mask is not None:
            return attention_mask.cpu() if isinstance(attention_mask, Tensor) else attention_mask
        pad = options.pad_token_id
        if pad is None or pad in options.eos_token_ids or not isinstance(input_ids, Tensor):
            return None
        return (input_ids != pad).long()

    def _check(self, input_ids: Tensor, mask: Tensor | None, options: GenerationOptions) -> None:
        if self._model.architecture != "gpt":
            raise ConfigError(
                f"generate continues the texts of GPTs, and {self._model.family} is a "
                f"{self._model.architecture.upper()}"
            )
        check_prompts(input_ids, mask, self._model, options)
        vocab_size = self._model.vocab_size
        if options.top_k > vocab_size:
            raise ConfigError(f"top_k={options.top_k} is more than the {vocab_size} tokens of the vocabulary; lower it")
        for sequence in options.stop_sequences:
            check_tokens("stop_sequences", sequence, vocab_size)

    def _rows_of_copies(self, rows: int) -> list[int]:
        """How many rows each copy of the model continues."""
        dp = self._topology.dp
        return [rows * (rank + 1) // dp - rows * rank // dp for rank in range(dp)]

    def _gathered(self, own: Continuations, counts: list[int]) -> Continuations:
        """Those of all copies, in the order of the prompts, on every rank."""
        if len(counts) == 1:
            return own
        # One message: the lengths are another column; every copy sends as many rows.
        mine = own.tokens.new_zeros(max(counts), own.tokens.shape[1] + 1)
        mine[: len(own.tokens), :-1] = own.tokens
        mine[: len(own.tokens), -1] = own.lengths
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine, group=self._topology.dp_group)
        whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return Continuations(tokens=whole[:, :-1], lengths=whole[:, -1])


def _check_agreement(input_ids: Tensor, mask: Tensor | None, options: GenerationOptions) -> None:
    """Every rank must have been asked for the same, or they would wait for each other forever.

    Raises:
        ConfigError: On all ranks, if the prompts or the options differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr((tuple(input_ids.shape), options)).encode())
    for tensor in (input_ids, mask):
        if tensor is not None:
            digest.update(tensor.long().contiguous().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ConfigError(
            f"rank {different[0]} calls generate with other prompts or options than rank 0; give every rank the same "
            "(they share the rows)"
        )
