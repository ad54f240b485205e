"""Distributed generation and logits: greedy decoding, sampling and beam search, with rows sharded over replicas.

All ranks compare their arguments first; shared rows are sharded over the data-parallel replicas and gathered in order.
Decoding runs the prompts once, then one token of each row at a time. One rank of each replica chooses the tokens and
broadcasts them. Logits processors are transformers' own, and ours for what they lack. Neither they nor the stop
criteria synchronize host and device.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightning_megatron.engine.collectives import all_gather_rows, call_on_all_ranks
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.inputs import check_rows
from lightning_megatron.generate.layout import inputs_for_logits
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import (
    ModelInputs,
    Stages,
    inference_mode,
    uses_static_cache,
)
from lightning_megatron.generate.request import Request, build_request
from lightning_megatron.generate.special_tokens import SpecialTokens
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch

STEPS_BETWEEN_EXIT_CHECKS = 8
"""Decoding steps between checks for early exit; each check synchronizes host and device."""

_EXCLUDED = -1.0e9
"""Score of candidates that must not be chosen; finite, so that sums of it stay comparable."""

ENDED = -1
"""Token id passed to ``on_tokens`` for finished rows."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Generated sequences and their scores; the same on every rank."""

    sequences: Tensor
    """[b, s + new], int64: the prompts and their completions, padded after the end of rows that ended before others.
    For a T5 the decoder's prompts and completions, [b, s_dec + new]."""
    scores: Tensor
    """[b], fp32: the score that ranks the beams of a beam search; otherwise the sum of the log-probabilities."""
    log_probabilities: Tensor
    """[b, new], fp32: log-probability of each new token under the model, before temperature and other logits
    processors; 0 after the end of a row."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A distributed model. Unless a method says otherwise, all ranks of the world must make the same calls."""

    chunks: Sequence[torch.nn.Module]
    """This rank's model chunks, wrapped or not."""
    config: ModelConfig
    """Config of the model."""
    topology: Topology
    """Layout and position of this rank."""
    device: torch.device
    """Device of the chunks."""
    is_own: bool = True
    """Whether this package built the chunks. A user's own chunks may do anything in a step, so they are captured as
    CUDA graphs only on request."""

    # ---- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Mapping[str, Tensor | None],
        arguments: Mapping[str, Any],
        special: SpecialTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
        *,
        is_shared: bool = True,
    ) -> GenerationOutput:
        """Generate completions of prompts, on the device of ``input_ids``.

        Args:
            inputs: The prompts, the same on every rank; rows are sharded over the replicas.
            arguments: Fields of ``GenerationOptions``, as for ``inputs.build_request``.
            special: The model's special tokens.
            on_tokens: As for ``decode``.
            is_shared: Whether all replicas have the same rows and share them; else each replica has rows of its own,
                and only the ranks of one replica must make the same call.

        Raises:
            ConfigError: On all these ranks, before anything runs, if a prompt cannot be continued.
        """
        device = getattr(inputs["input_ids"], "device", self.device)
        on_host = _on_host(inputs)
        build = partial(build_request, on_host, arguments, self.config, special, on_tokens)
        request = call_on_all_ranks(build) if is_shared else build()
        options = request.options
        if is_shared:
            settings = (options, request.eos_token_ids, request.pad_token_id)
            _check_agreement(
                settings,
                *on_host.values(),
                request.stop_strings and request.stop_strings.embedding_vec,
            )
        static_cache = options.static_cache if self.is_own else bool(options.static_cache)
        static = uses_static_cache(static_cache, request.max_new_tokens, self.config, self.device)
        num_sequences = options.num_return_sequences
        copies = num_sequences if options.num_beams == 1 else 1
        num_rows = len(request.prefix) * copies
        rows, counts = self._shard_rows(num_rows) if is_shared else (slice(0, num_rows), [])
        values = torch.empty((0, request.max_new_tokens + 1), device=self.device)
        tokens = values.long()
        with inference_mode(self.chunks) as models:
            if rows.stop > rows.start:
                prompts = request.prompts.expand(rows, copies, self.device)
                local = replace(request, prompts=prompts)
                uniform = uniform_numbers(options.seed, request.max_new_tokens, num_rows)[:, rows]
                tokens, values = decode(
                    models, self._replica, local, uniform, on_tokens, static=static
                )
            if is_shared:
                counts = [count * num_sequences // copies for count in counts]
                group = self.topology.dp_group
                tokens = all_gather_rows(tokens, counts, group)
                values = all_gather_rows(values, counts, group)
        tokens = tokens.to(device)
        values = values.to(device)
        longest = int(tokens[:, -1].max())
        prefix = request.prefix.repeat_interleave(num_sequences, dim=0).to(device)
        return GenerationOutput(
            sequences=torch.cat((prefix, tokens[:, :longest]), dim=-1),
            scores=values[:, -1],
            log_probabilities=values[:, :longest],
        )

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(
        self,
        inputs: Mapping[str, Tensor | None],
        *,
        is_shared: bool = True,
        last_stage_only: bool = False,
    ) -> Tensor | None:
        """Compute logits of rows: fp32, on the device of the weights.

        Their shape is ``[b, s, vocab_size]``, where s is the length of the decoder's rows if there is a decoder. A
        BERT's other heads return ``[b, num_labels]`` (``sequence_classification``) or ``[b, s, num_labels]``.

        Args:
            inputs: The rows, the same on every rank; if they are not shared, a replica may have none.
            is_shared: As for ``generate``.
            last_stage_only: Return them on the ranks of the last pipeline stage only, where they are computed, and None
                on the other ranks.

        Raises:
            ConfigError: On all these ranks, before anything runs, if the model cannot read a row.
        """
        local = _on_host(inputs)
        counts = [0]
        if is_shared:
            call_on_all_ranks(partial(check_rows, local, self.config))
            _check_agreement("logits", *local.values())
            rows, counts = self._shard_rows(len(local["input_ids"]))
            local = {name: tensor[rows] for name, tensor in local.items()}
        elif len(local["input_ids"]) > 0:
            check_rows(local, self.config)
        is_kept = self.topology.is_last_stage or not last_stage_only
        model = self.config
        shape = list(local.get("decoder_input_ids", local["input_ids"]).shape)
        predicts_tokens = model.has_output_layer
        if not predicts_tokens and model.task == "sequence_classification":
            del shape[1]
        shape.append(model.vocab_size if predicts_tokens else model.num_labels)
        # Every rank must enter, also in a replica without rows: all-gathers of its parameters may be pending.
        with inference_mode(self.chunks) as models:
            logits = torch.empty(
                shape if is_kept else 0,
                dtype=torch.float32,
                device=self.device,
            )
            if shape[0] > 0:
                batch = inputs_for_logits(
                    {name: tensor.long().to(self.device) for name, tensor in local.items()}
                )
                computed = Stages(models, self.topology, batch).prefill(every_position=True)
                if computed is not None:
                    logits = (
                        computed[..., : model.vocab_size] if predicts_tokens else computed
                    ).contiguous()
                if self.topology.parallel.pp > 1 and not last_stage_only:
                    dist.broadcast(logits, self.topology.last_stage, group=self.topology.pp_group)
            # A data-parallel group lies within one stage.
            return all_gather_rows(logits, counts, self.topology.dp_group) if is_kept else None

    @property
    def _replica(self) -> Topology:
        """Topology of the ranks that compute the same rows: those of one replica, or of all replicas.

        Experts that are spread over replicas make these communicate in every layer. So all of them compute all rows,
        and one rank chooses all tokens: none then ends before another.
        """
        topology = self.topology
        if topology.parallel.ep == 1 or topology.parallel.ep_is_within_replica:
            return topology
        world = dist.group.WORLD
        assert world is not None
        return replace(topology, mp_group=world)

    def _shard_rows(self, rows: int) -> tuple[slice, list[int]]:
        """Slice of rows for this replica, and rows per replica; all rows if experts are spread over replicas."""
        if self._replica is not self.topology:
            return slice(0, rows), [rows]
        dp = self.topology.dp
        rank = self.topology.dp_rank
        bounds = [rows * replica // dp for replica in range(dp + 1)]
        counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        return slice(bounds[rank], bounds[rank + 1]), counts


def _on_host(inputs: Mapping[str, Tensor | None]) -> Batch:
    """Move the inputs that are not None to the host; other types than tensors are refused later, on all ranks."""
    on_host: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            on_host[name] = value.cpu()
        elif value is not None or name == "input_ids":
            on_host[name] = value
    return on_host


def _check_agreement(settings: object, *tensors: Tensor | None) -> None:
    """Raise on every rank if prompts or options differ between ranks, which would deadlock. Collective over the world.

    Args:
        settings: Compared by its ``repr``.
        tensors: On the host.

    Raises:
        ConfigError: On all ranks, if the prompts or the options differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(
        repr((settings, [None if t is None else t.shape for t in tensors])).encode()
    )
    for tensor in tensors:
        if tensor is not None:
            digest.update(tensor.long().contiguous().numpy().tobytes())
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise ConfigError(
            f"rank {different[0]} has other prompts or options than rank 0; give every rank the same"
        )


# ---- decoding -------------------------------------------------------------------------------------------------------


def decode(
    models: Sequence[Any],
    topology: Topology,
    request: Request,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
    *,
    static: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generate completions for the rows of one replica; all its ranks must make the same call, and get the same result.

    Args:
        models: This rank's unwrapped chunks, in ``pipeline.inference_mode``.
        topology: Layout and position of this rank.
        request: The prompts, on the device, and how tokens are chosen.
        uniform: Random number for each token if tokens are sampled: [max_new_tokens, b].
        on_tokens: Called with the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
        static: As for ``Stages``.

    Returns:
        Two tensors, int64 and fp32, of shape [b * num_return_sequences, max_new_tokens + 1]. The first has the new
        tokens, padded after the end of a row, and in the last column the row's number of tokens. The second has their
        log-probabilities before temperature and other logits processors (0 after the end), and in the last column the
        row's score.
    """
    prompts = request.prompts
    max_new_tokens = request.max_new_tokens
    num_beams = request.options.num_beams
    device = prompts.tokens.device
    rows = len(prompts.tokens) * num_beams
    can_end = num_beams > 1 or request.can_end
    stages = Stages(models, topology, prompts, max_new_tokens, static=static)
    chooser: _Sampler | BeamSearch | None = None
    if stages.chooses_tokens:
        if num_beams > 1:
            chooser = BeamSearch(request)
        else:
            chooser = _Sampler(request, uniform.to(device))
    logits = stages.prefill()
    if num_beams > 1:
        parents = torch.arange(len(prompts.tokens), device=device).repeat_interleave(num_beams)
        stages.select_rows(parents)
        if logits is not None:
            logits = logits[parents]
    for step in range(max_new_tokens):
        progress.tick()
        message = torch.empty(
            2 * rows + 1,
            dtype=torch.long,
            device=device,
        )
        if chooser is not None:
            assert logits is not None
            message = chooser.advance(logits, step)
        message = stages.broadcast(message)
        parents = message[:rows]
        new_tokens = message[rows:-1]
        if on_tokens is not None:
            on_tokens(new_tokens.clone())
        check_exit = can_end and (step + 1) % STEPS_BETWEEN_EXIT_CHECKS == 0
        if step + 1 == max_new_tokens or (check_exit and bool(message[-1])):
            break
        if num_beams > 1:
            stages.select_rows(parents)
        # Finished rows, whose id is ``ENDED``, are fed token 0.
        logits = stages.decode(new_tokens.clamp(min=0))
    if chooser is not None:
        tokens, values = chooser.best()
    else:
        num_rows = len(prompts.tokens)
        if num_beams > 1:
            num_rows *= request.options.num_return_sequences
        values = torch.empty(num_rows, max_new_tokens + 1, device=device)
        tokens = values.long()
    return stages.broadcast(tokens), stages.broadcast(values)


class _Sampler:
    """Greedy decoding and sampling on the choosing rank: each row on its own."""

    def __init__(self, request: Request, uniform: Tensor) -> None:
        prompts = request.prompts
        self._vocab_size = request.vocab_size
        self._pad_token_id = request.pad_token_id
        rows, self._width = prompts.tokens.shape
        self._uniform = uniform if request.samples else None
        self._processors = logits_processors(request)
        self._stops = StopCriteria(request) if request.can_end else None
        new = prompts.tokens.new_zeros(rows, request.max_new_tokens)
        # Includes tokens chosen after the end of a row.
        self._sequences = torch.cat((fill_padding(prompts), new), dim=-1)
        # Under the model, before logits processors.
        self._log_probabilities = torch.zeros(new.shape, device=new.device)
        self._parents = torch.arange(rows, device=new.device)
        self._lengths = torch.full_like(self._parents, request.max_new_tokens)
        self._finished = torch.zeros_like(self._parents, dtype=torch.bool)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Append a token to each row.

        Args:
            logits: [n, padded vocabulary], for all n = b * num_beams rows.
            step: Index of the new token, from 0.

        Returns:
            [2 * n + 1], int64: which of the former rows each row continues, its new token (``ENDED`` if it was finished
            before), and 1 if nothing will change any more.
        """
        raw = logits[:, : self._vocab_size]
        scores = raw
        position = self._width + step
        for processor in self._processors:
            scores = processor(self._sequences[:, :position], scores)
        if self._uniform is None:
            tokens = scores.argmax(-1)
        else:
            tokens = sample_tokens(scores, self._uniform[step])
        self._sequences[:, position] = tokens
        chosen = raw.gather(-1, tokens[:, None])[:, 0]
        self._log_probabilities[:, step] = chosen - raw.logsumexp(-1)
        reported = tokens.masked_fill(self._finished, ENDED)
        if self._stops is not None:
            new_tokens = self._sequences[:, self._width : position + 1]
            ends = self._stops.are_met(new_tokens) & ~self._finished
            self._lengths.masked_fill_(ends, step + 1)
            self._finished |= ends
        all_finished = self._finished.all()[None].long()
        return torch.cat((self._parents, reported, all_finished))

    def best(self) -> tuple[Tensor, Tensor]:
        """The sequences and their log-probabilities, as ``decode`` returns them."""
        new = self._sequences[:, self._width :]
        is_after_end = torch.arange(new.shape[1], device=new.device) >= self._lengths[:, None]
        new = new.masked_fill(is_after_end, self._pad_token_id)
        values = self._log_probabilities.masked_fill(is_after_end, 0.0)
        with_lengths = torch.cat((new, self._lengths[:, None]), dim=-1)
        return with_lengths, torch.cat((values, values.sum(-1, keepdim=True)), dim=-1)


class BeamSearch:
    """Beam search: the best beams of each prompt, and the best complete sequences found so far.

    The rules are those of Hugging Face's ``generate`` (transformers 5.23, generation/utils.py, ``_beam_search``), so
    that the same sequences come out: of all continuations of a prompt's beams the best are candidates, more of them
    than there are beams, so that enough are left when some of them end; only those among the best ``num_beams`` may
    complete a sequence.
    """

    def __init__(self, request: Request) -> None:
        """Start with one beam per prompt; its other beams are copies that must not be chosen.

        Args:
            request: The prompts, on the device, and how tokens are chosen.
        """
        options = request.options
        prompts = request.prompts
        self._vocab_size = request.vocab_size
        self._options = options
        self._max_new_tokens = request.max_new_tokens
        rows = len(prompts.tokens)
        num_beams = options.num_beams
        device = prompts.tokens.device
        self._first_beams = torch.arange(rows, device=device)[:, None] * num_beams
        self._stops = StopCriteria(request)
        self._num_candidates = max(2, 1 + len(request.eos_token_ids)) * num_beams
        self._processors = logits_processors(request, copies=num_beams)
        self._prompts = fill_padding(prompts).repeat_interleave(num_beams, dim=0)
        shape = (rows, num_beams, request.max_new_tokens)
        self._growing = torch.full(
            shape,
            request.pad_token_id,
            dtype=torch.long,
            device=device,
        )
        self._growing_logs = torch.zeros(shape, device=device)
        self._growing_scores = torch.full((rows, num_beams), _EXCLUDED, device=device)
        self._growing_scores[:, 0] = 0.0
        self._complete = self._growing.clone()
        self._complete_logs = self._growing_logs.clone()
        self._complete_scores = torch.full((rows, num_beams), _EXCLUDED, device=device)
        self._complete_lengths = torch.zeros(
            (rows, num_beams),
            dtype=torch.long,
            device=device,
        )
        self._is_complete = torch.zeros(
            (rows, num_beams),
            dtype=torch.bool,
            device=device,
        )
        self._can_improve = torch.ones(
            (rows, 1),
            dtype=torch.bool,
            device=device,
        )

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Extend the beams by a token; as ``_Sampler.advance``."""
        num_beams = self._options.num_beams
        log_probs = logits[:, : self._vocab_size].float().log_softmax(-1)
        processed = log_probs
        if self._processors:
            input_ids = torch.cat((self._prompts, self._growing[:, :, :step].flatten(0, 1)), dim=-1)
            for processor in self._processors:
                processed = processor(input_ids, processed)
        sums = processed.view(*self._growing_scores.shape, -1) + self._growing_scores[..., None]
        # The best continuations of each prompt, best first.
        scores, indices = sums.flatten(1).topk(
            min(self._num_candidates, num_beams * self._vocab_size)
        )
        beams = indices // self._vocab_size
        tokens = indices % self._vocab_size
        sequences, logs = _gather(beams, self._growing, self._growing_logs)
        sequences[:, :, step] = tokens
        logs[:, :, step] = log_probs.view(len(beams), -1).gather(1, indices)
        ends = self._stops.are_met(sequences[:, :, : step + 1].flatten(0, 1)).view_as(tokens)
        if step + 1 == self._max_new_tokens:
            ends = torch.ones_like(ends)
        self._keep_complete(sequences, logs, scores, ends, step + 1)
        self._growing_scores, chosen = (scores + ends * _EXCLUDED).topk(num_beams)
        self._growing, self._growing_logs, beams, tokens = _gather(
            chosen, sequences, logs, beams, tokens
        )
        parents = (self._first_beams + beams).flatten()
        tokens = tokens.flatten()
        self._update_can_improve(step + 1)
        # If all candidates end, no beam is left to extend.
        self._can_improve &= ~ends.all()
        all_closed = self._is_closed().all().long()[None]
        return torch.cat((parents, tokens, all_closed))

    def best(self) -> tuple[Tensor, Tensor]:
        """The best complete sequences of each prompt and their log-probabilities, as ``decode`` returns them."""
        sequences = torch.cat((self._complete, self._complete_lengths[..., None]), dim=-1)
        values = torch.cat((self._complete_logs, self._complete_scores[..., None]), dim=-1)
        count = self._options.num_return_sequences
        return sequences[:, :count].flatten(0, 1), values[:, :count].flatten(0, 1)

    def _keep_complete(
        self, sequences: Tensor, logs: Tensor, scores: Tensor, ends: Tensor, length: int
    ) -> None:
        """Keep the best of the complete sequences and of the candidates that ``ends`` marks as complete."""
        num_beams = self._options.num_beams
        among_best = torch.arange(ends.shape[1], device=ends.device) < num_beams
        completes = ends & among_best
        scores = scores / length**self._options.length_penalty
        scores = scores + (~completes) * _EXCLUDED + self._is_closed() * _EXCLUDED
        lengths = torch.full_like(self._complete_lengths[:, :1], length).expand_as(scores)
        all_scores = torch.cat((self._complete_scores, scores), dim=1)
        self._complete_scores, chosen = all_scores.topk(num_beams)
        (
            self._complete,
            self._complete_logs,
            self._complete_lengths,
            self._is_complete,
        ) = _gather(
            chosen,
            torch.cat((self._complete, sequences), dim=1),
            torch.cat((self._complete_logs, logs), dim=1),
            torch.cat((self._complete_lengths, lengths), dim=1),
            torch.cat((self._is_complete, completes), dim=1),
        )

    def _update_can_improve(self, length: int) -> None:
        """Update whether the best beam of a prompt may still become better than the worst of its complete sequences."""
        options = self._options
        if options.early_stopping == "never" and options.length_penalty > 0.0:
            length = self._max_new_tokens
        best = self._growing_scores[:, :1] / length**options.length_penalty
        lowest = self._complete_scores.amin(dim=1, keepdim=True)
        worst = torch.where(self._is_complete, lowest, _EXCLUDED)
        self._can_improve = self._can_improve & (best > worst).any(dim=-1, keepdim=True)

    def _is_closed(self) -> Tensor:
        """[b, 1], bool: whether a prompt's complete sequences will not change any more."""
        has_enough = self._is_complete.all(dim=-1, keepdim=True) & (
            self._options.early_stopping is True
        )
        return ~self._can_improve | has_enough


def _gather(index: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Gather entries ``index`` [b, m] along dim 1 of each tensor, [b, n] or [b, n, ...]."""
    gathered = []
    for tensor in tensors:
        entries = index if tensor.dim() == 2 else index[..., None]
        gathered.append(tensor.take_along_dim(entries, dim=1))
    return gathered


# ---- logits processors, sampling and stop criteria -------------------------------------------------------------------


class NoRepeatNGrams(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of ``size`` tokens for the second time in a row's sequence.

    As transformers' ``NoRepeatNGramLogitsProcessor``, which loops over lists on the host; but padding forms no n-grams.
    """

    def __init__(self, size: int, padding: Tensor) -> None:
        """Set the size of n-grams and the padding.

        Args:
            size: Tokens of an n-gram, the forbidden one included.
            padding: [rows], columns of padding at the beginning of each row.
        """
        self._size = size
        self._padding = padding[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of the tokens that may follow the sequences [rows, length]."""
        width = input_ids.shape[1]
        size = self._size
        if width < size:
            return scores
        ngrams = input_ids.unfold(-1, size, 1)
        suffix = input_ids[:, None, width - size + 1 :]
        starts = torch.arange(ngrams.shape[1], device=input_ids.device)
        # Neither the n-gram nor the suffix it is compared with may contain padding.
        has_no_padding = (starts >= self._padding) & (width - size + 1 >= self._padding)
        is_repeated = (ngrams[..., :-1] == suffix).all(-1) & has_no_padding
        forbidden = torch.zeros(
            scores.shape,
            dtype=torch.int,
            device=scores.device,
        )
        # Added, not set: of n-grams with the same last token some are repeated and some are not.
        forbidden.scatter_add_(
            -1,
            ngrams[..., -1],
            is_repeated.int(),
        )
        return scores.masked_fill(forbidden > 0, -torch.inf)


class DecayingTopP(LogitsProcessor):
    """Top-p sampling whose p decays with each new token down to a bound, as in Megatron-LM's text generation."""

    def __init__(self, options: GenerationOptions, width: int) -> None:
        """Start with ``top_p`` after prompts of ``width`` tokens."""
        self._options = options
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of the tokens that may follow the sequences [rows, length]."""
        options = self._options
        step = input_ids.shape[1] - self._width
        top_p = max(options.top_p * options.top_p_decay**step, options.top_p_bound)
        kept: Tensor = TopPLogitsWarper(top_p)(input_ids, scores)
        return kept


def logits_processors(request: Request, copies: int = 1) -> list[LogitsProcessor]:
    """Logits processors in Hugging Face's order.

    First those that depend on the tokens so far; then, if tokens are sampled, those that shape their distribution.

    Args:
        request: The prompts, on the device, and how tokens are chosen.
        copies: Sequences per prompt, one after the other.
    """
    processors: list[LogitsProcessor] = []
    options = request.options
    prompts = request.prompts
    width = request.prompts.tokens.shape[1]
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size > 0:
        padding = width - prompts.is_token.sum(-1)
        processors.append(
            NoRepeatNGrams(options.no_repeat_ngram_size, padding.repeat_interleave(copies))
        )
    if request.min_new_tokens > 0 and request.eos_token_ids:
        ends = torch.tensor(request.eos_token_ids, device=prompts.tokens.device)
        processors.append(MinNewTokensLengthLogitsProcessor(width, request.min_new_tokens, ends))
    if not request.samples:
        return processors
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p_decay > 0.0:
        processors.append(DecayingTopP(options, width))
    elif 0.0 < options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors


def fill_padding(prompts: ModelInputs) -> Tensor:
    """Prompts for logits processors, [b, s]: padding repeats the last token, so that it changes nothing."""
    return torch.where(
        prompts.is_token == 1,
        prompts.tokens,
        prompts.tokens[:, -1:],
    )


def sample_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row, [b] int64, by inverting the cumulative distribution.

    Each row uses one random number, so the same numbers give the same tokens on every device and layout.

    Args:
        logits: [b, v].
        uniform: [b], float64, in [0, 1).
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could choose a last token of probability 0.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None] * total, below_total)
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # If the logits are NaN, the index found is beyond the last token.
    return tokens.clamp(max=logits.shape[-1] - 1)


def uniform_numbers(seed: int, steps: int, rows: int) -> Tensor:
    """Random numbers for all tokens of a call: [steps, rows], float64 in [0, 1), on the CPU, equal on all ranks."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(steps, rows, generator=generator, dtype=torch.float64)


class StopCriteria:
    """Stop criteria: end-of-sequence tokens, stop sequences and stop strings."""

    def __init__(self, request: Request) -> None:
        """Copy the tokens to the device once.

        Args:
            request: The prompts, on the device, and how tokens are chosen.
        """
        strings = request.stop_strings
        prompts = request.prompts
        self._sequences = [
            torch.tensor(sequence, device=prompts.tokens.device)
            for sequence in (
                *((token,) for token in request.eos_token_ids),
                *request.options.stop_sequences,
            )
        ]
        self._min_new_tokens = request.min_new_tokens
        self._strings = strings
        if strings is not None:
            # A stop string may begin in the prompt; padding becomes the index that stands for no token.
            prompt_ends = prompts.tokens.masked_fill(
                prompts.is_token == 0, len(strings.embedding_vec) - 1
            )
            self._prompt_ends = prompt_ends[:, -strings.maximum_token_len :]

    def are_met(self, new_tokens: Tensor) -> Tensor:
        """Whether each row ends with its last token: [b * n], bool.

        Args:
            new_tokens: [b * n, step], n sequences per prompt, without the prompt.
        """
        rows, length = new_tokens.shape
        ends = torch.zeros(rows, dtype=torch.bool, device=new_tokens.device)
        if length >= self._min_new_tokens:
            for sequence in self._sequences:
                if len(sequence) <= length:
                    ends |= (new_tokens[:, length - len(sequence) :] == sequence).all(dim=-1)
        if self._strings is not None:
            prompt_ends = self._prompt_ends.repeat_interleave(rows // len(self._prompt_ends), dim=0)
            tails = torch.cat(
                (prompt_ends, new_tokens[:, -self._strings.maximum_token_len :]), dim=-1
            )
            ends |= self._strings(tails, None)
        return ends
