"""What an update costs whose state is in host memory: the bus alone, and steps with and without.

    python -m benchmarks.offload                                        # llama-8b-8layers, 256k tokens a step, 1 GPU
    python -m benchmarks.offload --case llama-8b-offload --without-plain  # all of Llama-3-8B

The rate of the bus is that of copies of buckets between pinned memory and the GPU, alone and in both directions at
once. What a step takes longer than one with the state on the GPU is compared with the time in which the state passes
the bus once in one direction, plus 5 % of the plain step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from benchmarks.attention import seconds_of
from benchmarks.cases import Case, case_named
from benchmarks.measurement import read

_SLACK = 0.05
"""Share of the plain step that an update may take longer than one way of the state."""
_BUCKETS = 8
"""Buckets that are copied one after the other to measure the bus."""
_STEPS = "4"
"""Steps before the first timed one, and timed ones: the fewest that the training benchmark takes."""


def state_bytes(case: Case) -> float:
    """Bytes of the state that a rank of the case keeps in host memory."""
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.planning.memory import host_bytes
    from lightning_megatron.planning.run import PlannedRun

    run = PlannedRun(
        model=model_config(dict(case.model)),
        lengths=(case.seq_length,),
        world_size=case.num_devices,
        precision=case.precision,
        uses_muon=case.optimizer.get("name") == "muon",
        offload_optimizer=float(case.layout["offload_optimizer"]),
    )
    return host_bytes(run, 0)


def bus_rates(device: str, warm_up: float) -> dict[str, float]:
    """Bytes/s to the device, from it, and of each direction with both at once."""
    import torch

    from lightning_megatron.engine.host_state import BUCKET_ELEMENTS
    from lightning_megatron.engine.pinned_memory import PinnedBlock

    num_bytes = 4 * BUCKET_ELEMENTS
    block = PinnedBlock(2 * num_bytes, torch.device(device))
    inward, outward = (
        block.tensor(offset, (BUCKET_ELEMENTS,), torch.float32) for offset in (0, num_bytes)
    )
    here, there = (torch.zeros(BUCKET_ELEMENTS, device=device) for _ in range(2))
    other_stream = torch.cuda.Stream() if device == "cuda" else None

    def copy_in() -> None:
        for _ in range(_BUCKETS):
            here.copy_(inward, non_blocking=True)

    def copy_out() -> None:
        for _ in range(_BUCKETS):
            outward.copy_(there, non_blocking=True)

    def both() -> None:
        with torch.cuda.stream(other_stream):
            copy_out()
        copy_in()

    rates = {}
    for name, call in (("in", copy_in), ("out", copy_out), ("both", both)):
        rates[name] = _BUCKETS * num_bytes / seconds_of(call, device, warm_up, 5)
    block.release()
    return rates


def step(name: str, options: argparse.Namespace) -> SimpleNamespace:
    """Measurement of a training case, in a process of its own.

    Raises:
        RuntimeError: If it fails.
    """
    case = case_named(options.case)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.jsonl")
        command = [sys.executable, "-m", "benchmarks.train_step", "--case", name]
        command += ["--num-microbatches", str(options.num_microbatches or case.num_microbatches)]
        command += ["--warmup-steps", _STEPS, "--steps", _STEPS]
        command += ["--bare-steps", "0", "--no-host-waits", "--output", str(output)]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"case {name} has failed")
        return read(output)[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--case", default="llama-8b-8layers-offload")
    parser.add_argument("--num-microbatches", type=int, help="(default: the case's)")
    parser.add_argument("--without-plain", action="store_true", help="only the run with offloading")
    parser.add_argument("--warm-up", type=float, default=0.5, help="seconds of copies")
    options = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments))
    case = case_named(options.case)
    device = "cuda" if case.accelerator == "gpu" else "cpu"
    rates = bus_rates(device, options.warm_up)
    one_way = state_bytes(case) / rates["in"]
    for name, rate in rates.items():
        print(f"bus {name:4} {rate / 1e9:6.1f} GB/s" + " each way" * (name == "both"))
    print(f"state {state_bytes(case) / 1e9:.1f} GB, one way {one_way:.3f} s", flush=True)
    offloaded = step(case.name, options)
    print(
        f"offloaded {offloaded.step_seconds:.3f} s a step of {offloaded.tokens_per_step:,} tokens"
    )
    if options.without_plain:
        return 0
    plain = step(case.name.removesuffix("-offload"), options)
    exposed = offloaded.step_seconds - plain.step_seconds
    limit = one_way + _SLACK * plain.step_seconds
    print(f"plain     {plain.step_seconds:.3f} s")
    print(f"ratio     {offloaded.step_seconds / plain.step_seconds:.3f}")
    print(
        f"exposed   {exposed:.3f} s, at most {limit:.3f}: {'met' if exposed <= limit else 'MISSED'}"
    )
    for each in (offloaded, plain):
        if each.peak_allocated_gib is not None:
            print(f"{each.case}: {each.peak_allocated_gib:.1f} GiB of the GPU at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
