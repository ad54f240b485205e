"""Texts and logits of rows that the data-parallel copies of a model share, or that each copy has of its own.

All ranks check alike what they were asked; shared rows are dealt to the copies and gathered in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.collectives import gathered_rows, on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.decode import Rules, decode, uniform_numbers
from lightning_megatron.generate.inputs import (
    EndTokens,
    Inputs,
    NextTokens,
    aligned,
    check_in_vocabulary,
    check_length,
    check_prompts,
    check_rows,
    decoder_start,
    stop_strings,
    with_first_token,
    with_source,
)
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import Stages, inference_mode, uses_static_cache
from lightning_megatron.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, and how likely the model finds them; the same on every rank."""

    sequences: Tensor
    """[b, s + new], int64: the prompts and what follows; padding behind rows that ended before others. Of a T5 what its
    decoder continues and writes, [b, s_dec + new]."""
    scores: Tensor
    """[b], fp32: by what a search with beams has ranked them; else the sums of the log-probabilities."""
    log_probabilities: Tensor
    """[b, new], fp32: what the model gives to each new token, before temperature and the like; 0 behind the end of a
    row."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A model on the ranks that compute it. Every rank of the world must ask alike, unless a method says otherwise."""

    chunks: Sequence[torch.nn.Module]
    """This rank's, wrapped or not."""
    config: ModelConfig
    """What they compute."""
    topology: Topology
    """This rank's place."""
    device: torch.device
    """Where they compute."""
    is_own: bool = True
    """Whether this package has built the chunks. What others' do at each step nobody knows: it is recorded as a CUDA
    graph only on request."""

    # ---- texts -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        given: Inputs,
        options: GenerationOptions,
        ends: EndTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
        *,
        is_shared: bool = True,
    ) -> Generated:
        """Prompts and what follows them, on the device of ``input_ids``.

        Args:
            given: The prompts, the same on every rank; rows are divided among the copies of the model. Without a mask
                there is no padding, except that, as in Hugging Face, a padding token of the model that does not end
                texts is padding (transformers 5.23 sees to that for GPTs only; a T5 shall not read padding either).
            options: How tokens are chosen.
            ends: The model's own.
            on_tokens: As for ``decode.decode``.
            is_shared: Whether all copies of the model have the same rows and share them; else each copy has rows of its
                own, and only the ranks of one copy need call alike.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if a prompt cannot be continued.
        """
        eos = ends.eos if options.eos_token_id is None else options.eos_token_ids
        pad = ends.pad if options.pad_token_id is None else options.pad_token_id
        options = replace(options, eos_token_id=eos, pad_token_id=pad)
        device = given.input_ids.device if isinstance(given.input_ids, Tensor) else self.device
        on_host = given.each(Tensor.cpu)
        if is_shared:
            before, prompts, rules = on_all_ranks_alike(lambda: self._planned(on_host, options, ends))
            _check_agreement(options, *vars(on_host).values(), rules.strings and rules.strings.embedding_vec)
        else:
            before, prompts, rules = self._planned(on_host, options, ends)
        repeats, options = options.num_return_sequences, rules.options
        before = before.repeat_interleave(repeats, dim=0).to(device)
        if options.num_beams == 1:
            prompts, repeats = prompts.each(lambda tensor: tensor.repeat_interleave(repeats, dim=0)), 1
        rows, counts = self._dealt(len(prompts.tokens)) if is_shared else (slice(0, len(prompts.tokens)), [])
        numbers = torch.empty((0, options.num_new_tokens + 1), device=self.device)
        written = numbers.long()
        with inference_mode(self.chunks) as models:
            if rows.stop > rows.start:
                own = prompts.rows(rows.start, rows.stop).each(lambda tensor: tensor.to(self.device))
                uniform = uniform_numbers(options.seed, options.num_new_tokens, len(prompts.tokens))[:, rows]
                written, numbers = decode(models, self._together, own, rules, uniform, on_tokens)
            if is_shared:
                counts, group = [count * repeats for count in counts], self.topology.dp_group
                written, numbers = gathered_rows(written, counts, group), gathered_rows(numbers, counts, group)
        written, numbers = written.to(device), numbers.to(device)
        longest = int(written[:, -1].max())
        return Generated(
            sequences=torch.cat((before, written[:, :longest]), dim=-1),
            scores=numbers[:, -1],
            log_probabilities=numbers[:, :longest],
        )

    def _planned(self, given: Inputs, options: GenerationOptions, ends: EndTokens) -> tuple[Tensor, NextTokens, Rules]:
        """What stands before the new tokens, [b, s] int64; the prompts as the model reads them; and what decides.

        Raises:
            ConfigError: If it cannot be done.
        """
        model, pad = self.config, options.pad_token_id
        has_mask = given.attention_mask is not None or not isinstance(given.input_ids, Tensor)
        if not has_mask and pad is not None and pad not in options.eos_token_ids:
            given = replace(given, attention_mask=(given.input_ids != pad).long())
        check_prompts(given, model, options)
        for sequence in options.stop_sequences:
            check_in_vocabulary("stop_sequences", sequence, model.vocab_size)
        strings = stop_strings(options.stop_texts, options.tokenizer) if options.stop_texts else None
        if strings is not None:  # its last row stands for no token
            check_in_vocabulary("tokenizer", (len(strings.embedding_vec) - 2,), model.vocab_size)
        if model.architecture == "t5":
            before, mask = decoder_start(given, model.decoder_start_token_id if ends.start is None else ends.start)
            prompts = with_source(aligned(before, mask), given)
        else:
            before, mask = given.input_ids.long(), given.attention_mask
            if options.bos_token_id is not None:
                check_in_vocabulary("bos_token_id", (options.bos_token_id,), model.vocab_size)
                before, mask = with_first_token(before, mask, options.bos_token_id)
            prompts = aligned(before, mask)
        options = check_length(before, mask, model, options)
        if options.static_cache is None and not self.is_own:
            options = replace(options, static_cache=False)
        options = replace(options, static_cache=uses_static_cache(options, model, self.device))
        return before, prompts, Rules(options=options, vocab_size=model.vocab_size, strings=strings)

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(self, rows: Inputs, *, is_shared: bool = True, last_stage_only: bool = False) -> Tensor | None:
        """Logits of rows: fp32, on the device of the weights.

        They are ``[b, s, vocab_size]``; s is the length of the decoder's rows if there is a decoder. Those of a BERT's
        other heads are ``[b, num_labels]`` (``sequence_classification``) or ``[b, s, num_labels]``.

        Args:
            rows: The same on every rank; or none, perhaps, of a copy.
            is_shared: As for ``generate``.
            last_stage_only: Give them to the ranks of the last pipeline stage alone, which have them anyway, and None
                to the others.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if the model cannot read a row.
        """
        on_host, counts = rows.each(Tensor.cpu), [0]
        if is_shared:
            on_all_ranks_alike(lambda: check_rows(on_host, self.config))
            _check_agreement("logits", *vars(on_host).values())
            own, counts = self._dealt(len(rows))
            rows = rows.each(lambda tensor: tensor[own])
        elif len(rows) > 0:
            check_rows(on_host, self.config)
        is_kept = self.topology.is_last_stage or not last_stage_only
        model, shape = self.config, [len(rows), rows.length]
        predicts_tokens = model.architecture != "bert" or model.has_output_layer
        if not predicts_tokens and model.task == "sequence_classification":
            shape = [len(rows)]
        shape.append(model.vocab_size if predicts_tokens else model.num_labels)
        # Every rank must enter, also those of a copy without rows: weights may still be on their way to it.
        with inference_mode(self.chunks) as models:
            logits = torch.empty(shape if is_kept else 0, dtype=torch.float32, device=self.device)
            if len(rows) > 0:
                batch = rows.each(lambda tensor: tensor.long().to(self.device)).next_tokens()
                computed = Stages(models, self.topology, batch).first(every_position=True)
                if computed is not None:
                    logits = (computed[..., : model.vocab_size] if predicts_tokens else computed).contiguous()
                if self.topology.parallel.pp > 1 and not last_stage_only:
                    dist.broadcast(logits, self.topology.last_stage, group=self.topology.pp_group)
            # A data-parallel group lies within one stage.
            return gathered_rows(logits, counts, self.topology.dp_group) if is_kept else None

    @property
    def _together(self) -> Topology:
        """This rank's place among those that compute the same rows: of one copy of the model, or of all copies.

        Where experts are spread over copies, these need each other in every layer. So all of them compute all rows,
        and one rank chooses all tokens: none then ends before another.
        """
        topology = self.topology
        if topology.parallel.ep_is_within_a_copy:
            return topology
        world = dist.group.WORLD
        assert world is not None
        return replace(topology, mp_group=world)

    def _dealt(self, rows: int) -> tuple[slice, list[int]]:
        """Which rows this copy of the model takes, and how many each copy; all rows if copies cannot go on alone."""
        if self._together is not self.topology:
            return slice(0, rows), [rows]
        dp, rank = self.topology.dp, self.topology.dp_rank
        bounds = [rows * copy // dp for copy in range(dp + 1)]
        return slice(bounds[rank], bounds[rank + 1]), [bounds[copy + 1] - bounds[copy] for copy in range(dp)]


def _check_agreement(settings: object, *tensors: Tensor | None) -> None:
    """Every rank must have been asked for the same, or they would wait for each other forever; every rank must call.

    Args:
        settings: Compared by what it looks like as text.
        tensors: On the host.

    Raises:
        ConfigError: On all ranks, if the prompts or the options differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr((settings, [None if t is None else t.shape for t in tensors])).encode())
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.long().contiguous().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ConfigError(f"rank {different[0]} asks with other prompts or options than rank 0; give all the same")
