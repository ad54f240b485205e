"""``plan``: table, configuration for ``fit``, picture, and uneven stages."""

import json
from pathlib import Path
from typing import Any

from benchmarks.cases import LLAMA_8B
from lightning_megatron.cli import plan as command
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.planning.devices import DEVICES
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.search import plan
from tests.cli.command import instantiate, run_cli
from tests.pages import commands
from tests.ranks import run_ranks


def test_best_layout_becomes_a_configuration_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    ((_, *words),) = commands("docs/planner.md")
    code, out, err = run_cli(
        tmp_path, *("config.json" if word == "path/to/llama" else word for word in words)
    )
    assert (code, err) == (0, "")
    head, _, columns, *rows = out.split("\n\nbest.yaml")[0].splitlines()
    assert head.startswith(
        "llama on 8 x NVIDIA H100 80GB HBM3 of 55.9 GiB: 16 rows of 4096 tokens a step, bf16-mixed"
    )
    assert columns.split()[:6] == ["tp", "pp", "vpp", "cp", "dp", "mb"]
    assert len(rows) == 3
    tp, pp, vpp, _, _, size, _, count = rows[0].split()[:8]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    (strategy,) = run_ranks(_layout_of, 1, str(tmp_path))
    assert strategy == (int(tp), int(pp), None if vpp == "-" else int(vpp), int(count), int(size))


def _layout_of(folder: str) -> tuple[int, int, int | None, int, int]:
    """Layout, microbatches and micro batch size of the configuration, as instantiated by ``fit``."""
    cli = instantiate(folder, "--config", "best.yaml")
    strategy = cli.trainer.strategy
    return (
        strategy.tp,
        strategy.pp,
        strategy.vpp,
        strategy.num_microbatches,
        cli.datamodule.micro_batch_size,
    )


def test_uneven_stages_are_shown_and_become_options() -> None:
    uneven: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": 8,
        "num_layers_in_last_pipeline_stage": 6,
    }
    parallel = ParallelConfig(pp=4, num_microbatches=8, **uneven)
    device = DEVICES["h200"]
    model = model_config(dict(LLAMA_8B))
    run = PlannedRun(
        model=model, parallel=parallel, micro_batch_size=1, lengths=(4096,), world_size=4
    )
    best = plan(run, device)
    assert list(command._table([best], device))[-1].split()[:2] == ["1", "4:8-9-9-6"]
    config = command._yaml(best, "llama", command.PlanOptions(model="llama", gpus=4))
    assert [name for name, number in uneven.items() if f"{name}: {number}" not in config] == []
