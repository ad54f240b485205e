"""Muon's update of the matrices of a model, beside its matrix products alone and beside AdamW's update.

    python -m benchmarks.muon                               # matrices of llama-1b, 1 GPU
    python -m benchmarks.muon --case qwen3-30b-a3b-8layers --layers 4

Masters, momenta and gradients are random numbers in fp32; a figure is the median of calls after a second of warm-up.
The products are those of the five iterations of all matrices, of the shapes and in the batches of the update. The
overhead is what Muon takes longer than AdamW, beside a step at ``--tokens-per-s``, the speed of forward and backward
passes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.attention import seconds_of
from benchmarks.cases import case_named

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_megatron.planning.matrices import MatrixShape

ITERATIONS = 5
TOKENS_A_STEP = (2**16, 2**18, 2**20)


def shapes_of(case: str, num_layers: int | None) -> list[MatrixShape]:
    """Shapes of the matrices of a case's model, or of its first layers."""
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.planning.matrices import layer_matrices

    model = model_config(dict(case_named(case).model))
    layers = range(num_layers or model.num_layers + model.num_decoder_layers)
    return [shape for layer in layers for shape in layer_matrices(model, layer)]


def random_masters(shapes: Sequence[MatrixShape], device: str) -> list[Tensor]:
    """A parameter with a gradient for each group of equal matrices."""
    import torch

    masters = []
    for shape in shapes:
        master = torch.randn(shape.count * shape.rows, shape.columns, device=device)
        master.grad = torch.randn_like(master)
        masters.append(master)
    return masters


def muon_update(shapes: Sequence[MatrixShape], device: str) -> Callable[[], None]:
    """Return a call of Muon's update, clipped and checked as in training."""
    import torch

    from lightning_megatron.engine.ops.matrix_shards import Matrices, MatrixGroup, MatrixShard
    from lightning_megatron.engine.ops.muon import MatrixState, MatrixUpdates

    masters = random_masters(shapes, device)
    shards = []
    for shape, master in zip(shapes, masters, strict=True):
        matrices = Matrices(
            columns=shape.columns,
            blocks=tuple((number, shape.rows) for number in range(shape.count)),
            count=shape.count,
            axis=None,
        )
        shards.append(MatrixShard(matrices, master, 0))
    updates = MatrixUpdates(
        shards,
        MatrixGroup(None, 0),
        torch.device(device),
        nesterov=True,
        iterations=ITERATIONS,
        adjust_lr="match_rms_adamw",
    )
    groups: list[dict[str, Any]] = [
        {"params": masters, "lr": 1e-4, "weight_decay": 0.1, "momentum": 0.95}
    ]
    states = {
        master: MatrixState(master.view(-1), torch.randn_like(master).view(-1))
        for master in masters
    }
    grad_scale = torch.ones((), device=device)
    found_inf = torch.zeros(1, device=device)

    def call() -> None:
        updates.step(groups, [states] * len(updates.rounds), grad_scale, found_inf)

    return call


def products_alone(shapes: Sequence[MatrixShape], device: str) -> Callable[[], None]:
    """Return a call of the matrix products of all iterations."""
    import torch

    from lightning_megatron.engine.ops.muon import BATCH_ELEMENTS, ITERATION_DTYPE

    batches = []
    for shape in shapes:
        short, long = sorted((shape.rows, shape.columns))
        in_batch = max(1, BATCH_ELEMENTS // (short * long))
        for begin in range(0, shape.count, in_batch):
            count = min(in_batch, shape.count - begin)
            batch = torch.randn(count, short, long, device=device, dtype=ITERATION_DTYPE)
            batches.append(batch / short)

    def call() -> None:
        for x in batches:
            for _ in range(ITERATIONS):
                gram = torch.bmm(x, x.mT)
                of_gram = torch.baddbmm(gram, gram, gram)
                torch.baddbmm(x, of_gram, x)

    return call


def adamw_update(shapes: Sequence[MatrixShape], device: str) -> Callable[[], None]:
    """Return a call of AdamW's update of the same parameters."""
    import torch

    from lightning_megatron.engine.ops.adam import FusedAdam

    optimizer = FusedAdam(random_masters(shapes, device), lr=1e-4, weight_decay=0.1)
    optimizer.materialize_state()
    optimizer.grad_scale = torch.ones((), device=device)
    optimizer.found_inf = torch.zeros(1, device=device)
    return optimizer.step


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.muon",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", default="llama-1b", help="case whose model has the matrices")
    parser.add_argument("--layers", type=int, help="its first layers alone (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where it runs")
    parser.add_argument("--tokens-per-s", type=float, default=64000.0, help="speed without updates")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before the first call")
    parser.add_argument("--calls", type=int, default=20, help="timed calls of each")
    options = parser.parse_args(arguments)
    shapes = shapes_of(options.case, options.layers)
    flops = ITERATIONS * sum(shape.iteration_flops for shape in shapes)
    parameters = sum(shape.rows * shape.columns * shape.count for shape in shapes)
    print(f"{options.case}: {parameters:,} parameters of matrices, {flops / 1e12:.2f} TFLOP\n")
    print("| | ms | TFLOP/s |\n|---|---|---|")
    seconds = {}
    for name, make in (
        ("Muon", muon_update),
        ("its products", products_alone),
        ("AdamW", adamw_update),
    ):
        call = make(shapes, options.device)
        seconds[name] = seconds_of(call, options.device, options.warm_up, options.calls)
        rate = "" if name == "AdamW" else f"{flops / seconds[name] / 1e12:.1f}"
        print(f"| {name} | {seconds[name] * 1e3:.2f} | {rate} |", flush=True)
        del call
    print(f"\nMuon over its products: {seconds['Muon'] / seconds['its products']:.2f}")
    more = seconds["Muon"] - seconds["AdamW"]
    for tokens in TOKENS_A_STEP:
        step = tokens / options.tokens_per_s + seconds["AdamW"]
        print(f"Overhead over AdamW at {tokens:,} tokens a step: {more / step:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
