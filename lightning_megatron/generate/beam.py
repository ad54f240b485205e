"""Beam search for the likeliest text as a whole: the best beginnings of each text grow side by side.

The rules are those of Hugging Face's ``generate`` (transformers 5.23, generation/utils.py, ``_beam_search``), so that
the same texts come out: of all continuations of a row's beams the best are candidates, more of them than there are
beams, so that enough are left when some of them end; only those among the best ``num_beams`` may end a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.decode import (
    STEPS_BETWEEN_LOOKS,
    Continuations,
    Rules,
    Stops,
    readable,
    token_processors,
)
from lightning_megatron.generate.inputs import NextTokens
from lightning_megatron.generate.pipeline import Stages

_HOPELESS = -1.0e9
"""Score of what must not be chosen; finite, so that sums of it stay comparable."""


def search(models: Sequence[Any], topology: Topology, prompts: NextTokens, rules: Rules) -> Continuations:
    """The best continuations of each prompt, ``num_return_sequences`` of each, best first; as ``decode.decode``."""
    rows, options, device = len(prompts.tokens), rules.options, prompts.tokens.device
    most, count = options.num_new_tokens, options.num_beams
    stages = Stages(models, topology, prompts, most, static=bool(options.static_cache))
    beams = Beams(prompts, rules) if stages.chooses else None
    parents = torch.arange(rows, device=device).repeat_interleave(count)
    logits = stages.first()
    stages.select(parents)
    for step in range(most):
        # The parents of the next beams, their last tokens, and whether nothing can change any more: one message.
        message = torch.empty(2 * rows * count + 1, dtype=torch.long, device=device)
        if beams is not None:
            assert logits is not None
            message = beams.advance(logits if step > 0 else logits[parents], step)
        message = stages.told(message)
        if step + 1 == most or ((step + 1) % STEPS_BETWEEN_LOOKS == 0 and bool(message[-1])):
            break
        stages.select(message[: rows * count])
        logits = stages.next(message[rows * count : -1])
    found = torch.empty(rows * options.num_return_sequences, most + 1, dtype=torch.long, device=device)
    found = stages.told(found if beams is None else beams.best())
    numbers = torch.zeros(len(found), most + 1, device=device) if beams is None else beams.best_numbers()
    numbers, lengths = stages.told(numbers), found[:, -1]
    behind = torch.arange(most, device=device) >= lengths[:, None]
    return Continuations(
        tokens=found[:, :-1],
        lengths=lengths,
        log_probabilities=numbers[:, :-1].masked_fill(behind, 0.0),
        scores=numbers[:, -1],
    )


class Beams:
    """The beams of all rows and the complete texts that they have found, on the one rank that chooses."""

    def __init__(self, prompts: NextTokens, rules: Rules) -> None:
        """One beam per row, the prompt; the others are copies of it that must not be chosen.

        Args:
            prompts: On the device.
            rules: What decides about the tokens.
        """
        options = self._options = rules.options
        self._vocab_size = rules.vocab_size
        rows, count, device = len(prompts.tokens), options.num_beams, prompts.tokens.device
        self._first_beams = torch.arange(rows, device=device)[:, None] * count
        self._stops = Stops(options, prompts, rules.strings)
        self._num_candidates = max(2, 1 + len(options.eos_token_ids)) * count
        self._processors = token_processors(options, prompts, copies=count)
        self._prompts = readable(prompts).repeat_interleave(count, dim=0)
        shape = (rows, count, options.num_new_tokens)
        self._growing = torch.full(shape, options.filling, dtype=torch.long, device=device)
        self._growing_logs = torch.zeros(shape, device=device)
        self._growing_scores = torch.full((rows, count), _HOPELESS, device=device)
        self._growing_scores[:, 0] = 0.0
        self._complete, self._complete_logs = self._growing.clone(), self._growing_logs.clone()
        self._complete_scores = torch.full((rows, count), _HOPELESS, device=device)
        self._complete_lengths = torch.zeros((rows, count), dtype=torch.long, device=device)
        self._is_complete = torch.zeros((rows, count), dtype=torch.bool, device=device)
        self._can_improve = torch.ones((rows, 1), dtype=torch.bool, device=device)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Let the beams grow by a token.

        Args:
            logits: Of all beams, [b * num_beams, padded vocabulary].
            step: Which new token it is, from 0.

        Returns:
            [2 * b * num_beams + 1]: the former rows of the next beams, their last tokens, and 1 if nothing will change.
        """
        count = self._options.num_beams
        given = logits[:, : self._vocab_size].float().log_softmax(-1)
        changed = given
        if self._processors:
            so_far = torch.cat((self._prompts, self._growing[:, :, :step].flatten(0, 1)), dim=-1)
            for processor in self._processors:
                changed = processor(so_far, changed)
        scores, places = self._candidates(changed)
        beams, tokens = places // self._vocab_size, places % self._vocab_size
        texts = self._growing.take_along_dim(beams[..., None], dim=1)
        texts[:, :, step] = tokens
        logs = self._growing_logs.take_along_dim(beams[..., None], dim=1)
        logs[:, :, step] = given.view(len(beams), -1).gather(1, places)
        ends = self._stops.at(texts[:, :, : step + 1].flatten(0, 1)).view_as(tokens)
        if step + 1 == self._options.num_new_tokens:
            ends = torch.ones_like(ends)
        self._complete_texts(texts, logs, scores, ends, step + 1)
        self._growing_scores, chosen = (scores + ends * _HOPELESS).topk(count)
        self._growing = texts.take_along_dim(chosen[..., None], dim=1)
        self._growing_logs = logs.take_along_dim(chosen[..., None], dim=1)
        parents = (self._first_beams + beams.take_along_dim(chosen, dim=1)).flatten()
        tokens = tokens.take_along_dim(chosen, dim=1).flatten()
        self._look_ahead(step + 1)
        # With every candidate at its end there is nothing left to grow.
        self._can_improve &= ~ends.all()
        return torch.cat((parents, tokens, self._is_over().long()[None]))

    def best(self) -> Tensor:
        """The best complete texts of each row: [b * num_return_sequences, max_new_tokens + 1]; last, their lengths."""
        number = self._options.num_return_sequences
        found = torch.cat((self._complete, self._complete_lengths[..., None]), dim=-1)
        return found[:, :number].flatten(0, 1)

    def best_numbers(self) -> Tensor:
        """Of each new token the log-probability, and last the text's score: [as ``best``, max_new_tokens + 1], fp32."""
        found = torch.cat((self._complete_logs, self._complete_scores[..., None]), dim=-1)
        return found[:, : self._options.num_return_sequences].flatten(0, 1)

    def _candidates(self, log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of each row's best continuations, best first, and their places in beams x vocabulary: [b, n] each."""
        rows, count = self._growing_scores.shape
        sums = log_probabilities.view(rows, count, -1) + self._growing_scores[..., None]
        scores, places = sums.flatten(1).topk(min(self._num_candidates, count * self._vocab_size))
        return scores, places

    def _complete_texts(self, texts: Tensor, logs: Tensor, scores: Tensor, ends: Tensor, length: int) -> None:
        """Keep the best of the complete texts and of those that ``ends`` just now."""
        count = self._options.num_beams
        among_best = torch.arange(ends.shape[1], device=ends.device) < count
        completes = ends & among_best
        is_closed = ~self._can_improve
        if self._options.early_stopping is True:
            is_closed = is_closed | self._is_complete.all(dim=-1, keepdim=True)
        scores = scores / length**self._options.length_penalty
        scores = scores + (~completes) * _HOPELESS + is_closed * _HOPELESS
        lengths = torch.full_like(self._complete_lengths[:, :1], length).expand_as(scores)
        self._complete_scores, chosen = torch.cat((self._complete_scores, scores), dim=1).topk(count)
        self._complete = torch.cat((self._complete, texts), dim=1).take_along_dim(chosen[..., None], dim=1)
        self._complete_logs = torch.cat((self._complete_logs, logs), dim=1).take_along_dim(chosen[..., None], dim=1)
        self._complete_lengths = torch.cat((self._complete_lengths, lengths), dim=1).take_along_dim(chosen, dim=1)
        self._is_complete = torch.cat((self._is_complete, completes), dim=1).take_along_dim(chosen, dim=1)

    def _look_ahead(self, length: int) -> None:
        """Whether the best beam of a row may still become better than the worst of its complete texts."""
        options = self._options
        longest = options.early_stopping == "never" and options.length_penalty > 0.0
        best = self._growing_scores[:, :1] / (options.num_new_tokens if longest else length) ** options.length_penalty
        worst = torch.where(self._is_complete, self._complete_scores.amin(dim=1, keepdim=True), _HOPELESS)
        self._can_improve = self._can_improve & (best > worst).any(dim=-1, keepdim=True)

    def _is_over(self) -> Tensor:
        """[], bool: whether no row's complete texts will change."""
        is_over = ~self._can_improve
        if self._options.early_stopping is True:
            is_over = is_over | self._is_complete.all(dim=-1, keepdim=True)
        return is_over.all()
