"""The benchmarks run, and their figures follow from what was measured."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint, generation, loader
from benchmarks.cases import CASES, case_named
from benchmarks.generation_measurement import GenerationMeasurement, read_measurements
from benchmarks.generation_measurement import markdown_table as generation_table
from benchmarks.measurement import HostWaits, Measurement, StepTimes, markdown_table
from benchmarks.train_step import main
from tests.ranks import run_ranks

_STEPS = ("--warmup-steps", "4", "--steps", "6", "--bare-steps", "4")


def _measure(case: str, output: str) -> dict[str, Any]:
    """On each rank: run ``case`` as the command line would, and say what the Trainer's loop left behind."""
    code = main(["--case", case, "--output", output, *_STEPS])
    return {"code": code}


def test_the_loaders_of_all_objectives_are_measured(capfd: pytest.CaptureFixture[str]) -> None:
    loader.main(["--seconds", "0.02", "--tokens", "100000", "--document-tokens", "500", "--num-workers", "0"])
    lines = [line for line in capfd.readouterr().out.splitlines() if "M tokens/s" in line]
    assert [line.split()[0] for line in lines] == ["gpt", "bert", "t5"]
    assert all(float(line.split("M tokens/s")[0].split()[-1]) > 0 for line in lines)


@pytest.mark.parametrize(
    "name", ["smoke-tp2", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("smoke", "smoke-bert", "smoke-t5"))]
)
def test_a_case_runs_and_reports_its_steps(name: str, tmp_path: Path) -> None:
    case = case_named(name)
    results = run_ranks(_measure, case.num_devices, name, str(tmp_path / "out.jsonl"))
    assert [r["code"] for r in results] == [0] * case.num_devices
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    measured = Measurement.from_json(line)
    assert measured.steps.count == 6
    assert measured.bare_steps is not None
    assert measured.bare_steps.count == 4
    assert 0 < measured.steps.p10 <= measured.steps.median <= measured.steps.p90
    assert measured.tokens_per_step == 2 * 2 * (32 + case.decoder_seq_length)
    # A new model knows nothing: every one of the 300 tokens is as likely as another; a BERT's two orders likewise. A T5
    # starts with large weights, as in transformers.
    ignorant = math.log(300) + (math.log(2) if name == "smoke-bert" else 0)
    assert measured.loss_first == pytest.approx(ignorant, abs=1.5 if name == "smoke-t5" else 0.1)
    # A CPU has no known peak, and no memory that CUDA counts.
    assert measured.mfu_causal is None
    assert measured.peak_allocated_gib is None
    assert Measurement.from_json(measured.to_json()) == measured


def _measure_checkpoints(folder: str, output: str) -> int:
    """On each rank: what the command line does for a part."""
    common = ("--case", "smoke-tp2", "--saves", "2", "--folder", folder, "--output", output)
    code = checkpoint.main([*common, "--part", "sync"])
    code += checkpoint.main([*common, "--part", "async", "--keep", "--no-load"])
    return code + checkpoint.main([*common, "--part", "resume", "--resume-layout", "pp=2"])


def test_saves_and_a_resume_are_measured(tmp_path: Path) -> None:
    assert run_ranks(_measure_checkpoints, 2, str(tmp_path), str(tmp_path / "out.jsonl")) == [0, 0]

    saved, beside, resumed = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert len(saved["saves"]) == 2
    assert all(0 < save["stall"] <= save["complete"] and save["steps_during"] == [] for save in saved["saves"])
    # Weights, their fp32 copies and two moments of 37,120 parameters, and what the format adds.
    assert 1 < saved["gigabytes"] * 1e9 / (37_120 * 4 * 4) < 2
    assert saved["load_layout"] == "tp=2 dp=1"
    assert saved["load_seconds"] > 0
    assert len(beside["saves"]) == 2
    assert all(save["stall"] <= save["complete"] for save in beside["saves"])
    assert beside["gigabytes"] == pytest.approx(saved["gigabytes"], rel=0.01)
    assert beside["load_seconds"] is None
    assert resumed["load_layout"] == "pp=2 dp=1"
    assert resumed["load_seconds"] > 0
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

    measured = read_measurements(tmp_path / "out.jsonl")
    assert [(m.case, m.implementation) for m in measured] == [
        ("smoke", "lightning-megatron, growing cache"),
        ("smoke", "lightning-megatron, static cache"),
        ("smoke", "transformers, dynamic cache"),
        ("smoke", "transformers, static cache, compiled"),
        ("smoke-tp2", "lightning-megatron, growing cache"),
    ]
    assert all(len(m.call_seconds) == len(m.first_token_seconds) == 2 for m in measured)
    assert all(min(*m.call_seconds, *m.first_token_seconds) > 0 for m in measured)


