"""Beam search by the rules of Hugging Face's ``generate``."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.logits_processors import fill_padding, logits_processors
from lightning_megatron.generate.request import Request
from lightning_megatron.generate.stop_criteria import StopCriteria

_EXCLUDED = -1.0e9
"""Score of candidates that must not be chosen; finite, so that sums of it stay comparable."""


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
        num_beams = options.num_beams
        shape = (len(prompts.tokens), num_beams)
        device = prompts.tokens.device
        rows = torch.arange(shape[0] * num_beams, device=device)
        self._first_beams = rows[::num_beams, None]
        self._stops = StopCriteria(request)
        self._num_candidates = max(2, 1 + len(request.eos_token_ids)) * num_beams
        self._processors = logits_processors(request, copies=num_beams)
        self._prompts = fill_padding(prompts).repeat_interleave(num_beams, dim=0)
        self._growing = torch.full(
            (*shape, request.max_new_tokens),
            request.pad_token_id,
            dtype=torch.long,
            device=device,
        )
        self._growing_logs = torch.zeros(self._growing.shape, device=device)
        self._growing_scores = torch.full(shape, _EXCLUDED, device=device)
        self._complete = self._growing.clone()
        self._complete_logs = self._growing_logs.clone()
        self._complete_scores = self._growing_scores.clone()
        self._growing_scores[:, 0] = 0.0
        self._complete_lengths = torch.zeros(shape, dtype=torch.long, device=device)
        self._is_complete = torch.zeros(shape, dtype=torch.bool, device=device)
        self._can_improve = torch.ones((shape[0], 1), dtype=torch.bool, device=device)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Extend the beams by a token; as ``Sampler.advance``."""
        num_beams = self._options.num_beams
        known = logits[:, : self._vocab_size]
        log_probs = known.float().log_softmax(-1)
        processed = log_probs
        if self._processors:
            chosen_before = self._growing[:, :, :step].flatten(0, 1)
            input_ids = torch.cat((self._prompts, chosen_before), dim=-1)
            for processor in self._processors:
                processed = processor(input_ids, processed)
        by_beam = processed.view(*self._growing_scores.shape, -1)
        sums = (by_beam + self._growing_scores[..., None]).flatten(1)
        # The best continuations of each prompt, best first.
        scores, indices = sums.topk(min(self._num_candidates, sums.shape[1]))
        beams = indices // self._vocab_size
        tokens = indices % self._vocab_size
        sequences, logs = _gather(beams, self._growing, self._growing_logs)
        sequences[:, :, step] = tokens
        logs[:, :, step] = log_probs.view_as(sums).gather(1, indices)
        new_tokens = sequences[:, :, : step + 1].flatten(0, 1)
        ends = self._stops.are_met(new_tokens).view_as(tokens)
        if step + 1 == self._max_new_tokens:
            ends = torch.ones_like(ends)
        self._keep_complete(sequences, logs, scores, ends, step + 1)
        open_scores = scores + ends * _EXCLUDED
        self._growing_scores, chosen = open_scores.topk(num_beams)
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
        count = self._options.num_return_sequences
        lengths = self._complete_lengths[..., None]
        scores = self._complete_scores[..., None]
        sequences = torch.cat((self._complete, lengths), dim=-1)[:, :count]
        values = torch.cat((self._complete_logs, scores), dim=-1)[:, :count]
        return sequences.flatten(0, 1), values.flatten(0, 1)

    def _keep_complete(
        self,
        sequences: Tensor,
        logs: Tensor,
        scores: Tensor,
        ends: Tensor,
        length: int,
    ) -> None:
        """Keep the best of the complete sequences and of the candidates that ``ends`` marks as complete."""
        num_beams = self._options.num_beams
        ranking = torch.arange(ends.shape[1], device=ends.device)
        completes = ends & (ranking < num_beams)
        scores = scores / length**self._options.length_penalty
        scores = scores + (~completes) * _EXCLUDED + self._is_closed() * _EXCLUDED
        lengths = torch.full_like(ranking, length).expand_as(scores)
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
        is_better = (best > worst).any(dim=-1, keepdim=True)
        self._can_improve = self._can_improve & is_better

    def _is_closed(self) -> Tensor:
        """[b, 1], bool: whether a prompt's complete sequences will not change any more."""
        if self._options.early_stopping is not True:
            return ~self._can_improve
        return ~self._can_improve | self._is_complete.all(dim=-1, keepdim=True)


def _gather(index: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Gather entries ``index`` [b, m] along dim 1 of each tensor, [b, n] or [b, n, ...]."""
    gathered = []
    for tensor in tensors:
        entries = index
        if tensor.dim() > 2:
            entries = index[..., None]
        gathered.append(tensor.take_along_dim(entries, dim=1))
    return gathered
