"""Recomputation of the outputs of norms and activations in the backward pass.

Flash attention saves little, so recomputing it gains nothing; of a layer of Llama-3-8B the outputs of both norms and
of SwiGLU are 45 of 138 kB per token, and each is one memory-bound kernel. The linear that reads such an output saves
it for its weight gradient: the storage is freed when the linear has run, and refilled when its gradient arrives.

megatron-core 0.16.1, tensor_parallel/random.py:CheckpointWithoutOutput does the same, but saves and restores every
random state around functions that draw no numbers, and needs Transformer Engine (its ``fp8 is not None`` is true of
False).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Output: TypeAlias = tuple[Tensor, Tensor | None]
"""Output of a linear: [s, b, h] and a bias that is not added yet."""


def recomputes_cheap_outputs(config: Any) -> bool:
    """Whether norms, activations and input rows of experts are recomputed: ``recompute="selective"``."""
    return config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules


class RecomputedOutput:
    """Call of a deterministic function whose output's storage is freed between forward and backward pass.

    Interface of Megatron's ``CheckpointWithoutOutput``. The output must own its storage; its readers must have run
    before it is discarded, and must not return it.
    """

    def __init__(self, fp8: object = None) -> None:
        """Start without a call."""
        del fp8
        self._recompute: Callable[[], Tensor] | None = None
        self._output: Tensor | None = None

    def checkpoint(
        self,
        function: Callable[..., Tensor],
        *inputs: Any,
    ) -> Tensor:
        """Call ``function(*inputs)`` and return its output."""
        output = self._output = function(*inputs)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._recompute = partial(function, *detached)
        return output

    def discard_output_and_register_recompute(self, reader: Tensor) -> None:
        """Free the output until ``reader``, which was computed from it, has a gradient; no-op if it needs none."""
        if self._output is not None and reader.requires_grad:
            self._output.untyped_storage().resize_(0)
            reader.register_hook(self._restore)
        else:
            self._recompute = self._output = None

    def _restore(self, gradient: Tensor) -> None:
        # A nested backward pass calls hooks twice.
        if self._recompute is None or self._output is None:
            return
        with torch.no_grad():
            recomputed = self._recompute().untyped_storage()
        self._output.untyped_storage().resize_(recomputed.nbytes())
        self._output.untyped_storage().copy_(recomputed)
        self._recompute = self._output = None


class _Lambda(torch.nn.Module):
    """Wraps a function in a module, which the engine requires from 0.17 on."""

    def __init__(self, function: Callable[..., _Output]) -> None:
        super().__init__()
        self.forward = function


def recompute_activation(original: Callable[..., _Output]) -> Callable[..., _Output]:
    """``MLP.forward`` that recomputes the activation, [s, b, ffn/tp], where norms are recomputed.

    Megatron's own forward runs with substitutes for the two linears, so that only the activation is left. After a
    dropout (T5) nothing is gained: the second linear saves the output of the dropout, not the activation.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        per_token_scale: Any = None,
        **others: Any,
    ) -> _Output:
        config = self.config
        recomputes = recomputes_cheap_outputs(config)
        drops_input = getattr(self.linear_fc2, "input_dropout", 0.0) > 0.0
        if not recomputes or per_token_scale is not None or drops_input:
            return original(self, hidden_states, per_token_scale, **others)

        def activation(hidden: Tensor, bias: Tensor | None) -> Tensor:
            linears = {
                "linear_fc1": _Lambda(lambda _: (hidden, bias)),
                "linear_fc2": _Lambda(lambda x: (x, None)),
            }
            mlp = SimpleNamespace(config=config, activation_func=self.activation_func, **linears)
            return original(mlp, hidden)[0]

        recomputed = RecomputedOutput()
        output: _Output = self.linear_fc2(
            recomputed.checkpoint(activation, *self.linear_fc1(hidden_states))
        )
        recomputed.discard_output_and_register_recompute(output[0])
        return output

    return forward
