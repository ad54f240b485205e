"""The command ``plan``: layouts that fit a model on GPUs, with memory and speed, as table, YAML and picture."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_megatron.cli.config import as_yaml, check_output, described_model
from lightning_megatron.errors import (
    LARGEST_BATCH,
    LARGEST_WORLD,
    ConfigError,
    divisors,
    require_choice,
    require_number,
)
from lightning_megatron.planning.devices import RANKS_PER_HOST
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import open_new, save_figure

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.planning.devices import Device
    from lightning_megatron.planning.run import PlannedRun
    from lightning_megatron.planning.search import Plan

_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true"}
DeviceName = Literal["b200", "h200", "h100", "a100", "a100-40gb"]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the command ``plan``."""

    model: str
    """Hugging Face directory or config.json, org/name, a model_type with its default sizes, or a well-known shape such
    as llama-3-8b (an unknown name lists them)."""
    gpus: int
    """Total number of GPUs."""
    memory: str | None = None
    """Memory of each GPU, e.g. 80GB (default: that of the device)."""
    device: DeviceName = "h200"
    """Type of the GPUs."""
    seq_length: int = 4096
    """Tokens of a row; for a T5 those of the encoder."""
    decoder_seq_length: int = 128
    """Tokens of a row in a T5's decoder."""
    global_batch_size: int = 256
    """Rows of a step over all GPUs."""
    precision: Literal["bf16-mixed", "16-mixed", "32-true"] = "bf16-mixed"
    """The Trainer's precision."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Short form of --precision: bf16-mixed, 16-mixed or 32-true."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer: muon has one moment of the layers' matrices, adamw two of all weights."""
    offload_optimizer: float = 0.0
    """Share of the optimizer's state in host memory, from 0 to 1: 1 for all."""
    top: int = 10
    """Number of layouts to list."""
    output: Path | None = None
    """File to write a configuration for fit with the fastest layout."""
    picture: Path | None = None
    """File to draw the memory of each layout and the pipeline of the fastest, e.g. plan.png."""
    overwrite: bool = False
    """Replace these files if they exist."""


def plan(options: PlanOptions) -> None:
    """List the layouts that fit, fastest first, with memory and speed.

    Estimates are computed by formulas fitted to runs on one to four H200s: where they were tested, memory is within 5 %
    and time within 12 % of what was measured (docs/planner.md says what was not). Other devices are scaled by their
    datasheets, and several hosts by assumption. mb x m is micro_batch_size x num_microbatches; tp uses sequence
    parallelism, and activations are recomputed only if memory requires it.

    Examples:
        lightning-megatron plan --model llama-3-8b --gpus 8 --device h100
        lightning-megatron plan --model path/to/llama --gpus 8 --memory 80GB --device h100
        lightning-megatron plan --model gpt2 --gpus 4 --seq-length 1024 --global-batch-size 48 --output fit.yaml
    """
    from lightning_megatron.engine.parallel import ParallelConfig
    from lightning_megatron.planning.devices import DEVICES
    from lightning_megatron.planning.run import PlannedRun
    from lightning_megatron.planning.search import plans

    require_number("gpus", options.gpus, at_least=1, at_most=LARGEST_WORLD)
    require_number(
        "global_batch_size", options.global_batch_size, at_least=1, at_most=LARGEST_BATCH
    )
    for name in ("seq_length", "decoder_seq_length", "top"):
        require_number(name, getattr(options, name), at_least=1)
    require_number("offload_optimizer", options.offload_optimizer, at_most=1)
    for option, path in (("--output", options.output), ("--picture", options.picture)):
        if path is not None:
            check_output(option, path, options.overwrite)
    if options.picture is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        require_choice("picture", options.picture.suffix[1:] or "png", FigureCanvasBase.filetypes)
    device: Device = DEVICES[options.device]
    if options.memory is not None:
        device = replace(device, memory=_memory(options.memory))
    model_option, model = _named_model(options.model)
    is_t5 = model.architecture == "t5"
    if model.has_position_table:
        ParallelConfig().check_sequence(options.seq_length, model.max_position_embeddings)
    run = PlannedRun(
        model=model,
        lengths=(options.seq_length, options.decoder_seq_length)
        if is_t5
        else (options.seq_length,),
        world_size=options.gpus,
        precision=_PRECISIONS.get(options.dtype or "", options.precision),
        uses_muon=options.optimizer == "muon",
        offload_optimizer=options.offload_optimizer,
    )
    found = plans(run, options.global_batch_size, device)[: options.top]
    print("\n".join(_table(found, device)))
    if options.output is not None:
        text = _yaml(found[0], model_option, options)
        with (
            failures_as_errors(f"--output {options.output} cannot be written"),
            open_new(options.output) as file,
        ):
            file.write(text)
        print(
            f"\n{options.output} is written: edit its data, then lightning-megatron fit --config {options.output}"
        )
    if options.picture is not None:
        save_figure(_draw(found, device), options.picture)
        print(f"\n{options.picture} is drawn")


