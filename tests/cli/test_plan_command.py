"""``plan``: table, configuration for ``fit``, picture, and uneven stages."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.cases import LLAMA_8B
from docs import which_layout
from lightning_megatron.cli import plan as command
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.planning.devices import DEVICES
from lightning_megatron.planning.parameters import total_parameters
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.planning.search import plan
from lightning_megatron.planning.shapes import SHAPES
from tests.cli.command import instantiate, run_all, run_cli
from tests.marks import exhaustive
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


@pytest.mark.parametrize(
    ("gpus", "tp", "hosts"),
    [(1, 1, (1, 1)), (6, 2, (6, 1)), (12, 4, (4, 3)), (12, 2, (6, 2)), (24, 8, (8, 3)), (13, 1, (1, 13))],
)  # fmt: skip
def test_configuration_uses_all_gpus_and_no_host_splits_a_tensor_group(
    gpus: int, tp: int, hosts: tuple[int, int]
) -> None:
    devices = command._devices_per_host(gpus, tp)
    assert (devices, gpus // devices) == hosts


def test_configuration_has_the_lengths_and_the_number_of_gpus_that_were_planned(
    tmp_path: Path,
) -> None:
    words = (
        "--model t5-large --gpus 12 --seq-length 256 --decoder-seq-length 64 --global-batch-size 24"
    )
    file = tmp_path / "t5.yaml"
    code, _, _ = run_cli(tmp_path, "plan", *words.split(), "--top", "1", "--output", file)
    assert code == 0
    written = yaml.safe_load(file.read_text())
    trainer, data = written["trainer"], written["data"]["init_args"]
    assert trainer["devices"] * trainer["num_nodes"] == 12
    assert (data["seq_length"], data["seq_length_decoder"]) == (256, 64)
    assert data["data_path"].endswith("_sentence")
    assert data["tokenizer"]


def test_layouts_that_differ_in_ep_alone_have_bars_of_their_own() -> None:
    model = model_config(dict(SHAPES["qwen3-30b-a3b"]))
    device = DEVICES["h200"]
    found = [
        plan(
            PlannedRun(
                model=model,
                parallel=ParallelConfig(ep=ep),
                micro_batch_size=1,
                lengths=(4096,),
                world_size=8,
            ),
            device,
        )
        for ep in (1, 2, 4)
    ]
    assert len({command._name(each) for each in found}) == 3


def test_a_changed_run_counts_its_own_parameters() -> None:
    """Counts are kept, as a plan reads them often, but by the run that they are of."""
    model = model_config(dict(SHAPES["llama-3-8b"]))
    run = PlannedRun(model=model, lengths=(4096,), world_size=8)
    ((replicas, whole),) = run.parameters(0).items()
    split = replace(run, parallel=ParallelConfig(tp=2))
    ((of_split, half),) = split.parameters(0).items()
    assert (replicas, of_split) == (8, 4)
    assert 0.5 < half / whole < 0.51


# ---- well-known shapes ----------------------------------------------------------------------------------------------

PUBLISHED_BILLIONS = {
    "gpt2-xl": 1.56,
    "llama-3.2-1b": 1.236,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "qwen3-8b": 8.19,
    "gemma-2-9b": 9.24,
    "mixtral-8x7b": 46.7,
    "qwen3-30b-a3b": 30.5,
    "moonlight-16b-a3b": 16.0,
    "qwen3-next-80b-a3b": 79.7,  # of about 80, without multi-token prediction
    "deepseek-v3": 671.0,
    "t5-large": 0.738,
    "t5-3b": 2.85,
    "bert-large": 0.336,
}
"""Parameters as their authors count them; BERT's without the second norm after its embeddings."""
_PAGE = which_layout.PAGE.read_text()
_KINDS = (
    "gpt2-xl",
    "llama-3-8b",
    "gemma-2-9b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "moonlight-16b-a3b",
    "deepseek-v3",
    "t5-3b",
    "bert-large",
)
"""One or two of each kind of model: dense, with experts, with latent attention, encoder-decoders and encoders."""


