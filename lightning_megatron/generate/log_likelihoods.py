"""Log-likelihoods of continuations: which rows the model reads for them, in which batches, and their sums.

Continuations that differ in their last token only, such as answers of one token to the same question, share one row.
Rows are sorted by length, the longest first, so that the rows of a batch need little padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.generate.layout import NO_TARGET, ModelInputs
from lightning_megatron.models.config import ModelConfig

Pair = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context, and of its continuation."""

MAX_LOGITS = 2**28
"""Logits that a batch of several rows may have, 1 GiB in float32; a single row may have more."""


@dataclass(frozen=True, kw_only=True)
class LogLikelihoods:
    """Log-likelihoods of continuations, in the order in which they were asked for; the same on every rank."""

    values: Tensor
    """[n], float64, on the host: the sum of the log-probabilities of a continuation's tokens."""
    is_greedy: Tensor
    """[n], bool, on the host: whether each of its tokens is the most likely one, given those before it."""


@dataclass(kw_only=True)
class _Row:
    """What the model reads once, and the continuations that end with it."""

    tokens: tuple[int, ...]
    num_shared: int = 0
    """Scored tokens that are in the row: those of the longest continuation but its last."""
    last_tokens: dict[int, int] = field(default_factory=dict)
    """Scored tokens after the row, each with its index among them."""
    pairs: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each continuation its number, its number of tokens, and its last token."""

    @property
    def num_targets(self) -> int:
        return self.num_shared + len(self.last_tokens)

    def targets(self) -> Tensor:
        """[t, 2], as in ``ModelInputs``: the tokens in the row, in order, then those after it."""
        length = len(self.tokens)
        first = length - self.num_shared
        inside = torch.arange(first - 1, length - 1)
        after = torch.full((len(self.last_tokens),), length - 1)
        tokens = [*self.tokens[first:], *self.last_tokens]
        return torch.stack((torch.cat((inside, after)), torch.tensor(tokens)), dim=-1)


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """Batches of rows for the log-likelihoods of continuations."""

    num_pairs: int
    """Number of continuations."""
    batches: list[list[_Row]]
    """The longest rows first."""

    def inputs(self, batch: int) -> ModelInputs:
        """Model inputs of a batch. Padding follows the tokens, which a causal model cannot see, so there is no mask."""
        rows = self.batches[batch]
        tokens = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
        targets = pad_sequence(
            [row.targets() for row in rows],
            batch_first=True,
            padding_value=NO_TARGET,
        )
        return ModelInputs(
            tokens=tokens,
            positions=None,
            mask=None,
            longest=tokens.shape[1],
            targets=targets,
        )

    def num_targets(self, batch: int) -> int:
        """Number of targets of a batch."""
        return sum(row.num_targets for row in self.batches[batch])

    def num_pairs_of(self, batch: int) -> int:
        """Number of continuations whose log-likelihoods a batch gives."""
        return sum(len(row.pairs) for row in self.batches[batch])

    def collect(self, batches: Sequence[int], scores: Tensor) -> LogLikelihoods:
        """Sum the scores of targets.

        Args:
            batches: All batches, in the order of ``scores``.
            scores: [targets of all batches, 2], as ``ScoredPositions.scores`` has them.
        """
        values = [0.0] * self.num_pairs
        is_greedy = [False] * self.num_pairs
        log_probabilities: list[float] = scores[:, 0].tolist()
        chosen: list[bool] = scores[:, 1].bool().tolist()
        start = 0
        for row in itertools.chain.from_iterable(self.batches[batch] for batch in batches):
            after = start + row.num_shared
            for number, length, last in row.pairs:
                inside = slice(after - length + 1, after)
                end = after + row.last_tokens[last]
                values[number] = sum(log_probabilities[inside]) + log_probabilities[end]
                is_greedy[number] = all(chosen[inside]) and chosen[end]
            start += row.num_targets
        return LogLikelihoods(
            values=torch.tensor(values, dtype=torch.float64),
            is_greedy=torch.tensor(is_greedy),
        )


def plan_scoring(
    pairs: Sequence[Pair],
    batch_size: int,
    model: ModelConfig,
) -> ScoringPlan:
    """Plan the batches for the log-likelihoods of continuations.

    Args:
        pairs: Tokens of contexts and continuations, at least one of each.
        batch_size: Largest number of rows per batch.
        model: Config of the model.

    Raises:
        ConfigError: If the model is no GPT with an output layer, a context or continuation is empty, a token is not in
            the vocabulary, or a row has more tokens than a table of position embeddings.
    """
    require_number("batch_size", batch_size, at_least=1)
    if model.architecture != "gpt" or not model.has_output_layer:
        raise ConfigError(
            f"log_likelihoods: expected a GPT with an output layer, got a {model.family} for task={model.task!r}; use "
            "another model"
        )
    rows: dict[tuple[int, ...], _Row] = {}
    for number, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            part = "continuation" if context else "context"
            raise ConfigError(f"pair {number}: its {part} is empty; give it a token")
        *before, last = (*context, *continuation)
        tokens = tuple(before)
        row = rows.setdefault(tokens, _Row(tokens=tokens))
        row.num_shared = max(row.num_shared, len(continuation) - 1)
        row.last_tokens.setdefault(last, len(row.last_tokens))
        row.pairs.append((number, len(continuation), last))
    _check_tokens(rows.values(), model)
    longest_first = sorted(rows.values(), key=lambda row: (-len(row.tokens), row.tokens))
    return ScoringPlan(
        num_pairs=len(pairs),
        batches=list(_batches(longest_first, batch_size, MAX_LOGITS // model.vocab_size)),
    )


def _check_tokens(rows: Iterable[_Row], model: ModelConfig) -> None:
    limit = model.vocab_size
    for row in rows:
        tokens = (*row.tokens, *row.last_tokens)
        if min(tokens) < 0 or max(tokens) >= limit:
            wrong = next(token for token in tokens if not 0 <= token < limit)
            raise ConfigError(
                f"token {wrong}: expected one of the vocabulary, 0 to {limit - 1}; use the model's tokenizer"
            )
        length = len(row.tokens)
        if model.has_position_table and length > model.max_position_embeddings:
            raise ConfigError(
                f"a context and continuation of {length} tokens need more positions than the model's "
                f"max_position_embeddings={model.max_position_embeddings}; cut the context"
            )


def _batches(
    rows: Sequence[_Row],
    batch_size: int,
    most_targets: int,
) -> Iterator[list[_Row]]:
    """Cut rows into batches of at most ``batch_size`` rows and, with more than one row, ``most_targets`` targets."""
    batch: list[_Row] = []
    num_targets = 0
    for row in rows:
        is_full = len(batch) == batch_size or num_targets + row.num_targets > most_targets
        if batch and is_full:
            yield batch
            batch = []
            num_targets = 0
        batch.append(row)
        num_targets += row.num_targets
    if batch:
        yield batch
