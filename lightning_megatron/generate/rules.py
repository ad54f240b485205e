"""What decides about the tokens of one call? Its options, the model's vocabulary, and how tokens read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.data.corpus.stop_strings import StopStrings
from lightning_megatron.generate import sampling
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts
from lightning_megatron.generate.repeats import Repeats
from lightning_megatron.generate.stopping import Stops


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The same on all ranks."""

    options: GenerationOptions
    """Settled, and with the model's own tokens filled in."""
    vocab_size: int
    """Without padding."""
    strings: StopStrings | None = None
    """What finds the texts that end rows."""

    def stops(self, prompts: Prompts) -> Stops:
        """What ends the texts behind ``prompts``."""
        return Stops(self.options, prompts, self.strings)


class Odds:
    """Makes tokens likelier, rarer or impossible by what each text has already, on the rank that chooses."""

    def __init__(self, prompts: Prompts, rules: Rules, copies: int = 1) -> None:
        """Start with the prompts.

        Args:
            prompts: On the device.
            rules: What decides.
            copies: Texts that grow from each prompt.
        """
        self._options = rules.options
        self._repeated: Tensor | None = None
        if self._options.repetition_penalty != 1.0:
            self._repeated = _repeated_tokens(prompts, rules.vocab_size).repeat_interleave(copies, dim=0)
        size = self._options.no_repeat_ngram_size
        self._repeats = Repeats(prompts, size) if size > 0 else None

    def changed(self, scores: Tensor, new_tokens: Tensor) -> Tensor:
        """Logits or log-probabilities of the next token, in Hugging Face's order of changes.

        Args:
            scores: [rows, v].
            new_tokens: [rows, step], the texts so far.
        """
        options = self._options
        if self._repeated is not None:
            scores = sampling.penalized(scores, self._repeated, options.repetition_penalty)
        if self._repeats is not None:
            scores = self._repeats.without(scores, new_tokens)
        if new_tokens.shape[1] < options.min_new_tokens:
            scores = sampling.without(scores, options.eos_token_ids)
        return scores

    def grow(self, tokens: Tensor, parents: Tensor | None = None) -> None:
        """Take notice of the tokens that were chosen.

        Args:
            tokens: [rows].
            parents: [rows], which text each of them is behind; None for each its own.
        """
        if self._repeated is not None:
            repeated = self._repeated if parents is None else self._repeated[parents]
            self._repeated = repeated.scatter_(-1, tokens[:, None], True)


def _repeated_tokens(prompts: Prompts, vocab_size: int) -> Tensor:
    """Which tokens each row has: [b, v], bool."""
    counts = torch.zeros(len(prompts.tokens), vocab_size, dtype=torch.int, device=prompts.tokens.device)
    # Added, not set: what stands for padding may be a token that the row has.
    return counts.scatter_add_(-1, prompts.tokens, prompts.is_token.int()) > 0
