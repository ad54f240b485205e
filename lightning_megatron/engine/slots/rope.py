"""How are positions rotated into queries and keys? The engine's own function, compiled, on CUDA.

Eagerly it is about eight kernels for each of q and k in each layer; Transformer Engine fuses them, torch.compile does
too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.engine.patching import Patch

_Rope = Callable[..., Tensor]

MAX_SHAPES = 4
"""Shapes that are compiled, with and without gradients each; torch's own limit is eight graphs per function.

Training and validation need two (q and k) to four. Decoding without a cache makes a new shape for every token, which
is not worth compiling.
"""


class CompiledRope:
    """The eager function for shapes that come and go, a compiled one for the first few that come."""

    def __init__(self, eager: _Rope) -> None:
        """Wrap ``eager``, which is ``_apply_rotary_pos_emb_bshd`` of the engine."""
        self.eager = eager
        self.compiled: _Rope = torch.compile(eager, dynamic=False)
        self._shapes: dict[bool, set[tuple[torch.Size, torch.Size, torch.dtype]]] = {True: set(), False: set()}

    def __call__(
        self,
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
    ) -> Tensor:
        """Rotate ``t``: [s, b, np, hn] by ``freqs``: [s, 1, 1, rotated], float32 angles."""
        seen = self._shapes[torch.is_grad_enabled()]
        shape = (t.shape, freqs.shape, t.dtype)
        if shape not in seen:
            if not t.is_cuda or len(seen) >= MAX_SHAPES:
                return self.eager(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
            seen.add(shape)
        return self.compiled(t, freqs, rotary_interleaved, multi_latent_attention, mscale)


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
