"""The numbers that each rank drops, read off real forward passes.

A mask is recorded as True where a number was dropped: for dropout on activations from its output, and for dropout
inside attention by asking the same kernel, at the same random state, for the attention weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tests.parity.training import Case, loader_of, module_of, trainer_of

PROBABILITY = 0.25
DROPOUT = (("embd_pdrop", PROBABILITY), ("resid_pdrop", PROBABILITY), ("attn_pdrop", PROBABILITY))
"""Fields of a GPT-2 config."""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """What one rank dropped, in calling order."""

    activations: list[torch.Tensor] = field(default_factory=list)
    """After the embedding (first stage), then after each attention and MLP block: [s, b, h], or [s/tp, b, h]."""
    attention: list[torch.Tensor] = field(default_factory=list)
    """[b, np/tp, s, s]; True above the diagonal, where nothing can be seen anyway."""
    probabilities: list[float] = field(default_factory=list)
    """Of both kinds."""


def independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether no mask says anything of the other: of the numbers dropped in one, ``PROBABILITY`` are in the other, too.

    With thousands of numbers the share lies within 0.05 of it; at 1 if the masks are equal.
    """
    return abs(((a & b).sum() / a.sum()).item() - PROBABILITY) < 0.05


def dropout_masks(case: Case, *, validate: bool = False) -> Masks:
    """The masks that this rank draws in one training step, or in one validation step."""
    masks, module = Masks(), module_of(case)
    trainer = trainer_of(case, max_steps=1)
    with recording(masks):
        if validate:
            trainer.validate(module, loader_of(case), verbose=False)
        else:
            trainer.fit(module, loader_of(case))
    return masks


@contextmanager
def recording(masks: Masks) -> Iterator[None]:
    """While active, what this process drops is noted in ``masks``."""
    real_dropout, real_attention = F.dropout, F.scaled_dot_product_attention
    is_inside = False

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        # Under the CPU emulation, a mode for torch functions, torch's own function calls this one again.
        nonlocal is_inside
        if is_inside or not training or p == 0:
            return real_dropout(x, p, training, inplace)
        is_inside = True
        out = real_dropout(x, p, training, inplace)
        is_inside = False
        masks.activations.append((out == 0).detach())
        masks.probabilities.append(p)
        return out

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        probability = kwargs.get("dropout_p", args[1] if len(args) > 1 else 0.0)
        if probability > 0:
            masks.probabilities.append(probability)
            state = torch.get_rng_state()
            identity = torch.eye(k.shape[-2]).expand(*k.shape[:-1], k.shape[-2])
            with torch.no_grad():
                weights = real_attention(torch.zeros_like(q), torch.zeros_like(k), identity, *args, **kwargs)
            masks.attention.append(weights == 0)
            torch.set_rng_state(state)
        return real_attention(q, k, v, *args, **kwargs)

    with (
        patch("torch.nn.functional.dropout", dropout),
        patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        yield