def test_shapes_have_as_many_parameters_as_published() -> None:
    counted = {
        name: total_parameters(model_config(dict(fields))) / 1e9 for name, fields in SHAPES.items()
    }
    assert counted == pytest.approx(PUBLISHED_BILLIONS, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        *((name, (1, 8)) for name in _KINDS),
        *((name, (64,)) for name in ("gpt2-xl", "llama-3-8b", "gemma-2-9b")),
        *(exhaustive(name, (1, 8)) for name in SHAPES if name not in _KINDS),
        *(exhaustive(name, (64,)) for name in SHAPES),
    ],
)
def test_page_of_layouts_has_what_the_planner_says(name: str, gpus: tuple[int, ...]) -> None:
    (line,) = (line for line in _PAGE.splitlines() if line.startswith(f"| {name} |"))
    head, *cells = which_layout.row(name, SHAPES[name], gpus).strip("| ").split(" | ", 3)
    assert line.startswith(f"| {head} | {cells[0]} | {cells[1]} | ")
    columns = dict(zip(which_layout.GPUS, line.strip("| ").split(" | ")[3:], strict=True))
    assert cells[2] == " | ".join(columns[number] for number in gpus)


def test_page_of_layouts_has_the_text_of_its_script() -> None:
    assert _PAGE.startswith(which_layout.HEAD)
    assert _PAGE.endswith(which_layout.TAIL)


def test_optimizer_is_planned_and_configured(tmp_path: Path) -> None:
    options = ("--model", "gpt2", "--gpus", "1", "--seq-length", "1024", "--global-batch-size", "8")
    totals = {}
    for optimizer in ("adamw", "muon"):
        file = tmp_path / f"{optimizer}.yaml"
        chosen = ("--optimizer", optimizer, "--output", str(file))
        code, out, _ = run_cli(tmp_path, "plan", *options, *chosen)
        assert code == 0
        totals[optimizer] = out
        assert ("name: muon" in file.read_text()) == (optimizer == "muon")
    assert totals["adamw"] != totals["muon"]


def test_state_in_host_memory_is_planned_and_configured(tmp_path: Path) -> None:
    options = ("--model", "llama-3-8b", "--gpus", "1", "--global-batch-size", "64", "--top", "1")
    code, _, error = run_cli(tmp_path, "plan", *options)
    assert code == 2
    assert "expected at least 1" in error
    file = tmp_path / "fit.yaml"
    offloaded = ("--offload-optimizer", "1", "--output", str(file))
    code, out, _ = run_cli(tmp_path, "plan", *options, *offloaded)
    assert code == 0
    names, cells = (line.split() for line in out.splitlines()[2:4])
    assert dict(zip(names, cells, strict=True))["host"] == "89.7"
    strategy = yaml.safe_load(file.read_text())["trainer"]["strategy"]["init_args"]
    assert strategy["offload_optimizer"] == 1.0
    code, _, error = run_cli(tmp_path, "plan", *options, "--offload-optimizer", "2")
    assert (code, error.startswith("error: --offload-optimizer 2.0 must be at most 1")) == (2, True)


def test_shape_of_the_page_is_planned_by_its_command(tmp_path: Path) -> None:
    ((_, *words),) = commands("docs/which_layout.md")
    code, out, err = run_cli(tmp_path, *words)
    assert (code, err) == (0, "")
    cells = out.splitlines()[3].split()
    shown = f"tp{cells[0]} dp{cells[4]}, {cells[5]} x {cells[7]}; "
    (line,) = (line for line in _PAGE.splitlines() if line.startswith("| llama-3-8b |"))
    assert shown in line
    (layout,) = run_ranks(_layout_of_shape, 1, str(tmp_path))
    assert layout == (int(cells[0]), 4096, "llama")


def _layout_of_shape(folder: str) -> tuple[int, int, str]:
    cli = instantiate(folder, "--config", "llama.yaml")
    model = cli.model.model_config
    return cli.trainer.strategy.tp, model.hidden_size, model.family


def test_unknown_shapes_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "t5-3b").mkdir()
    (tmp_path / "t5-3b/config.json").write_text('{"model_type": "gpt2"}')
    options = ("--gpus", "1", "--seq-length", "64", "--global-batch-size", "1", "--top", "1")
    words = ("lama-3-8b", "nothing", "bert", "org/name/more", "t5-3b", "GPT2-XL")
    results = run_all(tmp_path, [["plan", "--model", word, *options] for word in words])
    similar, unknown, refused, path, own, other_case = results
    assert "did you mean llama-3-8b? Shapes: gpt2-xl, llama-3.2-1b, " in similar[2]
    assert "got none of these; Shapes: gpt2-xl" in unknown[2]
    assert "use model_type='megatron-bert'" in refused[2]
    assert "org/name/more does not exist" in path[2]
    assert [result[0] for result in results] == [2, 2, 2, 2, 0, 0]
    # A path that exists comes first.
    assert own[1].startswith("gpt2 on 1 x ")
    assert other_case[1].startswith("gpt2 on 1 x ")
