"""How is the same step done again and again? On buffers that stay where they are, so that a GPU can replay it.

The first step of a kind runs kernel by kernel, which compiles what has to be; before the second one each chunk's work
on each group of rows is recorded, where the device has a recorder. What goes between stages and the choice of tokens
are no part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.engine.slots.static_cache import TokenStep
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.graphs import Work, recorder_of
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.passes import Chunk, NextTokens, attending_to, output_of
from lightning_megatron.models.config import ModelConfig

SMALLEST_WINDOW = 1024
"""Queries look at so many slots of the caches at least, or at all if there are fewer; when the texts outgrow them, at
twice as many. Each time the steps are recorded anew."""

FEWEST_NEW_TOKENS = 8
"""Of which recording pays: it takes as long as a step or two kernel by kernel, and a replayed step a fifth of that."""

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scalings whose frequencies the host computes from the texts' length."""


def uses_static_cache(options: GenerationOptions, model: ModelConfig, device: torch.device) -> bool:
    """Whether all steps of one call are alike: as ``static_cache`` says, else where a GPU gains by it.

    Args:
        options: Settled.
        model: What they are for.
        device: Where it computes.

    Raises:
        ConfigError: If they must be alike and cannot: with what is not.
    """
    reason = _what_differs(model)
    if options.static_cache is None:
        return device.type == "cuda" and reason is None and options.num_new_tokens >= FEWEST_NEW_TOKENS
    if options.static_cache and reason is not None:
        raise ConfigError(
            f"static_cache=True repeats one step that depends on no length, and a {model.family} cannot: {reason}; "
            "leave it out"
        )
    return options.static_cache


def _what_differs(model: ModelConfig) -> str | None:
    """Why the model's steps are not all alike; None if they are."""
    if model.architecture == "t5":
        return "its decoder also attends to a source, with biases that the host counts from the texts' length"
    if model.rope_scaling is not None and model.rope_scaling.rope_type in _LENGTH_DEPENDENT:
        kind = model.rope_scaling.rope_type
        return f"the host computes its rotary frequencies ({kind}) from the texts' length at every token"
    return None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one chunk does with the newest token of each row of one group."""

    chunk: Chunk
    group: int
    rows: NextTokens
    hidden: Tensor | None
    token_step: TokenStep

    def __call__(self) -> Tensor:
        chunk = self.chunk
        try:
            with attending_to(chunk.layers, chunk.caches[self.group]):
                output = output_of(chunk.model, self.hidden, self.rows).detach()
        finally:
            self.token_step.forget()
        return output[:, -1].float() if chunk.is_last else output.contiguous()


class StaticSteps:
    """The passes of one token per row; ``Passes`` of the token that ``advance`` was given last."""

    def __init__(
        self, chunks: Sequence[Chunk], groups: Sequence[tuple[int, int]], batch: NextTokens, place: int, slots: int
    ) -> None:
        """Allocate what the steps read besides caches and weights.

        Args:
            chunks: Of this rank, with static caches that hold the prompts.
            groups: First and last + 1 row of each.
            batch: The first token behind the prompts.
            place: Where it stands.
            slots: Of the caches.
        """
        assert batch.positions is not None
        self._chunks, self._groups, self._slots = chunks, groups, slots
        self._recorder = recorder_of(batch.tokens.device)
        self._place = torch.full((1,), place, dtype=torch.long, device=batch.tokens.device)
        self._batch = NextTokens(
            tokens=batch.tokens.clone(), positions=batch.positions.clone(), mask=None, longest=batch.longest
        )
        self._is_token = torch.ones((len(batch.tokens), slots), dtype=torch.bool, device=batch.tokens.device)
        if batch.mask is not None:
            self._is_token[:, : place + 1] = batch.mask != 0
        self._rows = [self._batch.rows(first, stop) for first, stop in groups]
        self._hidden = [[chunk.hidden_like(rows.tokens, 1) for rows in self._rows] for chunk in chunks]
        self._works: dict[tuple[int, int], Work] = {}
        self._is_recorded = False
        self._num_keys = 0

    def advance(self, batch: NextTokens, place: int, agree: Callable[[bool], bool]) -> None:
        """Go on to the next token; all ranks of a copy must call alike.

        Args:
            batch: The token.
            place: Where it stands.
            agree: Tells whether all ranks of the copy pass True.
        """
        assert self._batch.positions is not None
        assert batch.positions is not None
        self._batch.tokens.copy_(batch.tokens)
        self._batch.positions.copy_(batch.positions)
        self._place.fill_(place)
        if place >= self._num_keys:
            self._look_at(_window(place, self._slots))
        elif self._recorder is not None and not self._is_recorded:
            self._record(agree)

    def hidden(self, chunk: int, group: int) -> Tensor | None:
        """As ``Passes.hidden``."""
        return self._hidden[chunk][group]

    def output(self, chunk: int, group: int) -> Tensor:
        """As ``Passes.output``."""
        work = self._works[chunk, group]
        return work() if self._recorder is None or self._is_recorded else self._recorder.prepared(work)

    def _look_at(self, num_keys: int) -> None:
        """Steps whose queries see so many slots; what was recorded for fewer is given back."""
        self._works, self._is_recorded, self._num_keys = {}, False, num_keys
        steps = [TokenStep(self._place, self._is_token[first:stop, :num_keys]) for first, stop in self._groups]
        for index, chunk in enumerate(self._chunks):
            for group, (rows, step) in enumerate(zip(self._rows, steps, strict=True)):
                for cache in chunk.caches[group]:
                    cache.step = step
                hidden = self._hidden[index][group]
                work = _Step(chunk=chunk, group=group, rows=rows, hidden=hidden, token_step=step)
                self._works[index, group] = work

    def _record(self, agree: Callable[[bool], bool]) -> None:
        """Record every work, or none if one rank cannot: all of a copy then go on alike."""
        assert self._recorder is not None
        recorded, failure = None, None
        try:
            recorded = self._recorder.recorded(list(self._works.values()))
        except RuntimeError as error:
            # What ended the recording, rather than that it could not be ended properly; CUDA adds lines of advice.
            failure = str(error.__context__ or error).partition("\n")[0]
        if agree(failure is None) and recorded is not None:
            self._works, self._is_recorded = dict(zip(self._works, recorded, strict=True)), True
            return
        self._recorder = None
        if failure is not None:
            warnings.warn(
                f"a step could not be recorded as a CUDA graph ({failure}); steps run kernel by kernel, more slowly",
                stacklevel=2,
            )


def _window(place: int, slots: int) -> int:
    """How many slots a query at ``place`` looks at."""
    width = SMALLEST_WINDOW
    while width <= place:
        width *= 2
    return min(width, slots)
