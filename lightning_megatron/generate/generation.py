"""How do all ranks together continue prompts? Checked alike, dealt to the copies of the model, gathered in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.beams import search
from lightning_megatron.generate.decoding import Continuations, decode
from lightning_megatron.generate.encoder_decoder import check_options, started
from lightning_megatron.generate.end_tokens import EndTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts, aligned, check_prompts, check_tokens, with_first_token
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.sampling import uniform_numbers
from lightning_megatron.generate.sharing import check_agreement, gathered, own_rows, rows_of_copies
from lightning_megatron.generate.static_steps import check_static_cache
from lightning_megatron.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, and how likely the model finds them; the same on every rank."""

    sequences: Tensor
    """[b, s + new], int64: the prompts and what follows; padding behind rows that ended before others."""
    scores: Tensor
    """[b], fp32: by what a search with beams has ranked them; else the sums of the log-probabilities."""
    log_probabilities: Tensor | None
    """[b, new], fp32: what the model gives to each new token, before temperature and the like; 0 behind the end of a
    row. None after a search with beams."""


class Generator:
    """Continues prompts with one model; every rank of the world must call alike."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: ModelConfig,
        topology: Topology,
        device: torch.device,
        ends: EndTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Connect the parts.

        Args:
            chunks: This rank's (wrapped) model chunks.
            model: What they compute.
            topology: This rank's place.
            device: Where they compute.
            ends: The model's own.
            on_tokens: As for ``decoding.decode``.
        """
        self._chunks = chunks
        self._model = model
        self._topology = topology
        self._device = device
        self._ends = ends
        self._on_tokens = on_tokens

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        options: GenerationOptions,
        *,
        is_shared: bool = True,
    ) -> Generated:
        """Prompts and what follows them, on the device of ``input_ids``.

        Of an encoder-decoder, what the decoder writes and the token before it: [b, 1 + new].

        Args:
            input_ids: [b, s], the same on every rank; rows are divided among the copies of the model.
            attention_mask: [b, s], 1 for tokens and 0 for padding on any side. None: no padding, except that, as in
                Hugging Face, a padding token of the model that does not end texts is padding.
            options: How tokens are chosen.
            is_shared: Whether all copies of the model have the same rows and share them; else each copy has rows of its
                own, and only the ranks of one copy need call alike.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if a prompt cannot be continued.
        """
        options = self._with_own_tokens(options)
        on_host = input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids
        given_mask = self._mask_of(on_host, attention_mask, options)
        if is_shared:
            tokens, mask = on_all_ranks_alike(lambda: self._checked(on_host, given_mask, options))
            check_agreement(options, tokens, mask)
        else:
            tokens, mask = self._checked(on_host, given_mask, options)
        given, prompts = tokens.long(), aligned(tokens, mask)
        if self._model.architecture == "t5":
            prompts = started(tokens, mask, self._model.decoder_start_token_id)
            given = prompts.tokens
        repeats = options.num_return_sequences
        if options.num_beams == 1:
            prompts, repeats = prompts.repeated(repeats), 1
        counts = rows_of_copies(self._topology, len(prompts.tokens))
        rows = own_rows(self._topology, counts) if is_shared else slice(0, len(prompts.tokens))
        with generating(self._chunks) as models:
            own = self._continued(models, prompts, options, rows)
            numbers = [count * repeats for count in counts]
            found = [own.tokens, own.lengths, own.scores]
            found += [] if own.log_probabilities is None else [own.log_probabilities]
            if is_shared:
                found = [gathered(self._topology, tensor, numbers) for tensor in found]
        written, lengths, scores, *others = (tensor.to(input_ids.device) for tensor in found)
        longest = int(lengths.max())
        given = given.repeat_interleave(options.num_return_sequences, dim=0).to(input_ids.device)
        return Generated(
            sequences=torch.cat((given, written[:, :longest]), dim=-1),
            scores=scores,
            log_probabilities=others[0][:, :longest] if others else None,
        )

    def _continued(self, models: list[Any], prompts: Prompts, options: GenerationOptions, rows: slice) -> Continuations:
        """What this copy of the model adds to its rows."""
        if rows.stop == rows.start:
            nothing = torch.empty((0, options.max_new_tokens), device=self._device)
            return Continuations(
                tokens=nothing.long(),
                lengths=nothing[:, 0].long(),
                log_probabilities=nothing if options.num_beams == 1 else None,
                scores=nothing[:, 0],
            )
        own = prompts.rows(rows).to(self._device)
        if options.num_beams > 1:
            return search(models, self._topology, own, options, self._model.vocab_size)
        uniform = uniform_numbers(options.seed, options.max_new_tokens, len(prompts.tokens))[:, rows]
        return decode(models, self._topology, own, options, self._model.vocab_size, uniform, self._on_tokens)

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

    def _checked(
        self, input_ids: Tensor, mask: Tensor | None, options: GenerationOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens and mask of prompts that can be continued, with their first token."""
        check_options(options, self._model)
        check_static_cache(options, self._model)
        check_prompts(input_ids, mask, self._model, options)
        vocab_size = self._model.vocab_size
        if options.top_k > vocab_size:
            raise ConfigError(f"top_k={options.top_k} is more than the {vocab_size} tokens of the vocabulary; lower it")
        for sequence in options.stop_sequences:
            check_tokens("stop_sequences", sequence, vocab_size)
        if options.bos_token_id is not None:
            check_tokens("bos_token_id", (options.bos_token_id,), vocab_size)
            input_ids, mask = with_first_token(input_ids, mask, options.bos_token_id)
            check_prompts(input_ids, mask, self._model, options)
        return input_ids, mask
