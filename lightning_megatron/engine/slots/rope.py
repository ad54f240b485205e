"""How are positions rotated into queries and keys? The engine's own function, compiled, on CUDA.

Eagerly it is about eight kernels for each of q and k in each layer; Transformer Engine fuses them, torch.compile does
too.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.patching import Patch

_Rope = Callable[..., Tensor]

MAX_SHAPES = 4
"""Shapes that are compiled, with and without gradients each; torch's own limit is eight graphs per function.

Training and validation need two (q and k) to four. Prompts have all lengths, which are not worth compiling.
"""

MAX_STEP_SHAPES = 8
"""Shapes of single tokens that are compiled, q and k of each number of rows that are continued together."""


class CompiledRope:
    """The eager function for shapes that come and go, a compiled one for the first few that come."""

    def __init__(self, eager: _Rope) -> None:
        """Wrap ``eager``, which is ``_apply_rotary_pos_emb_bshd`` of the engine."""
        self.eager = eager
        self.compiled: _Rope = torch.compile(eager, dynamic=False)
        self.compiled_step: _Rope = torch.compile(_with_own_code(eager), dynamic=False)
        self._shapes: dict[Any, set[tuple[torch.Size, torch.Size, torch.dtype]]] = {
            key: set() for key in (True, False, "step")
        }

    def __call__(
        self,
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        """Rotate ``t``: [s, b, np, hn] by ``freqs``: [s, 1, 1, rotated], float32 angles."""
        # Prompts must not use up the places of the tokens behind them, each of which is a pass of its own.
        is_step = t.shape[0] == 1 and not torch.is_grad_enabled()
        seen = self._shapes["step" if is_step else torch.is_grad_enabled()]
        shape = (t.shape, freqs.shape, t.dtype)
        if shape not in seen:
            if not t.is_cuda or len(seen) >= (MAX_STEP_SHAPES if is_step else MAX_SHAPES):
                return self.eager(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
            seen.add(shape)
        compiled = self.compiled_step if is_step else self.compiled
        return compiled(t, freqs, rotary_interleaved, multi_latent_attention, mscale)


def _with_own_code(function: Any) -> _Rope:
    """The same function to Python and another one to torch, which counts graphs by code objects and stops at eight."""
    name = f"{function.__name__}_of_one_token"
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


@functools.cache
def _compiled_once(eager: _Rope) -> CompiledRope:
    """One wrapper per function, so that a second fit in the same process does not compile again."""
    return eager if isinstance(eager, CompiledRope) else CompiledRope(eager)


ROPE_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.models.common.embeddings.rope_utils",
        attribute="_apply_rotary_pos_emb_bshd",
        replacement=_compiled_once,
        engine="megatron-core 0.16.1",
        reason="eight kernels per call; its fused variant (apply_rope_fusion) needs Transformer Engine",
    ),
)
"""RoPE in one kernel per call, on CUDA."""
