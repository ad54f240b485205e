"""The gated delta rule alone, forward and backward: this package's beside flash-linear-attention's, if it is installed.

    python -m benchmarks.linear_attention                   # on a GPU, Qwen3-Next's heads, rows of 4,096 tokens

A figure is the median of calls after a second of warm-up, on random numbers in bf16. Differences are those of outputs
and of all gradients, relative to the largest value of this package's; both round products to bf16.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.attention import parser_of, seconds_of

if TYPE_CHECKING:
    from torch import Tensor

    Rule: TypeAlias = Callable[[Sequence[Tensor]], Tensor]

_KEY_HEADS = 16
_VALUE_HEADS = 32
_WIDTH = 128
"""Those of Qwen3-Next-80B-A3B."""


def _ours(inputs: Sequence[Tensor]) -> Tensor:
    from lightning_megatron.engine.ops.gated_delta_rule import gated_delta_rule

    return gated_delta_rule(*inputs)[0]


def _flash(inputs: Sequence[Tensor]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # Its tensors are [b, s, ...].
    rows = [x.transpose(0, 1).contiguous() for x in inputs]
    output: Tensor = chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)[0]
    return output.transpose(0, 1)


def _inputs(rows: int, length: int, device: str) -> list[Tensor]:
    """Random query, key, value, logarithm of the decay, and rate, as for ``gated_delta_rule``."""
    import torch

    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(length, rows, *shape, device=device)

    query = random(_KEY_HEADS, _WIDTH).to(dtype)
    key = random(_KEY_HEADS, _WIDTH).to(dtype)
    value = random(_VALUE_HEADS, _WIDTH).to(dtype)
    log_decay = -torch.nn.functional.softplus(random(_VALUE_HEADS))
    rate = torch.sigmoid(random(_VALUE_HEADS))
    return [x.requires_grad_() for x in (query, key, value, log_decay, rate)]


def _difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of one of the tensors, relative to its largest value."""
    differences = []
    for result, reference in zip(results, expected, strict=True):
        wide = reference.detach().float()
        largest = (result.detach().float() - wide).abs().max()
        differences.append(float(largest / wide.abs().max()))
    return max(differences)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    parser = parser_of("linear_attention", __doc__)
    options = parser.parse_args(arguments)
    import torch

    inputs = _inputs(options.rows, options.seq_length, options.device)
    upstream = torch.randn_like(inputs[2])
    rules: dict[str, Rule] = {"lightning-megatron": _ours}
    if importlib.util.find_spec("fla") is not None:
        rules["flash-linear-attention"] = _flash
    print(f"{options.rows} rows of {options.seq_length} tokens, forward and backward\n")
    print("| gated delta rule | ms | difference |\n|---|---|---|")
    expected: list[Tensor] = []
    for name, rule in rules.items():

        def call(rule: Rule = rule) -> list[Tensor]:
            output = rule(inputs)
            return [output, *torch.autograd.grad(output, inputs, upstream)]

        results = call()
        expected = expected or results
        seconds = seconds_of(call, options.device, options.warm_up, options.calls)
        print(
            f"| {name} | {seconds * 1e3:.2f} | {_difference(results, expected):.1e} |", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
