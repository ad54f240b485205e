"""The benchmarks run, and their figures follow from what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, convergence, generation, loader, picture, preprocess, preprocess_run
from benchmarks.cases import case_named
from benchmarks.measurement import read, tables
from benchmarks.train_step import main
from tests.ranks import run_ranks

_OTHER_SMOKE = ("smoke", "smoke-bert", "smoke-t5", "smoke-lora", "smoke-experts")
_STEPS = ("--warmup-steps", "4", "--steps", "6", "--bare-steps", "4")


def _measure(case: str, output: str) -> dict[str, Any]:
    """On each rank: run ``case`` as the command line would, and say what the Trainer's loop left behind."""
    code = main(["--case", case, "--output", output, *_STEPS])
    return {"code": code}


def test_the_picture_beside_peers_is_that_of_the_table(tmp_path: Path) -> None:
    names, figures = picture.peers((picture.FOLDER / "results.md").read_text())
    assert (names[0], names[-1]) == ("lightning-megatron", "floor")
    assert figures["Llama-3-8B, tp2 dp2 mb2 x 4"] == [10290.0, 10076.0, None, 12952.0]
    picture.draw(names, figures, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_the_loaders_of_all_objectives_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    loader.main(["--seconds", "0.02", "--tokens", "100000", "--document-tokens", "500", "--num-workers", "0"])
    lines = [line for line in capfd.readouterr().out.splitlines() if "M tokens/s" in line]
    assert [line.split()[0] for line in lines] == ["gpt", "bert", "t5"]
    assert all(float(line.split("M tokens/s")[0].split()[-1]) > 0 for line in lines)


@pytest.mark.parametrize(
    "name",
    [
        "smoke-tp2",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in _OTHER_SMOKE),
    ],
)
def test_a_case_runs_and_reports_its_steps(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    results = run_ranks(_measure, case.num_devices, name, str(tmp_path / "out.jsonl"))
    assert [r["code"] for r in results] == [0] * case.num_devices
    (measured,) = read(tmp_path / "out.jsonl")
    assert (len(measured.steps), len(measured.bare_steps)) == (6, 4)
    assert 0 < min(measured.steps) <= measured.step_seconds <= max(measured.steps)
    assert measured.tokens_per_step == 2 * 2 * (32 + case.decoder_seq_length)
    # A new model knows nothing: every one of the 300 tokens is as likely as another; a BERT's two orders likewise. A T5
    # starts with large weights, as in transformers. A loss of balance of 2 (experts of a token) is weighed by 0.001.
    ignorant = math.log(300) + (math.log(2) if name == "smoke-bert" else 0)
    assert measured.loss_first == pytest.approx(ignorant, abs=1.5 if name == "smoke-t5" else 0.1)
    # A CPU has no known peak, and no memory that CUDA counts.
    assert measured.mfu_causal is None
    assert measured.peak_allocated_gib is None
    assert f"| {name} ({case}) | lightning-megatron |" in tables([measured])


def _measure_checkpoints(folder: str, output: str) -> int:
    """On each rank: what the command line does for a part."""
    common = ("--case", "smoke-tp2", "--saves", "2", "--folder", folder, "--output", output)
    code = checkpoint.main([*common, "--part", "sync"])
    code += checkpoint.main([*common, "--part", "async", "--keep", "--no-load"])
    return code + checkpoint.main([*common, "--part", "resume", "--resume-layout", "pp=2"])


@pytest.mark.exhaustive
def test_saves_and_a_resume_are_measured(tmp_path: Path) -> None:
    assert run_ranks(_measure_checkpoints, 2, str(tmp_path), str(tmp_path / "out.jsonl")) == [0, 0]

    saved, beside, resumed = read(tmp_path / "out.jsonl")
    assert [len(each.saves) for each in (saved, beside, resumed)] == [2, 2, 0]
    assert all(0 < save["stall"] <= save["complete"] < 60 for save in (*saved.saves, *beside.saves))
    assert [save["steps_during"] for save in saved.saves] == [[], []]
    # Weights, their fp32 copies and two moments of 37,120 parameters, and what the format adds.
    assert 1 < saved.gigabytes * 1e9 / (37_120 * 4 * 4) < 2
    assert beside.gigabytes == pytest.approx(saved.gigabytes, rel=0.01)
    assert (saved.load_layout, beside.load_seconds, resumed.load_layout) == ("tp=2 dp=1", None, "pp=2 dp=1")
    assert min(saved.load_seconds, resumed.load_seconds) > 0
    assert tables([saved, beside, resumed]).count("smoke-tp2 (2 cpu") == 3
    assert not list(tmp_path.rglob("*.ckpt"))


def _measure_generation(arguments: list[str], output: str) -> tuple[int, str]:
    """On each rank: the exit code and what was printed."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = generation.main([*arguments, "--calls", "2", "--output", output])
    return code, printed.getvalue()


def test_generation_is_measured_beside_its_peer(tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    ours = ["--case", "smoke", "--variant", "eager", "--variant", "static"]
    ((code, printed),) = run_ranks(_measure_generation, 1, ours, output)
    assert code == 0, printed
    peers = ["--case", "smoke", "--variant", "peer", "--variant", "peer-static"]
    assert run_ranks(_measure_generation, 1, peers, output)[0][0] == 0
    (first, _), (second, nothing) = run_ranks(
        _measure_generation, 2, ["--case", "smoke-tp2", "--variant", "eager"], output
    )
    assert (first, second, nothing) == (0, 0, "")

    measured = read(tmp_path / "out.jsonl")
    assert [(m.case, m.implementation) for m in measured] == [
        ("smoke", "lightning-megatron, growing cache"),
        ("smoke", "lightning-megatron, static cache"),
        ("smoke", "transformers, dynamic cache"),
        ("smoke", "transformers, static cache, compiled"),
        ("smoke-tp2", "lightning-megatron, growing cache"),
    ]
    assert tables(measured).count("x |") >= 2  # as fast as the peer, so many times
    assert all(len(m.call_seconds) == len(m.first_token_seconds) == 2 for m in measured)
    assert all(min(*m.call_seconds, *m.first_token_seconds) > 0 for m in measured)


def test_each_case_of_preprocess_runs_on_the_same_text_as_the_peer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One two three. Four five.\n" * 400)
    texts = list(preprocess._texts([str(tmp_path / "a.txt")], 15_000))
    assert "".join(texts) == "One two three. Four five.\n" * 400 + ("One two three. Four five.\n" * 400)[:8000]
    preprocess._write_inputs(tmp_path, texts)
    preprocess._train(tmp_path)
    assert preprocess_run._peer(tmp_path)[0] > 0
    tokens = set()
    for case in preprocess.CASES:
        preprocess_run._preprocess(tmp_path, case.suffix, "1", *case.arguments)
        if not case.arguments:
            tokens.add((tmp_path / "out_text_document.bin").read_bytes())
    assert len(tokens) == 1
    assert (tmp_path / "out_text_sentence.bin").exists()


def _converge(folder: str) -> int:
    text = Path(folder) / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.md").write_text("".join(f"{number} + {other} = {number + other}\n" for other in range(60)))
    (text / "again.txt").write_text((text / "1.md").read_text())
    few = ("--steps", "60", "--vocab-size", "300", "--lr", "0.01")
    return convergence.main(["--case", "smoke-fp8", "--text", str(text), *few, "--output", f"{folder}/a/losses.json"])


@pytest.mark.exhaustive
def test_losses_of_bf16_and_fp8_on_text_are_kept_and_drawn(tmp_path: Path) -> None:
    assert run_ranks(_converge, 1, str(tmp_path)) == [0]
    found = json.loads((tmp_path / "a" / "losses.json").read_text())
    assert found["files"] == 40  # one of them is there twice
    curves = found["losses"]
    assert list(curves) == list(convergence.WAYS)
    assert all(len(losses) == 60 and losses[-1] < losses[0] - 1 for losses in curves.values())
    assert curves["bf16"] != curves["fp8"]
    assert curves["bf16"][0] != curves["bf16, seed 2"][0]
    assert convergence.table(curves).count("\n") == 1 + len(curves)
    assert (tmp_path / "a" / "losses.png").read_bytes().startswith(b"\x89PNG")
