"""Outputs that are made again in the backward pass instead of being kept, where that costs next to nothing.

What flash attention keeps is small, so recomputing it saves nothing; of a layer of Llama-3-8B the outputs of both norms
and of SwiGLU are 45 of 138 kB a token, and each is one memory-bound kernel. The one who reads them saves them for its
weight gradient: their storage is emptied when the reader has run, and filled again when the reader's gradient comes.

megatron-core 0.16.1, tensor_parallel/random.py:CheckpointWithoutOutput does the same with the state of every random
stream saved and restored around it, for functions that draw none, and only with Transformer Engine (its ``fp8 is not
None`` is true of False).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

_Output: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""Of a linear: [s, b, h] and a bias that is not added yet."""


def recomputes_cheap_outputs(config: Any) -> bool:
    """Whether norms, activations and rows of experts are made again: ``recompute="selective"``."""
    return config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules


class WithoutOutput:
    """One call of a deterministic function, whose output's storage is free between forward and backward pass.

    Interface of Megatron's ``CheckpointWithoutOutput``. The output is a tensor of its own, of any shape; whoever reads
    it must have run before it is discarded, and must not give it on.
    """

    def __init__(self, fp8: object = None) -> None:
        """Nothing is kept yet."""
        del fp8
        self._again: Callable[[], torch.Tensor] | None = None
        self._output: torch.Tensor | None = None

    def checkpoint(self, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """``function(*inputs)``."""
        output = self._output = function(*inputs)
        detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in inputs]
        self._again = partial(function, *detached)
        return output

    def discard_output_and_register_recompute(self, reader: torch.Tensor) -> None:
        """Free the output until ``reader``, which was computed from it, has a gradient; nothing without gradients."""
        if self._output is not None and reader.requires_grad:
            self._output.untyped_storage().resize_(0)
            reader.register_hook(self._fill)
        else:
            self._again = self._output = None

    def _fill(self, gradient: torch.Tensor) -> None:
        if self._again is None or self._output is None:  # a backward pass within another calls hooks twice
            return
        with torch.no_grad():
            again = self._again().untyped_storage()
        self._output.untyped_storage().resize_(again.nbytes())
        self._output.untyped_storage().copy_(again)
        self._again = self._output = None


class _Giving(torch.nn.Module):
    """A function as a module, which the engine asks for from 0.17 on."""

    def __init__(self, function: Callable[..., _Output]) -> None:
        super().__init__()
        self.forward = function


def recomputes_activation(original: Callable[..., _Output]) -> Callable[..., _Output]:
    """``MLP.forward`` that makes the activation, [s, b, ffn/tp], again where norms are recomputed.

    Megatron's own forward runs with stand-ins for the two linears, so that only its middle is left. Behind a dropout
    (T5's) nothing is gained: the second linear saves what is left of the activation, not the activation.
    """

    def forward(self: Any, hidden_states: torch.Tensor, per_token_scale: Any = None, **others: Any) -> _Output:
        config = self.config
        is_asked = recomputes_cheap_outputs(config)
        if not is_asked or per_token_scale is not None or getattr(self.linear_fc2, "input_dropout", 0.0) > 0.0:
            return original(self, hidden_states, per_token_scale, **others)

        def activation(hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            linears = {"linear_fc1": _Giving(lambda _: (hidden, bias)), "linear_fc2": _Giving(lambda x: (x, None))}
            middle = SimpleNamespace(config=config, activation_func=self.activation_func, **linears)
            return original(middle, hidden)[0]

        recomputed = WithoutOutput()
        output: _Output = self.linear_fc2(recomputed.checkpoint(activation, *self.linear_fc1(hidden_states)))
        recomputed.discard_output_and_register_recompute(output[0])
        return output

    return forward
