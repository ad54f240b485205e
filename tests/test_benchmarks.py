"""The benchmarks run, and their figures follow from the measurements."""

import contextlib
import importlib
import io
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import convergence, muon, picture, train_step
from benchmarks.attention import KINDS, Kind
from benchmarks.cases import case_named
from benchmarks.measurement import read, tables
from tests.marks import exhaustive
from tests.ranks import run_ranks

_OTHER_SMOKE = ("smoke", "smoke-bert", "smoke-t5", "smoke-lora", "smoke-muon", "smoke-experts")


def _run(module: str, *arguments: str) -> tuple[int | None, str]:
    """Exit code and output of a benchmark on this rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = importlib.import_module(f"benchmarks.{module}").main(list(arguments))
    return code, printed.getvalue()


def _run_on_ranks(ranks: int, module: str, *arguments: str) -> str:
    """Output of the first rank; asserts that all ranks succeed and the others print nothing."""
    printed: str
    (first, printed), *others = run_ranks(_run, ranks, module, *arguments)
    assert first in (0, None)
    assert all(other == (first, "") for other in others)
    return printed


def _documented_arguments() -> list[str]:
    """Arguments of the training benchmark in the commands that the README shows."""
    text = (picture.FOLDER / "README.md").read_text()
    return re.findall(r"^python -m benchmarks (-[^#\n]*)", text, re.MULTILINE)


@pytest.mark.parametrize("arguments", _documented_arguments())
def test_documented_numbers_of_steps_are_accepted(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(train_step, "_run", lambda options, plan: begun.append(plan))
    monkeypatch.setattr(train_step, "run_each", lambda *_: begun.append("each case"))
    assert train_step.main(shlex.split(arguments)) in (0, None)
    assert len(begun) == ("--list" not in arguments)


def test_refused_numbers_of_steps_are_a_mistake_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        train_step.main(["--case", "smoke", "--warmup-steps", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("warmup_steps=2 must be at least 4")


def test_peer_picture_is_drawn_from_the_results_table(tmp_path: Path) -> None:
    names, figures = picture.peers((picture.FOLDER / "results.md").read_text())
    assert (names[0], names[-1]) == ("lightning-megatron", "floor")
    picture.draw(names, figures, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_loader_benchmark_measures_all_objectives() -> None:
    options = (
        "--seconds",
        "0.02",
        "--tokens",
        "100000",
        "--document-tokens",
        "500",
        "--num-workers",
        "0",
    )
    lines = [
        line for line in _run_on_ranks(1, "loader", *options).splitlines() if "M tokens/s" in line
    ]
    assert [line.split()[0] for line in lines] == ["gpt", "bert", "t5"]
    assert all(float(line.split("M tokens/s")[0].split()[-1]) > 0 for line in lines)


def test_streaming_benchmark_measures_reader_and_worker(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A sentence of a text. " * 200)
    options = ("--input", str(tmp_path), "--vocab-size", "270", "--seq-length", "64")
    printed = _run_on_ranks(1, "streaming", *options, "--tokens", "50000", "--shuffle-buffer", "4")
    (line,) = [line for line in printed.splitlines() if line.startswith("shuffle buffer")]
    worker, reader = (
        float(line.split(name)[1].split()[0].replace(",", "")) for name in ("worker", "reader")
    )
    assert min(worker, reader) > 0


def test_linear_attention_benchmark_measures_this_package() -> None:
    options = ("--device", "cpu", "--seq-length", "70", "--rows", "1", "--warm-up", "0")
    printed = _run_on_ranks(1, "linear_attention", *options, "--calls", "1")
    (line,) = [line for line in printed.splitlines() if line.startswith("| lightning-megatron")]
    _, _, milliseconds, difference, _ = line.split("|")
    assert float(milliseconds) > 0
    assert float(difference) == 0


def test_attention_benchmark_measures_every_kind() -> None:
    options = ("--device", "cpu", "--seq-length", "40", "--rows", "1", "--warm-up", "0")
    printed = _run_on_ranks(1, "attention", *options, "--calls", "1")
    rows = [line.split("|")[1:4] for line in printed.splitlines() if line.startswith("| ")][1:]
    assert [name.strip() for name, _, _ in rows] == [kind.name for kind in KINDS]
    assert all(float(milliseconds) > 0 for _, milliseconds, _ in rows)


def test_muon_benchmark_measures_update_products_and_adamw() -> None:
    options = ("--device", "cpu", "--case", "smoke", "--warm-up", "0", "--calls", "1")
    printed = _run_on_ranks(1, "muon", *options)
    rows = [line.split("|")[1:3] for line in printed.splitlines() if line.startswith("| ")][1:]
    assert [name.strip() for name, _ in rows] == ["Muon", "its products", "AdamW"]
    assert all(float(milliseconds) > 0 for _, milliseconds in rows)
    assert printed.count("Overhead over AdamW at ") == len(muon.TOKENS_A_STEP)


@pytest.mark.exhaustive
def test_offload_benchmark_measures_the_bus_and_both_steps() -> None:
    options = ("--case", "smoke-offload", "--warm-up", "0")
    printed = _run_on_ranks(1, "offload", *options)
    figures = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert printed.count("GB/s") == 3
    assert float(figures["offloaded"][1]) > 0
    assert float(figures["plain"][1]) > 0
    assert figures["exposed"][-1] in ("met", "MISSED")


def test_flops_of_attention_count_pairs_that_are_seen() -> None:
    kind = Kind(
        name="",
        heads=2,
        groups=1,
        width=3,
        value_width=2,
        window=4,
    )
    seen = sum(min(query + 1, 4) for query in range(10))
    assert kind.flops(5, 10) == 3 * 2 * 5 * 2 * seen * (3 + 2)


@pytest.mark.parametrize(
    "name",
    ["smoke-tp2", *(exhaustive(x) for x in _OTHER_SMOKE)],
)
def test_train_step_benchmark_reports_its_steps(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    output = tmp_path / "out.jsonl"
    steps = ("--warmup-steps", "4", "--steps", "6", "--bare-steps", "4")
    _run_on_ranks(
        case.num_devices,
        "train_step",
        "--case",
        name,
        "--output",
        str(output),
        *steps,
    )
    (measured,) = read(output)
    assert (len(measured.steps), len(measured.bare_steps)) == (6, 4)
    assert 0 < min(measured.steps) <= measured.step_seconds <= max(measured.steps)
    assert measured.tokens_per_step == 2 * 2 * (32 + case.decoder_seq_length)
    # An untrained model predicts the 300 tokens uniformly, and BERT the two sentence orders. T5 starts with large
    # weights, as in transformers. The load-balancing loss of 2 (experts per token) has the weight 0.001.
    initial_loss = math.log(300) + (math.log(2) if name == "smoke-bert" else 0)
    assert measured.loss_first == pytest.approx(
        initial_loss, abs=1.5 if name == "smoke-t5" else 0.1
    )
    # For a CPU neither the peak FLOP/s nor CUDA memory is known.
    assert measured.mfu_causal is measured.peak_allocated_gib is None
    assert f"| {name} ({case}) | lightning-megatron |" in tables([measured])


@pytest.mark.exhaustive
def test_checkpoint_benchmark_measures_saves_and_a_resume(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    common = (
        "--case",
        "smoke-tp2",
        "--saves",
        "2",
        "--folder",
        str(tmp_path),
        "--output",
        str(output),
    )
    _run_on_ranks(2, "checkpoint", *common, "--part", "sync")
    _run_on_ranks(2, "checkpoint", *common, "--part", "async", "--keep", "--no-load")
    _run_on_ranks(2, "checkpoint", *common, "--part", "resume", "--resume-layout", "pp=2")
    sync, async_, resumed = read(output)
    assert [len(each.saves) for each in (sync, async_, resumed)] == [2, 2, 0]
    assert all(0 < save["stall"] <= save["complete"] < 60 for save in (*sync.saves, *async_.saves))
    assert [save["steps_during"] for save in sync.saves] == [[], []]
    # Weights, fp32 master weights and two moments of 37,120 parameters, and the format's overhead.
    assert 1 < sync.gigabytes * 1e9 / (37_120 * 4 * 4) < 2
    assert (sync.load_layout, async_.load_seconds, resumed.load_layout) == (
        "tp=2 dp=1",
        None,
        "pp=2 dp=1",
    )
    assert min(sync.load_seconds, resumed.load_seconds) > 0
    assert tables([sync, async_, resumed]).count("smoke-tp2 (2 cpu") == 3
    assert not list(tmp_path.rglob("*.ckpt"))


def test_generation_benchmark_compares_with_transformers(tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    for case, ranks, *variants in (
        ("smoke", 1, "eager", "static"),
        ("smoke", 1, "peer-static"),
        ("smoke-tp2", 2, "eager"),
    ):
        options = [word for variant in variants for word in ("--variant", str(variant))]
        _run_on_ranks(
            int(ranks),
            "generation",
            "--case",
            str(case),
            *options,
            "--calls",
            "2",
            "--output",
            output,
        )
    measured = read(tmp_path / "out.jsonl")
    assert [m.case for m in measured] == ["smoke"] * 3 + ["smoke-tp2"]
    assert tables(measured).count("x |") >= 1  # speed relative to the peer
    assert all(len(m.call_seconds) == len(m.first_token_seconds) == 2 for m in measured)
    assert all(min(*m.call_seconds, *m.first_token_seconds) > 0 for m in measured)


@pytest.mark.exhaustive
def test_convergence_benchmark_saves_and_draws_losses(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    for number in range(40):
        (text / f"{number}.md").write_text(
            "".join(f"{number} + {other} = {number + other}\n" for other in range(60))
        )
    (text / "again.txt").write_text((text / "1.md").read_text())
    few = (
        "--steps",
        "60",
        "--vocab-size",
        "300",
        "--lr",
        "0.01",
        "--output",
        str(tmp_path / "a/losses.json"),
    )
    ways = ("bf16", "fp8", "fp8, exact backward", "adamw", "muon")
    chosen = [argument for way in ways for argument in ("--way", way)]
    _run_on_ranks(
        1,
        "convergence",
        "--case",
        "smoke-fp8",
        "--text",
        str(text),
        *few,
        *chosen,
    )
    results = json.loads((tmp_path / "a/losses.json").read_text())
    assert results["files"] == 40  # without the duplicate
    curves = results["losses"]
    assert list(curves) == list(ways)
    assert all(len(losses) == 60 and losses[-1] < losses[0] - 1 for losses in curves.values())
    assert curves["bf16"] != curves["fp8"]
    assert curves["adamw"] != curves["muon"]
    assert convergence.table(curves).count("\n") == 1 + len(curves)
    assert (tmp_path / "a/losses.png").read_bytes().startswith(b"\x89PNG")