def _named_model(name: str) -> tuple[str | dict[str, Any], ModelConfig]:
    """Value of ``model.model`` for the option --model, and its config; a path that exists comes first.

    Raises:
        ConfigError: If it is a word that names nothing.
    """
    from lightning_megatron.convert.registry import (
        REFUSED_TYPES,
        family_of,
        known_families,
        model_config,
    )
    from lightning_megatron.planning.shapes import SHAPES

    is_path = Path(name).expanduser().exists()
    shape = SHAPES.get(name.lower())
    if shape is not None and not is_path:
        fields = dict(shape)
        return fields, model_config(fields)
    if name in REFUSED_TYPES and not is_path:
        family_of(name)  # raises, with the reason
    is_word = re.fullmatch(r"[\w.-]+", name) is not None and not name.endswith(".json")
    if is_word and not is_path and name not in known_families():
        similar = difflib.get_close_matches(name.lower(), [*SHAPES, *known_families()], 1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(
            f"model={name}: expected a path that exists, org/name, a model_type or a well-known shape, got none of "
            f"these; {hint}Shapes: {', '.join(SHAPES)}"
        )
    return described_model(name)


_GIB = 2**30
_USUAL = "give that of a GPU, e.g. 80GB"


def _memory(text: str) -> float:
    """Bytes of the option --memory.

    Raises:
        ConfigError: If it is no size, or that of no GPU.
    """
    from lightning_megatron.convert.hugging_face_saving import size_in_bytes

    if text.isdecimal() and int(text):
        raise ConfigError(f"memory={text}: expected a unit, got none; give {text}GB")
    if not re.search("[1-9]", text):
        raise ConfigError(f"memory={text or repr(text)}: expected more than 0 bytes; {_USUAL}")
    size = size_in_bytes(text, "memory")
    if not _GIB / 1024 <= size <= 1024 * 1024 * _GIB:
        raise ConfigError(f"memory={text}: expected 1MiB to 1PiB; {_USUAL}")
    return float(size)


def _table(plans: Sequence[Plan], device: Device) -> Iterator[str]:
    from lightning_megatron.cli.inspect import columns

    first = plans[0].run
    yield (
        f"{first.model.family} on {first.world_size} x {device.name} of {device.memory / _GIB:.1f} GiB: "
        f"{first.tokens // sum(first.lengths):,} rows of {' + '.join(map(str, first.lengths))} tokens a step, "
        f"{first.precision}; GiB are those of the fullest GPU"
    )
    yield ""
    rows = [_cells(plan, device) for plan in plans]
    yield from columns([tuple(rows[0]), *(tuple(row.values()) for row in rows)])


def _cells(plan: Plan, device: Device) -> dict[str, str]:
    """One row of the table, by column."""
    from lightning_megatron.planning.flops import model_flops

    run, time, memory, parallel = plan.run, plan.time, plan.memory, plan.run.parallel
    row_flops = model_flops(run.model, run.lengths, run.model.padded_vocab_size(parallel.tp))
    flops_per_s = plan.tokens_per_s_per_device / sum(run.lengths) * row_flops
    return {
        **{
            "tp": str(parallel.tp),
            "pp": _pp(run),
            "vpp": str(parallel.vpp or "-"),
            "cp": str(parallel.cp),
        },
        **{"dp": str(run.dp), **({"ep": str(parallel.ep)} if run.model.experts else {})},
        "mb x m": f"{run.micro_batch_size} x {parallel.num_microbatches}",
        "recompute": run.recompute or "-",
        "GiB": f"{memory.total / _GIB:.1f}",
        **{part: f"{size / _GIB:.1f}" for part, size in vars(memory).items()},
        **_host_cells(run),
        "s/step": f"{time.total:.3f}",
        "bubble": f"{time.bubble / time.total:.1%}",
        "comm.": f"{time.communication / time.total:.1%}",
        "tok/s/GPU": f"{plan.tokens_per_s_per_device:,.0f}",
        "MFU": f"{flops_per_s / (run.peak_flops_per_s(device) or 1):.1%}",
    }


def _host_cells(run: PlannedRun) -> dict[str, str]:
    """Host memory that a rank's state takes, if some of it is there."""
    from lightning_megatron.planning.memory import host_bytes

    if not run.offload_optimizer:
        return {}
    most = max(host_bytes(run, stage) for stage in range(run.parallel.pp))
    return {"host": f"{most / _GIB:.1f}"}


def _pp(run: PlannedRun) -> str:
    """Number of stages, with the layers of each if uneven."""
    chunks = run.chunks[: run.parallel.pp]
    return (
        str(run.parallel.pp)
        if len(set(chunks)) == 1
        else f"{run.parallel.pp}:{'-'.join(map(str, chunks))}"
    )


def _yaml(
    best: Plan,
    model: str | dict[str, Any],
    options: PlanOptions,
) -> str:
    """Configuration for ``fit`` with the fastest layout; its data path is a placeholder."""
    from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig

    run, parallel = best.run, best.run.parallel
    always, optional = (
        ("tp", "pp", "sequence_parallel", "num_microbatches"),
        ("vpp", "cp", "ep", *UNEVEN_STAGES),
    )
    names = (
        *always,
        *(name for name in optional if getattr(parallel, name) != getattr(ParallelConfig(), name)),
    )
    strategy = {**{name: getattr(parallel, name) for name in names}, "recompute": run.recompute}
    settings: dict[str, Any] = {
        f"trainer.strategy.{name}": value for name, value in strategy.items()
    }
    devices = _devices_per_host(options.gpus, parallel.tp)
    settings |= {
        "trainer.devices": devices,
        "trainer.num_nodes": options.gpus // devices,
    }
    settings |= {"trainer.precision": run.precision, "model.model": model}
    if run.offload_optimizer:
        settings["trainer.strategy.offload_optimizer"] = run.offload_optimizer
    if run.uses_muon:
        settings["model.optimizer"] = {"name": "muon"}
    settings |= {
        "data.seq_length": options.seq_length,
        "data.micro_batch_size": run.micro_batch_size,
    }
    if run.model.architecture != "gpt":
        settings["data.data_path"] = "data/corpus_text_sentence"
        settings["data.tokenizer"] = "data/tokenizer"
    if run.model.architecture == "t5":
        settings["data.seq_length_decoder"] = options.decoder_seq_length
    estimate = f"estimated {best.memory.total / _GIB:.1f} GiB of each GPU and {best.time.total:.3f} s a step"
    title = f"# For {options.gpus} x {options.device}: {estimate}.\n#\n"
    return f"{title}#   lightning-megatron fit --config {options.output}\n{as_yaml(settings)}"


def _devices_per_host(gpus: int, tp: int) -> int:
    """Most GPUs of a host that share all ``gpus`` evenly over hosts, and hold whole groups of ``tp``."""
    return max(size for size in divisors(gpus) if size <= RANKS_PER_HOST and size % tp == 0)


def _draw(plans: Sequence[Plan], device: Device) -> Any:
    """Figure with the memory of each layout as bars, and the pipeline timeline of the fastest."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from lightning_megatron.planning.timeline import timeline

    figure = Figure(figsize=(10.0, 8.0), dpi=130, layout="constrained")
    bars, stages = figure.subplots(
        2, 1, height_ratios=(len(plans) + 3, plans[0].run.parallel.pp + 3)
    )
    names = [_name(plan) for plan in plans]
    left = [0.0] * len(plans)
    for part in vars(plans[0].memory):
        sizes = [getattr(plan.memory, part) / _GIB for plan in plans]
        bars.barh(names, sizes, left=left, label=part)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    bars.axvline(
        device.memory / _GIB,
        color="black",
        linestyle="--",
        label=f"capacity: {device.memory / _GIB:.0f} GiB",
    )
    for index, plan in enumerate(plans):
        bars.text(
            left[index],
            index,
            f" {plan.tokens_per_s_per_device:,.0f} tok/s/GPU",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.0},
        )
    bars.set(xlabel="GiB of the fullest GPU", title="Memory of each layout, fastest first")
    bars.set_xlim(0, max(device.memory / _GIB, *left) * 1.15)
    bars.invert_yaxis()
    for rank, slots in enumerate(timeline(plans[0].run, device)):
        for slot in slots:
            colour = (
                "C0" if slot.is_forward else "C2",
                1 - 0.6 * slot.chunk / plans[0].run.parallel.num_model_chunks,
            )
            stages.barh(
                rank, slot.seconds, left=slot.start, color=colour, edgecolor="white", linewidth=0.3
            )
    stages.set(
        xlabel="seconds",
        ylabel="pipeline stage",
        title=f"One step of {names[0]}, before the optimizer",
    )
    stages.set_yticks(range(plans[0].run.parallel.pp))
    stages.invert_yaxis()
    directions = [Patch(color="C0", label="forward"), Patch(color="C2", label="backward")]
    figure.legend(
        handles=bars.get_legend_handles_labels()[0], loc="outside upper center", ncols=6, fontsize=8
    )
    figure.legend(handles=directions, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _name(plan: Plan) -> str:
    run, parallel = plan.run, plan.run.parallel
    vpp = f" vpp{parallel.vpp}" if parallel.vpp else ""
    cp = f" cp{parallel.cp}" if parallel.cp > 1 else ""
    ep = f" ep{parallel.ep}" if run.model.experts else ""
    return (
        f"tp{parallel.tp} pp{_pp(run)}{vpp}{cp} dp{run.dp}{ep}, {run.micro_batch_size} x {parallel.num_microbatches}"
        f"{', recompute' if run.recompute else ''}"
    )
