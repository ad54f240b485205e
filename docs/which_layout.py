"""Write docs/which_layout.md: ``python -m docs.which_layout``. Each cell is the planner's first answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planning.devices import DEVICES, GIB
from lightning_megatron.planning.parameters import total_parameters
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.search import Plan, plans
from lightning_megatron.planning.shapes import SHAPES

PAGE = Path(__file__).with_name("which_layout.md")
GPUS = (1, 8, 64)
DEVICE = "h100"
_TOKENS = 32_768
"""Tokens of a step on each GPU; of a T5 those of the encoder."""
_SEQ_LENGTH = 4096
_T5_LENGTHS = (512, 128)


def lengths_of(model: ModelConfig) -> tuple[int, ...]:
    """Tokens of a row: as many as are usual for the model, at most 4,096."""
    if model.architecture == "t5":
        return _T5_LENGTHS
    if model.has_position_table:
        return (min(_SEQ_LENGTH, model.max_position_embeddings),)
    return (_SEQ_LENGTH,)


def cell(model: ModelConfig, gpus: int) -> str:
    """The fastest layout, its memory and its speed; what is missing if none fits."""
    lengths = lengths_of(model)
    run = PlannedRun(model=model, lengths=lengths, world_size=gpus)
    rows = _TOKENS // lengths[0] * gpus
    device = DEVICES[DEVICE]
    try:
        best = plans(run, rows, device)[0]
    except ConfigError as error:
        if not str(error).startswith("memory"):
            raise
        needed = str(error).partition("at least ")[2].partition(" GiB")[0]
        return f"none: {float(needed):,.0f} GiB a GPU"
    speed = f"{best.tokens_per_s_per_device:,.0f}"
    return f"{_layout(best)}; {best.memory.total / GIB:.0f} GiB; {speed}"


def _layout(plan: Plan) -> str:
    """Axes of more than one rank, then microbatches."""
    run = plan.run
    parallel = run.parallel
    sizes = {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.vpp or 1,
        "cp": parallel.cp,
        "ep": parallel.ep,
        "dp": run.dp,
    }
    axes = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    text = f"{' '.join(axes) or '1 rank'}, {run.micro_batch_size} x {parallel.num_microbatches}"
    stages = run.chunks[: parallel.pp]
    if len(set(stages)) > 1 and parallel.vpp is None:
        text += f", layers {'-'.join(map(str, stages))}"
    if run.recompute:
        text += f", recompute {run.recompute}"
    return text


def row(name: str, fields: Mapping[str, Any], gpus: tuple[int, ...] = GPUS) -> str:
    """Row of the table.

    Args:
        name: Name of the shape.
        fields: Fields of its config.
        gpus: Columns to compute.
    """
    model = model_config(dict(fields))
    size = f"{total_parameters(model) / 1e9:.2f} billion"
    tokens = " + ".join(map(str, lengths_of(model)))
    cells = [cell(model, number) for number in gpus]
    return f"| {name} | {size} | {tokens} | {' | '.join(cells)} |"


def _lines() -> Iterator[str]:
    yield HEAD
    columns = ["shape", "parameters", "tokens a row", "1 GPU"]
    columns += [f"{number} GPUs" for number in GPUS[1:]]
    yield f"| {' | '.join(columns)} |"
    yield "|---|---|---|" + "---|" * len(GPUS)
    for name, fields in SHAPES.items():
        yield row(name, fields)
    yield TAIL


HEAD = """# Which layout

The [planner](planner.md)'s first answer for well-known shapes on H100s of 80 GB, trained in bf16 with fp32 master
weights and a distributed optimizer, 32,768 tokens a GPU in each step. `python -m docs.which_layout` has made this
page. Each cell: the axes of more than one rank, `micro_batch_size x num_microbatches`; GiB of the fullest GPU;
tokens/s a GPU. Where none fits, what the smallest layout needs.
"""
TAIL = """
All of it is estimated ([how far to trust it](planner.md#how-far-to-trust-it)): H100s are scaled from measured
H200s, and what lies beyond one host was not measured. Rules of thumb that the table shows:

- A model that fits with its optimizer's state spread over dp needs no other axis.
- Where it does not fit, the planner takes tp within a host first, then pp; recomputation comes last.
- More GPUs can need less splitting, since dp spreads the optimizer's state over more of them.
- For experts, which weigh much for what they compute, it takes pipelines.

For another device, length or batch ask the planner; it knows these names without a download, and writes the
configuration of a run. The row of llama-3-8b on 8 GPUs is the first line of

```bash
lightning-megatron plan --model llama-3-8b --gpus 8 --device h100 --global-batch-size 64 --output llama.yaml
```

A directory, a `config.json` or a name on the hub works in the same place. BERT here is `megatron-bert`, with the
norm before each block.
"""

if __name__ == "__main__":
    PAGE.write_text("\n".join(_lines()))
