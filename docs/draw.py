"""Draw the pictures of docs/concepts.md: ``python docs/draw.py``. Pipelines are timelines of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.planning.devices import DEVICES
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.timeline import timeline

FOLDER = Path(__file__).parent / "pictures"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def draw_batch() -> Figure:
    """Batch of each replica, split into microbatches: one optimizer step."""
    figure = Figure(figsize=(8.4, 2.6), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 8.4), ylim=(0, 2.6))
    axes.axis("off")
    for replica in range(2):
        left = 0.1 + replica * 4.2
        axes.text(left, 2.4, f"replica {replica} (dp rank {replica})", fontsize=10, weight="bold")
        for microbatch in range(4):
            for row in range(2):
                corner = (left + microbatch * 0.95, 1.75 - row * 0.35)
                axes.add_patch(Rectangle(corner, 0.85, 0.3, color=f"C{microbatch}", alpha=0.5))
                axes.text(
                    corner[0] + 0.42,
                    corner[1] + 0.15,
                    f"row {2 * microbatch + row}",
                    ha="center",
                    va="center",
                    size=7,
                )
            axes.text(
                left + microbatch * 0.95 + 0.42,
                1.2,
                f"microbatch {microbatch}",
                ha="center",
                fontsize=7,
            )
        axes.text(left, 0.85, "one batch = micro_batch_size 2 x num_microbatches 4", fontsize=8)
    axes.text(
        4.2,
        0.35,
        "gradients are summed over microbatches and replicas: one optimizer step",
        ha="center",
        fontsize=9,
    )
    return figure


def draw_axes() -> Figure:
    """Shard of the model on each GPU with tp=2, pp=2, dp=2."""
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 8.4), ylim=(0, 3.8))
    axes.axis("off")
    for dp in range(2):
        for pp in range(2):
            for tp in range(2):
                rank = pp * 4 + dp * 2 + tp
                left, low = 0.5 + dp * 4.0 + tp * 1.8, 1.9 - pp * 1.6
                axes.add_patch(
                    Rectangle(
                        (left, low),
                        1.65,
                        1.3,
                        facecolor=f"C{pp}",
                        alpha=0.25 + 0.35 * tp,
                        ec="black",
                    )
                )
                text = f"GPU {rank}\nlayers {pp * 16}-{pp * 16 + 15}\n{'left' if tp == 0 else 'right'} half of each"
                axes.text(left + 0.82, low + 0.65, text, ha="center", va="center", fontsize=8)
        axes.text(
            2.3 + dp * 4.0,
            3.5,
            f"replica {dp}: its own rows",
            ha="center",
            fontsize=10,
            weight="bold",
        )
    axes.text(0.2, 2.55, "stage 0", rotation=90, va="center", fontsize=9)
    axes.text(0.2, 0.95, "stage 1", rotation=90, va="center", fontsize=9)
    return figure


def draw_pipelines() -> Figure:
    """Timelines of eight microbatches on four stages, with one chunk per stage and with two (interleaved)."""
    layouts = (
        ParallelConfig(pp=4, num_microbatches=8),
        ParallelConfig(pp=4, vpp=2, num_microbatches=8),
    )
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    for axes, parallel in zip(figure.subplots(2, 1, sharex=True), layouts, strict=True):
        run = PlannedRun(
            model=model_config(LLAMA),
            parallel=parallel,
            micro_batch_size=1,
            lengths=(4096,),
            world_size=4,
        )
        for rank, slots in enumerate(timeline(run, DEVICES["h200"])):
            for slot in slots:
                _add_slot(axes, rank, slot, parallel.num_model_chunks)
        axes.set(
            title="pp=4" + (f", vpp={parallel.vpp}" if parallel.vpp else ""),
            ylabel="stage",
            yticks=range(4),
        )
        axes.invert_yaxis()
    axes.set_xlabel("seconds")
    handles = [
        Patch(color="C0", label="forward"),
        Patch(color="C2", label="backward"),
        Patch(color="none", label="white: waiting"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _add_slot(axes: Any, rank: int, slot: Any, chunks: int) -> None:
    colour = (
        "C0" if slot.is_forward else "C2",
        0.45 + 0.5 * (slot.chunk + 1) / chunks - 0.25 * (chunks > 1),
    )
    axes.barh(
        rank,
        slot.seconds,
        left=slot.start,
        color=colour,
        edgecolor="white",
        linewidth=0.4,
        height=0.9,
    )
    middle = slot.start + slot.seconds / 2
    axes.text(
        middle,
        rank,
        str(slot.microbatch),
        ha="center",
        va="center",
        fontsize=6 if chunks == 1 else 4.5,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for draw in (draw_batch, draw_axes, draw_pipelines):
        draw().savefig(FOLDER / f"{draw.__name__.removeprefix('draw_')}.png", dpi=110)
