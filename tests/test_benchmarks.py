"""The benchmarks run, and their figures follow from what was measured."""

import contextlib
import importlib
import io
import json
import math
from pathlib import Path

import pytest

from benchmarks import convergence, picture
from benchmarks.cases import case_named
from benchmarks.measurement import read, tables
from tests.ranks import run_ranks

_OTHER_SMOKE = ("smoke", "smoke-bert", "smoke-t5", "smoke-lora", "smoke-experts")


def _run(module: str, *arguments: str) -> tuple[int | None, str]:
    """On each rank: a benchmark as the command line would run it, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = importlib.import_module(f"benchmarks.{module}").main(list(arguments))
    return code, printed.getvalue()


def _succeeds(ranks: int, module: str, *arguments: str) -> str:
    """What the first rank prints of a benchmark that succeeds on all, and the others nothing."""
    (first, printed), *others = run_ranks(_run, ranks, module, *arguments)
    assert first in (0, None)
    assert all(other == (first, "") for other in others)
    return printed


def test_the_picture_beside_peers_is_that_of_the_table(tmp_path: Path) -> None:
    names, figures = picture.peers((picture.FOLDER / "results.md").read_text())
    assert (names[0], names[-1]) == ("lightning-megatron", "floor")
    picture.draw(names, figures, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_the_loaders_of_all_objectives_are_measured() -> None:
    options = ("--seconds", "0.02", "--tokens", "100000", "--document-tokens", "500", "--num-workers", "0")
    lines = [line for line in _succeeds(1, "loader", *options).splitlines() if "M tokens/s" in line]
    assert [line.split()[0] for line in lines] == ["gpt", "bert", "t5"]
    assert all(float(line.split("M tokens/s")[0].split()[-1]) > 0 for line in lines)


@pytest.mark.parametrize("name", ["smoke-tp2", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in _OTHER_SMOKE)])
def test_a_case_runs_and_reports_its_steps(name: str, tmp_path: Path) -> None:
    case, output = case_named(name), tmp_path / "out.jsonl"
    steps = ("--warmup-steps", "4", "--steps", "6", "--bare-steps", "4")
    _succeeds(case.num_devices, "train_step", "--case", name, "--output", str(output), *steps)
    (measured,) = read(output)
    assert (len(measured.steps), len(measured.bare_steps)) == (6, 4)
    assert 0 < min(measured.steps) <= measured.step_seconds <= max(measured.steps)
    assert measured.tokens_per_step == 2 * 2 * (32 + case.decoder_seq_length)
    # A new model knows nothing: every one of the 300 tokens is as likely as another; a BERT's two orders likewise. A T5
    # starts with large weights, as in transformers. A loss of balance of 2 (experts of a token) is weighed by 0.001.
    ignorant = math.log(300) + (math.log(2) if name == "smoke-bert" else 0)
    assert measured.loss_first == pytest.approx(ignorant, abs=1.5 if name == "smoke-t5" else 0.1)
    # A CPU has no known peak, and no memory that CUDA counts.
    assert measured.mfu_causal is measured.peak_allocated_gib is None
    assert f"| {name} ({case}) | lightning-megatron |" in tables([measured])


@pytest.mark.exhaustive
def test_saves_and_a_resume_are_measured(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    common = ("--case", "smoke-tp2", "--saves", "2", "--folder", str(tmp_path), "--output", str(output))
    _succeeds(2, "checkpoint", *common, "--part", "sync")
    _succeeds(2, "checkpoint", *common, "--part", "async", "--keep", "--no-load")
    _succeeds(2, "checkpoint", *common, "--part", "resume", "--resume-layout", "pp=2")
    saved, beside, resumed = read(output)
    assert [len(each.saves) for each in (saved, beside, resumed)] == [2, 2, 0]
    assert all(0 < save["stall"] <= save["complete"] < 60 for save in (*saved.saves, *beside.saves))
    assert [save["steps_during"] for save in saved.saves] == [[], []]
    # Weights, their fp32 copies and two moments of 37,120 parameters, and what the format adds.
    assert 1 < saved.gigabytes * 1e9 / (37_120 * 4 * 4) < 2
    assert (saved.load_layout, beside.load_seconds, resumed.load_layout) == ("tp=2 dp=1", None, "pp=2 dp=1")
    assert min(saved.load_seconds, resumed.load_seconds) > 0
    assert tables([saved, beside, resumed]).count("smoke-tp2 (2 cpu") == 3
    assert not list(tmp_path.rglob("*.ckpt"))


def test_generation_is_measured_beside_its_peer(tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    for case, ranks, *variants in (
        ("smoke", 1, "eager", "static"),
        ("smoke", 1, "peer-static"),
        ("smoke-tp2", 2, "eager"),
    ):
        chosen = [word for variant in variants for word in ("--variant", str(variant))]
        _succeeds(int(ranks), "generation", "--case", str(case), *chosen, "--calls", "2", "--output", output)
    measured = read(tmp_path / "out.jsonl")
    assert [m.case for m in measured] == ["smoke"] * 3 + ["smoke-tp2"]
    assert tables(measured).count("x |") >= 1  # as fast as the peer, so many times
    assert all(len(m.call_seconds) == len(m.first_token_seconds) == 2 for m in measured)
    assert all(min(*m.call_seconds, *m.first_token_seconds) > 0 for m in measured)


@pytest.mark.exhaustive
def test_losses_of_bf16_and_fp8_on_text_are_kept_and_drawn(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    for number in range(40):
        (text / f"{number}.md").write_text("".join(f"{number} + {other} = {number + other}\n" for other in range(60)))
    (text / "again.txt").write_text((text / "1.md").read_text())
    few = ("--steps", "60", "--vocab-size", "300", "--lr", "0.01", "--output", str(tmp_path / "a/losses.json"))
    _succeeds(1, "convergence", "--case", "smoke-fp8", "--text", str(text), *few)
    found = json.loads((tmp_path / "a/losses.json").read_text())
    assert found["files"] == 40  # one of them is there twice
    curves = found["losses"]
    assert list(curves) == list(convergence.WAYS)
    assert all(len(losses) == 60 and losses[-1] < losses[0] - 1 for losses in curves.values())
    assert curves["bf16"] != curves["fp8"]
    assert convergence.table(curves).count("\n") == 1 + len(curves)
    assert (tmp_path / "a/losses.png").read_bytes().startswith(b"\x89PNG")
