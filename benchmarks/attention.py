"""Core attention alone, forward and backward: with sinks beside plain, and of two widths beside width 128.

    python -m benchmarks.attention                          # on a GPU, rows of 4,096 tokens
    python -m benchmarks.attention --seq-length 8192 --rows 2

A figure is the median of calls after a second of warm-up, on random numbers in bf16. FLOPs are those of the model: two
products forward and twice as many backward, of the pairs of queries and keys that are seen.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Core attention of a layer."""

    name: str
    """Name in the table."""
    heads: int
    """Heads of queries."""
    groups: int
    """Heads of keys and values."""
    width: int
    """Width of queries and keys."""
    value_width: int
    """Width of values."""
    window: int | None = None
    """Latest keys that a query sees; None for all."""
    has_sinks: bool = False
    """Whether each head has a sink."""

    def flops(self, rows: int, length: int) -> float:
        """Model FLOPs of a call forward and backward, causal."""
        seen = length * (length + 1) / 2
        if self.window is not None and self.window < length:
            hidden = length - self.window
            seen -= hidden * (hidden + 1) / 2
        return 3 * 2 * rows * self.heads * seen * (self.width + self.value_width)


KINDS: tuple[Kind, ...] = (
    Kind(name="width 128", heads=16, groups=16, width=128, value_width=128),
    Kind(name="latent, 192 and 128", heads=16, groups=16, width=192, value_width=128),
    Kind(name="gpt-oss, no sinks", heads=64, groups=8, width=64, value_width=64),
    Kind(name="gpt-oss", heads=64, groups=8, width=64, value_width=64, has_sinks=True),
    Kind(
        name="gpt-oss, window, no sinks",
        heads=64,
        groups=8,
        width=64,
        value_width=64,
        window=128,
    ),
    Kind(
        name="gpt-oss, window",
        heads=64,
        groups=8,
        width=64,
        value_width=64,
        window=128,
        has_sinks=True,
    ),
)
"""Moonlight's latent attention beside plain attention of as many heads; gpt-oss's with and without sinks."""


def call_of(kind: Kind, rows: int, length: int, device: str) -> Callable[[], None]:
    """Return a call, forward and backward, of the core attention that a model on this device has."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lightning_megatron.engine.ops.attention import SDPAttention

    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=kind.heads * kind.width,
        num_attention_heads=kind.heads,
        num_query_groups=kind.groups,
        kv_channels=kind.width,
        attention_dropout=0.0,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    layer = SDPAttention(
        config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        sliding_window=kind.window,
        has_sinks=kind.has_sinks,
    ).to(device)

    def random(heads: int, width: int) -> Tensor:
        shape = (length, rows, heads, width)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    query = random(kind.heads, kind.width)
    key = random(kind.groups, kind.width)
    value = random(kind.groups, kind.value_width)
    inputs = [query, key, value, *layer.parameters()]
    upstream = torch.randn(
        length,
        rows,
        kind.heads * kind.value_width,
        dtype=dtype,
        device=device,
    )

    def call() -> None:
        output = layer(query, key, value, None)
        torch.autograd.grad(output, inputs, upstream)

    return call


def seconds_of(call: Callable[[], object], device: str, warm_up: float, calls: int) -> float:
    """Median seconds of a call."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed() -> float:
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    end = time.perf_counter() + warm_up
    timed()
    while time.perf_counter() < end:
        timed()
    return statistics.median(timed() for _ in range(calls))


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark of one operation on rows of tokens."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a call")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where it runs")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before the first call")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each kind")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    parser = parser_of("attention", __doc__)
    options = parser.parse_args(arguments)
    print(f"{options.rows} rows of {options.seq_length} tokens, forward and backward\n")
    print("| attention | ms | model TFLOP/s |\n|---|---|---|")
    for kind in KINDS:
        call = call_of(kind, options.rows, options.seq_length, options.device)
        seconds = seconds_of(call, options.device, options.warm_up, options.calls)
        rate = kind.flops(options.rows, options.seq_length) / seconds / 1e12
        print(f"| {kind.name} | {seconds * 1e3:.2f} | {rate:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