def test_a_variant_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    arguments = ["--case", "smoke", "--variant", "eager", "--variant", "static"]
    ((code, printed),) = run_ranks(_measure_with_a_failure, 1, arguments, str(tmp_path / "out.jsonl"))
    assert code == 1
    assert "FAILED: smoke, lightning-megatron, growing cache\n" in printed
    assert "RuntimeError: out of memory" in printed
    (measured,) = read_measurements(tmp_path / "out.jsonl")
    assert measured.implementation == "lightning-megatron, static cache"
    assert measured.warnings == ("no graphs",)
    assert "| lightning-megatron, static cache; no graphs |" in printed


def _measure_with_a_failure(arguments: list[str], output: str) -> tuple[int, str]:
    from lightning_megatron import MegatronModule

    generate = MegatronModule.generate

    def only_static(self: Any, *args: Any, **options: Any) -> Any:
        if not options.get("static_cache"):
            raise RuntimeError("out of memory")
        warnings.warn_explicit("no graphs", UserWarning, "/src/lightning_megatron/generate/pipeline.py", 1)
        return generate(self, *args, **options)

    MegatronModule.generate = only_static  # type: ignore[method-assign]
    return _measure_generation(arguments, output)


def _generated(implementation: str, seconds: float) -> GenerationMeasurement:
    return GenerationMeasurement(
        case="llama-8b-b32",
        implementation=implementation,
        description="as listed",
        device="NVIDIA H200",
        num_devices=1,
        batch_size=32,
        prompt_length=512,
        new_tokens=256,
        warmup_seconds=60.0,
        call_seconds=(seconds + 1.0, seconds, seconds - 0.5),
        first_token_seconds=(0.5, 0.4, 0.45),
        peak_allocated_gib=20.0,
        peak_reserved_gib=21.0,
        warnings=(),
        versions={},
    )


def test_tokens_per_second_are_those_of_all_rows_and_compared_with_the_static_peer() -> None:
    ours, peer = _generated("lightning-megatron", 2.0), _generated("transformers, static cache, compiled", 4.0)
    assert ours.tokens_per_s == pytest.approx(32 * 256 / 2.0)
    assert ours.token_seconds == pytest.approx((2.0 - 0.45) / 255)
    assert GenerationMeasurement.from_json(ours.to_json()) == ours
    alone, (_, _, row, of_peer) = generation_table([ours]), generation_table([ours, peer]).splitlines()
    assert "| 4,096.0 | - |" in alone
    assert "| 4,096.0 | 2.00x | 2.000 (3.000, 2.000, 1.500) | 450.0 | 6.08 | 20.0 / 21.0 | 60.0 |" in row
    assert "| 1.00x |" in of_peer


def _measurement(**changed: Any) -> Measurement:
    fields: dict[str, Any] = {
        "case": "gpt2-large-tp2-pp2",
        "implementation": "lightning-megatron",
        "description": str(case_named("gpt2-large-tp2-pp2")),
        "device": "NVIDIA H200",
        "num_devices": 4,
        "tokens_per_step": 49152,
        "steps": StepTimes(median=0.3, p10=0.29, p90=0.31, count=20),
        "bare_steps": StepTimes(median=0.2970, p10=0.29, p90=0.31, count=20),
        "tflops_causal": 400.0,
        "mfu_causal": 0.40,
        "mfu_full": 0.42,
        "peak_allocated_gib": 50.0,
        "peak_reserved_gib": 60.0,
        "loss_first": 10.8,
        "loss_last": 10.7,
        "host_waits": HostWaits(ours=1.0, trainer=2.0, places={"lightning/x.py:1 f": 2.0}),
        "versions": {},
    }
    return Measurement(**{**fields, **changed})


def test_speeds_and_overhead_follow_from_the_median() -> None:
    measured = _measurement()
    assert measured.tokens_per_s == pytest.approx(163_840)
    assert measured.tokens_per_s_per_gpu == pytest.approx(40_960)
    assert measured.trainer_overhead == pytest.approx(0.0101, abs=1e-4)
    assert _measurement(bare_steps=None).trainer_overhead is None


def test_the_table_judges_a_case_only_as_it_is_listed_and_on_its_gpu() -> None:
    assert "<= 0.32 s/step met |" in markdown_table([_measurement()])
    slow = StepTimes(median=0.33, p10=0.3, p90=0.4, count=20)
    assert "<= 0.32 s/step MISSED |" in markdown_table([_measurement(steps=slow)])
    assert "s/step met" not in markdown_table([_measurement(description="another batch")])
    assert "s/step met" not in markdown_table([_measurement(device="NVIDIA H100 80GB HBM3")])


def test_every_case_fits_its_devices() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        ranks_of_a_copy = case.layout.get("tp", 1) * case.layout.get("pp", 1)
        assert case.data_parallel_size * ranks_of_a_copy == case.num_devices
    assert case_named("gpt2-large-tp2-pp2").tokens == 2 * 24 * 1024
    assert case_named("llama-8b-tp2-dp2").tokens == 2 * 4 * 2 * 4096


def test_the_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"\s+", line)[0] for line in lines] == [case.name for case in CASES]
