"""Texts and logits of rows that the data-parallel copies of a model share, or that each copy has of its own.

All ranks check alike what they were asked; shared rows are dealt to the copies and gathered in order. Texts are decoded
token by token, greedy, sampling or by beam search: the prompts once, then a token of each text. One rank of each copy
chooses the tokens and tells the others. Logits processors are transformers' own, and ours for what they lack. Neither
they nor the criteria that end rows make the host wait for the device.
"""

from __future__ import annotations

import hashlib
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
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.inputs import Request, SpecialTokens, build_request, check_rows, whole_rows
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import NextTokens, Stages, inference_mode, uses_static_cache
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch

STEPS_BETWEEN_LOOKS = 8
"""After how many tokens the host asks the device whether all rows are finished; asking makes it wait."""

_HOPELESS = -1.0e9
"""Score of what must not be chosen; finite, so that sums of it stay comparable."""

ENDED = -1
"""What whoever watches the tokens gets for rows that are finished."""


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
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
        given: Mapping[str, Tensor | None],
        arguments: Mapping[str, Any],
        ends: SpecialTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
        *,
        is_shared: bool = True,
    ) -> GenerationOutput:
        """Prompts and what follows them, on the device of ``input_ids``.

        Args:
            given: The prompts, the same on every rank; rows are divided among the copies of the model.
            arguments: How tokens are chosen, as for ``inputs.build_request``.
            ends: The model's own.
            on_tokens: As for ``decode``.
            is_shared: Whether all copies of the model have the same rows and share them; else each copy has rows of its
                own, and only the ranks of one copy need call alike.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if a prompt cannot be continued.
        """
        device, on_host = getattr(given["input_ids"], "device", self.device), _on_host(given)
        asked = partial(build_request, on_host, arguments, self.config, ends, on_tokens)
        request = call_on_all_ranks(asked) if is_shared else asked()
        options = request.options
        if is_shared:
            said = (options, request.eos_token_ids, request.pad_token_id)
            _check_agreement(said, *on_host.values(), request.stop_strings and request.stop_strings.embedding_vec)
        asked_for = options.static_cache if self.is_own else bool(options.static_cache)
        static = uses_static_cache(asked_for, request.max_new_tokens, self.config, self.device)
        texts = options.num_return_sequences
        copies = texts if options.num_beams == 1 else 1
        count = len(request.prefix) * copies
        rows, counts = self._dealt(count) if is_shared else (slice(0, count), [])
        numbers = torch.empty((0, request.max_new_tokens + 1), device=self.device)
        written = numbers.long()
        with inference_mode(self.chunks) as models:
            if rows.stop > rows.start:
                own = replace(request, prompts=request.prompts.dealt(rows, copies, self.device))
                uniform = uniform_numbers(options.seed, request.max_new_tokens, count)[:, rows]
                written, numbers = decode(models, self._together, own, uniform, on_tokens, static=static)
            if is_shared:
                counts, group = [each * texts // copies for each in counts], self.topology.dp_group
                written, numbers = all_gather_rows(written, counts, group), all_gather_rows(numbers, counts, group)
        written, numbers = written.to(device), numbers.to(device)
        longest = int(written[:, -1].max())
        before = request.prefix.repeat_interleave(texts, dim=0).to(device)
        return GenerationOutput(
            sequences=torch.cat((before, written[:, :longest]), dim=-1),
            scores=numbers[:, -1],
            log_probabilities=numbers[:, :longest],
        )

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(
        self, given: Mapping[str, Tensor | None], *, is_shared: bool = True, last_stage_only: bool = False
    ) -> Tensor | None:
        """Logits of rows: fp32, on the device of the weights.

        They are ``[b, s, vocab_size]``; s is the length of the decoder's rows if there is a decoder. Those of a BERT's
        other heads are ``[b, num_labels]`` (``sequence_classification``) or ``[b, s, num_labels]``.

        Args:
            given: The rows, the same on every rank; or none, perhaps, of a copy.
            is_shared: As for ``generate``.
            last_stage_only: Give them to the ranks of the last pipeline stage alone, which have them anyway, and None
                to the others.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if the model cannot read a row.
        """
        own, counts = _on_host(given), [0]
        if is_shared:
            call_on_all_ranks(partial(check_rows, own, self.config))
            _check_agreement("logits", *own.values())
            rows, counts = self._dealt(len(own["input_ids"]))
            own = {name: each[rows] for name, each in own.items()}
        elif len(own["input_ids"]) > 0:
            check_rows(own, self.config)
        is_kept = self.topology.is_last_stage or not last_stage_only
        model, shape = self.config, list(own.get("decoder_input_ids", own["input_ids"]).shape)
        predicts_tokens = model.has_output_layer
        if not predicts_tokens and model.task == "sequence_classification":
            del shape[1]
        shape.append(model.vocab_size if predicts_tokens else model.num_labels)
        # Every rank must enter, also those of a copy without rows: weights may still be on their way to it.
        with inference_mode(self.chunks) as models:
            logits = torch.empty(shape if is_kept else 0, dtype=torch.float32, device=self.device)
            if shape[0] > 0:
                read = whole_rows({name: each.long().to(self.device) for name, each in own.items()})
                computed = Stages(models, self.topology, read).first(every_position=True)
                if computed is not None:
                    logits = (computed[..., : model.vocab_size] if predicts_tokens else computed).contiguous()
                if self.topology.parallel.pp > 1 and not last_stage_only:
                    dist.broadcast(logits, self.topology.last_stage, group=self.topology.pp_group)
            # A data-parallel group lies within one stage.
            return all_gather_rows(logits, counts, self.topology.dp_group) if is_kept else None

    @property
    def _together(self) -> Topology:
        """This rank's place among those that compute the same rows: of one copy of the model, or of all copies.

        Where experts are spread over copies, these need each other in every layer. So all of them compute all rows,
        and one rank chooses all tokens: none then ends before another.
        """
        topology = self.topology
        if topology.parallel.ep == 1 or topology.parallel.ep_is_within_replica:
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


def _on_host(given: Mapping[str, Tensor | None]) -> Batch:
    """What is there, on the host; what is no tensor is refused later, on all ranks."""
    found: dict[str, Any] = {name: each for name, each in given.items() if each is not None or name == "input_ids"}
    return {name: each.cpu() if isinstance(each, Tensor) else each for name, each in found.items()}


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


# ---- token by token -------------------------------------------------------------------------------------------------


def decode(
    models: Sequence[Any],
    topology: Topology,
    request: Request,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
    *,
    static: bool = False,
) -> tuple[Tensor, Tensor]:
    """Continue the rows of one copy of the model; all its ranks must call alike, and get the same.

    Args:
        models: This rank's plain chunks, in ``pipeline.inference_mode``.
        topology: This rank's place.
        request: The rows, on the device, and what decides about the tokens.
        uniform: What decides about each token if tokens are drawn: [max_new_tokens, b].
        on_tokens: Gets the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
        static: As for ``Stages``.

    Returns:
        The new tokens, the padding token behind the end of a row, and last the number of tokens up to it:
        [b * num_return_sequences, max_new_tokens + 1], int64. And what the model gives to each of them before
        temperature and the like (log-probability; 0 behind the end), and last the row's score: the same shape, fp32.
    """
    prompts, most, count = request.prompts, request.max_new_tokens, request.options.num_beams
    device, rows = prompts.tokens.device, len(prompts.tokens) * count
    can_end = count > 1 or request.can_end
    stages = Stages(models, topology, prompts, most, static=static)
    texts: _Rows | Beams | None = None
    if stages.chooses:
        texts = Beams(request) if count > 1 else _Rows(request, uniform.to(device))
    logits = stages.first()
    if count > 1:
        parents = torch.arange(len(prompts.tokens), device=device).repeat_interleave(count)
        stages.select(parents)
        logits = None if logits is None else logits[parents]
    for step in range(most):
        progress.ticks += 1
        message = torch.empty(2 * rows + 1, dtype=torch.long, device=device)
        if texts is not None:
            assert logits is not None
            message = texts.advance(logits, step)
        message = stages.told(message)
        parents, chosen = message[:rows], message[rows:-1]
        if on_tokens is not None:
            on_tokens(chosen.clone())
        looks = can_end and (step + 1) % STEPS_BETWEEN_LOOKS == 0
        if step + 1 == most or (looks and bool(message[-1])):
            break
        if count > 1:
            stages.select(parents)
        # Finished rows read any token.
        logits = stages.next(chosen.clamp(min=0))
    returned = len(prompts.tokens) * (request.options.num_return_sequences if count > 1 else 1)
    numbers = torch.empty(returned, most + 1, device=device)
    found, numbers = (numbers.long(), numbers) if texts is None else texts.best()
    return stages.told(found), stages.told(numbers)


class _Rows:
    """Greedy decoding and sampling, on the one rank that chooses: each row on its own."""

    def __init__(self, request: Request, uniform: Tensor) -> None:
        prompts, self._vocab_size, self._filling = request.prompts, request.vocab_size, request.pad_token_id
        rows, self._width = prompts.tokens.shape
        self._uniform = uniform if request.samples else None
        self._processors = logits_processors(request)
        self._stops = Stops(request) if request.can_end else None
        new = prompts.tokens.new_zeros(rows, request.max_new_tokens)
        # What was chosen behind the end of a row, too.
        self._texts = torch.cat((readable(prompts), new), dim=-1)
        # Before anything made them likelier or rarer.
        self._log_probabilities = torch.zeros(new.shape, device=new.device)
        self._parents = torch.arange(rows, device=new.device)
        self._lengths = torch.full_like(self._parents, request.max_new_tokens)
        self._finished = torch.zeros_like(self._parents, dtype=torch.bool)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Let the texts grow by a token.

        Args:
            logits: Of all n = b * num_beams texts, [n, padded vocabulary].
            step: Which new token it is, from 0.

        Returns:
            [2 * n + 1], int64: which of the former texts the next ones continue, their last tokens (``ENDED`` of rows
            that were finished before), and 1 if nothing will change any more.
        """
        given = scores = logits[:, : self._vocab_size]
        place = self._width + step
        for processor in self._processors:
            scores = processor(self._texts[:, :place], scores)
        chosen = scores.argmax(-1) if self._uniform is None else sample_tokens(scores, self._uniform[step])
        self._texts[:, place] = chosen
        self._log_probabilities[:, step] = given.gather(-1, chosen[:, None])[:, 0] - given.logsumexp(-1)
        shown = chosen.masked_fill(self._finished, ENDED)
        if self._stops is not None:
            ends = self._stops.at(self._texts[:, self._width : place + 1]) & ~self._finished
            self._lengths.masked_fill_(ends, step + 1)
            self._finished |= ends
        return torch.cat((self._parents, shown, self._finished.all()[None].long()))

    def best(self) -> tuple[Tensor, Tensor]:
        """The texts and their log-probabilities, as ``decode`` returns them."""
        new = self._texts[:, self._width :]
        is_behind = torch.arange(new.shape[1], device=new.device) >= self._lengths[:, None]
        new = new.masked_fill(is_behind, self._filling)
        numbers = self._log_probabilities.masked_fill(is_behind, 0.0)
        with_lengths = torch.cat((new, self._lengths[:, None]), dim=-1)
        return with_lengths, torch.cat((numbers, numbers.sum(-1, keepdim=True)), dim=-1)


class Beams:
    """Beam search: the best beginnings of each text, and the complete texts that they have become.

    The rules are those of Hugging Face's ``generate`` (transformers 5.23, generation/utils.py, ``_beam_search``), so
    that the same texts come out: of all continuations of a row's beams the best are candidates, more of them than there
    are beams, so that enough are left when some of them end; only those among the best ``num_beams`` may end a text.
    """

    def __init__(self, request: Request) -> None:
        """One beam per row, the prompt; the others are copies of it that must not be chosen.

        Args:
            request: The rows, on the device, and what decides about the tokens.
        """
        options, prompts, self._vocab_size = request.options, request.prompts, request.vocab_size
        self._options, self._most = options, request.max_new_tokens
        rows, count, device = len(prompts.tokens), options.num_beams, prompts.tokens.device
        self._first_beams = torch.arange(rows, device=device)[:, None] * count
        self._stops = Stops(request)
        self._num_candidates = max(2, 1 + len(request.eos_token_ids)) * count
        self._processors = logits_processors(request, copies=count)
        self._prompts = readable(prompts).repeat_interleave(count, dim=0)
        shape = (rows, count, request.max_new_tokens)
        self._growing = torch.full(shape, request.pad_token_id, dtype=torch.long, device=device)
        self._growing_logs = torch.zeros(shape, device=device)
        self._growing_scores = torch.full((rows, count), _HOPELESS, device=device)
        self._growing_scores[:, 0] = 0.0
        self._complete, self._complete_logs = self._growing.clone(), self._growing_logs.clone()
        self._complete_scores = torch.full((rows, count), _HOPELESS, device=device)
        self._complete_lengths = torch.zeros((rows, count), dtype=torch.long, device=device)
        self._is_complete = torch.zeros((rows, count), dtype=torch.bool, device=device)
        self._can_improve = torch.ones((rows, 1), dtype=torch.bool, device=device)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Let the beams grow by a token; as ``_Rows.advance``."""
        count = self._options.num_beams
        given = logits[:, : self._vocab_size].float().log_softmax(-1)
        changed = given
        if self._processors:
            so_far = torch.cat((self._prompts, self._growing[:, :, :step].flatten(0, 1)), dim=-1)
            for processor in self._processors:
                changed = processor(so_far, changed)
        sums = changed.view(*self._growing_scores.shape, -1) + self._growing_scores[..., None]
        # The best continuations of each row, best first.
        scores, places = sums.flatten(1).topk(min(self._num_candidates, count * self._vocab_size))
        beams, tokens = places // self._vocab_size, places % self._vocab_size
        texts, logs = _taken(beams, self._growing, self._growing_logs)
        texts[:, :, step] = tokens
        logs[:, :, step] = given.view(len(beams), -1).gather(1, places)
        ends = self._stops.at(texts[:, :, : step + 1].flatten(0, 1)).view_as(tokens)
        if step + 1 == self._most:
            ends = torch.ones_like(ends)
        self._complete_texts(texts, logs, scores, ends, step + 1)
        self._growing_scores, chosen = (scores + ends * _HOPELESS).topk(count)
        self._growing, self._growing_logs, beams, tokens = _taken(chosen, texts, logs, beams, tokens)
        parents, tokens = (self._first_beams + beams).flatten(), tokens.flatten()
        self._look_ahead(step + 1)
        # With every candidate at its end there is nothing left to grow.
        self._can_improve &= ~ends.all()
        return torch.cat((parents, tokens, self._are_closed().all().long()[None]))

    def best(self) -> tuple[Tensor, Tensor]:
        """The best complete texts of each row, and what ranks them."""
        texts = torch.cat((self._complete, self._complete_lengths[..., None]), dim=-1)
        numbers = torch.cat((self._complete_logs, self._complete_scores[..., None]), dim=-1)
        count = self._options.num_return_sequences
        return texts[:, :count].flatten(0, 1), numbers[:, :count].flatten(0, 1)

    def _complete_texts(self, texts: Tensor, logs: Tensor, scores: Tensor, ends: Tensor, length: int) -> None:
        """Keep the best of the complete texts and of those that ``ends`` just now."""
        count = self._options.num_beams
        among_best = torch.arange(ends.shape[1], device=ends.device) < count
        completes = ends & among_best
        scores = scores / length**self._options.length_penalty
        scores = scores + (~completes) * _HOPELESS + self._are_closed() * _HOPELESS
        lengths = torch.full_like(self._complete_lengths[:, :1], length).expand_as(scores)
        self._complete_scores, chosen = torch.cat((self._complete_scores, scores), dim=1).topk(count)
        before = (self._complete, self._complete_logs, self._complete_lengths, self._is_complete)
        all_texts = (torch.cat(pair, dim=1) for pair in zip(before, (texts, logs, lengths, completes), strict=True))
        self._complete, self._complete_logs, self._complete_lengths, self._is_complete = _taken(chosen, *all_texts)

    def _look_ahead(self, length: int) -> None:
        """Whether the best beam of a row may still become better than the worst of its complete texts."""
        options = self._options
        longest = options.early_stopping == "never" and options.length_penalty > 0.0
        best = self._growing_scores[:, :1] / (self._most if longest else length) ** options.length_penalty
        worst = torch.where(self._is_complete, self._complete_scores.amin(dim=1, keepdim=True), _HOPELESS)
        self._can_improve = self._can_improve & (best > worst).any(dim=-1, keepdim=True)

    def _are_closed(self) -> Tensor:
        """[b, 1], bool: whether a row's complete texts will not change any more."""
        has_enough = self._is_complete.all(dim=-1, keepdim=True) & (self._options.early_stopping is True)
        return ~self._can_improve | has_enough


def _taken(index: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Of each tensor [b, n] or [b, n, ...] what ``index`` [b, m] says of each row."""
    return [x.take_along_dim(index if x.dim() == 2 else index[..., None], dim=1) for x in tensors]


# ---- how tokens are chosen -------------------------------------------------------------------------------------------


class NoRepeatNGrams(LogitsProcessor):
    """Rules out tokens that would end a run of ``size`` tokens for the second time in a row.

    As transformers' ``NoRepeatNGramLogitsProcessor``, which loops over lists on the host; but padding, which is no
    text, forms no runs.
    """

    def __init__(self, size: int, padding: Tensor) -> None:
        """Set what a run is.

        Args:
            size: Tokens of a run, the forbidden one included.
            padding: [rows], how many columns of padding each row begins with.
        """
        self._size = size
        self._padding = padding[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of what may follow the texts [rows, length]."""
        width, size = input_ids.shape[1], self._size
        if width < size:
            return scores
        runs = input_ids.unfold(-1, size, 1)
        ending = input_ids[:, None, width - size + 1 :]
        starts = torch.arange(runs.shape[1], device=input_ids.device)
        # What is compared lies in the text as a whole, or has a token of padding.
        is_text = (starts >= self._padding) & (width - size + 1 >= self._padding)
        is_repeated = (runs[..., :-1] == ending).all(-1) & is_text
        forbidden = torch.zeros(scores.shape, dtype=torch.int, device=scores.device)
        # Added, not set: of runs with the same last token some are repeated and some are not.
        forbidden.scatter_add_(-1, runs[..., -1], is_repeated.int())
        return scores.masked_fill(forbidden > 0, -torch.inf)


class DecayingTopP(LogitsProcessor):
    """Top-p whose p shrinks with each new token down to a bound, as in Megatron-LM's text generation."""

    def __init__(self, options: GenerationOptions, width: int) -> None:
        """Begin with the whole ``top_p`` behind prompts of ``width`` tokens."""
        self._options = options
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of what may follow the texts [rows, length]."""
        options, step = self._options, input_ids.shape[1] - self._width
        top_p = max(options.top_p * options.top_p_decay**step, options.top_p_bound)
        kept: Tensor = TopPLogitsWarper(top_p)(input_ids, scores)
        return kept


def logits_processors(request: Request, copies: int = 1) -> list[LogitsProcessor]:
    """What makes tokens likelier, rarer or impossible, in Hugging Face's order.

    By the text so far; and, where tokens are drawn, what shapes the distribution that they are drawn from.

    Args:
        request: The prompts, on the device, and what decides about the tokens.
        copies: Texts that grow from each prompt, one after the other.
    """
    processors: list[LogitsProcessor] = []
    options, prompts, width = request.options, request.prompts, request.prompts.tokens.shape[1]
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size > 0:
        padding = width - prompts.is_token.sum(-1)
        processors.append(NoRepeatNGrams(options.no_repeat_ngram_size, padding.repeat_interleave(copies)))
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


def readable(prompts: NextTokens) -> Tensor:
    """The prompts as processors read them, [b, s]: padding repeats the last token, so that it says nothing new."""
    return torch.where(prompts.is_token == 1, prompts.tokens, prompts.tokens[:, -1:])


def sample_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row, [b] int64, by inverting the cumulative distribution.

    One number per row decides, so the same numbers give the same tokens on every device and layout.

    Args:
        logits: [b, v].
        uniform: [b], float64, in [0, 1).
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could choose a last token that has no probability.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # Where a model in trouble gives no numbers, what is found is behind the last token.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def uniform_numbers(seed: int, steps: int, rows: int) -> Tensor:
    """What decides about every token of a call: [steps, rows], float64 in [0, 1), on the CPU, equal on all ranks."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(steps, rows, generator=generator, dtype=torch.float64)


class Stops:
    """Finds rows that end: with a token that ends them, with a run of tokens that does, or with a stop string."""

    def __init__(self, request: Request) -> None:
        """Copy the tokens to the device once.

        Args:
            request: The rows, on the device, and what decides about the tokens.
        """
        strings, prompts = request.stop_strings, request.prompts
        self._sequences = [
            torch.tensor(sequence, device=prompts.tokens.device)
            for sequence in (*((token,) for token in request.eos_token_ids), *request.options.stop_sequences)
        ]
        self._fewest = request.min_new_tokens
        self._strings = strings
        if strings is not None:
            # A text may begin in the prompt; padding says nothing.
            endings = prompts.tokens.masked_fill(prompts.is_token == 0, len(strings.embedding_vec) - 1)
            self._endings = endings[:, -strings.maximum_token_len :]

    def at(self, new_tokens: Tensor) -> Tensor:
        """Which rows end with their last token: [b * n], bool.

        Args:
            new_tokens: [b * n, step], n texts of each prompt, without it.
        """
        rows, length = new_tokens.shape
        ends = torch.zeros(rows, dtype=torch.bool, device=new_tokens.device)
        if length >= self._fewest:
            for sequence in self._sequences:
                if len(sequence) <= length:
                    ends |= (new_tokens[:, length - len(sequence) :] == sequence).all(dim=-1)
        if self._strings is not None:
            endings = self._endings.repeat_interleave(rows // len(self._endings), dim=0)
            texts = torch.cat((endings, new_tokens[:, -self._strings.maximum_token_len :]), dim=-1)
            ends |= self._strings(texts, None)
        return ends
