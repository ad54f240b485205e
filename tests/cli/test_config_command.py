"""``config`` writes a configuration from answers, an Accelerate config or a template, and refuses invalid ones."""

import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli import main
from tests.cli.command import run_cli
from tests.ranks import ROOT

OLD: dict[str, Any] = yaml.safe_load("""
{compute_environment: LOCAL_MACHINE, deepspeed_config: {}, distributed_type: MEGATRON_LM, downcast_bf16: "no",
 fsdp_config: {}, gpu_ids: null, machine_rank: 0, main_process_ip: null, main_process_port: null,
 main_training_function: main, mixed_precision: bf16, num_machines: 1, num_processes: 8, rdzv_backend: static,
 same_network: true, use_cpu: false,
 megatron_lm_config: {megatron_lm_gradient_clipping: 1.0, megatron_lm_num_micro_batches: 2, megatron_lm_pp_degree: 2,
  megatron_lm_recompute_activations: true, megatron_lm_sequence_parallelism: true, megatron_lm_tp_degree: 2,
  megatron_lm_use_distributed_optimizer: true}}
""")
FLAT = {**OLD, "megatron_lm_config": None, **OLD["megatron_lm_config"]}
STRINGS = {
    key: str(value).lower() if isinstance(value, (bool, int, float)) else value
    for key, value in FLAT.items()
}
NEW = {key: value for key, value in OLD.items() if value not in ({}, None)} | yaml.safe_load("""
{debug: false, enable_cpu_affinity: false, tpu_use_cluster: false, mixed_precision: fp16, num_machines: 2,
 main_process_ip: 10.0.0.1, main_process_port: 29501, machine_rank: 1, use_cpu: true,
 megatron_lm_config: {megatron_lm_tp_degree: 1, megatron_lm_recompute_activations: true,
  megatron_lm_recompute_granularity: full, megatron_lm_recompute_method: block, megatron_lm_recompute_num_layers: 3,
  megatron_lm_context_parallel_size: 1, megatron_lm_expert_model_parallel_size: 1, megatron_lm_no_load_optim: true,
  megatron_lm_use_rotary_position_embeddings: "true", megatron_lm_optimizer_cpu_offload: true,
  megatron_lm_gradient_clipping: 0}}
""")


def with_keys(**changed: Any) -> dict[str, Any]:
    """The flat Accelerate config with changed values; None removes a key."""
    return {key: value for key, value in {**FLAT, **changed}.items() if value is not None}


def convert(
    folder: Path, fields: dict[str, Any], capsys: Any, suffix: str = ".yaml"
) -> tuple[int, Path, Any]:
    """Convert an Accelerate config; returns exit code, path of the result, and output."""
    source = folder / f"accelerate{suffix}"
    output = folder / "config.yaml"
    source.write_text(
        json.dumps(fields, indent="\t") if suffix == ".json" else yaml.safe_dump(fields)
    )
    code = main(["config", "--from-accelerate", str(source), "--output", str(output)])
    return code, output, capsys.readouterr()


@pytest.mark.parametrize(
    ("fields", "suffix"), [(STRINGS, ".yaml"), (OLD, ".json")], ids=["strings, indentation lost", "json"]
)  # fmt: skip
def test_accelerate_config_is_read_in_every_form(
    fields: dict[str, Any], suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, printed = convert(tmp_path, fields, capsys, suffix)
    assert (code, printed.err) == (0, "")
    trainer = yaml.safe_load(output.read_text())["trainer"]
    assert trainer.pop("strategy")["init_args"] == {
        **{"tp": 2, "pp": 2, "num_microbatches": 2, "sequence_parallel": True},
        **{"distributed_optimizer": True, "recompute": "selective"},
    }
    expected = {
        "accelerator": "gpu",
        "devices": 8,
        "num_nodes": 1,
        "precision": "bf16-mixed",
        "gradient_clip_val": 1.0,
    }
    assert {**trainer, **expected} == trainer
    assert "ignored: deepspeed_config, fsdp_config: for another engine\n" in printed.out
    assert f"\n  lightning-megatron fit --config {output}\n" in printed.out
    assert (
        f"\n  torchrun --nproc-per-node=8 -m lightning_megatron fit --config {output}\n"
        in printed.out
    )


def test_accelerate_config_with_new_keys_and_two_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, printed = convert(tmp_path, NEW, capsys)
    assert (code, printed.err) == (0, "")
    fields = yaml.safe_load(output.read_text())
    strategy = fields["trainer"].pop("strategy")["init_args"]
    expected = {
        "recompute": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "cp": 1,
    }
    defaults = {"distributed_optimizer": False, "sequence_parallel": False}  # of Accelerate
    others = {"load_weights_only": True, "offload_optimizer": True}
    assert strategy | expected | defaults | others == strategy
    expected = {
        "accelerator": "cpu",
        "devices": 4,
        "num_nodes": 2,
        "precision": "16-mixed",
        "gradient_clip_val": 0.0,
    }
    assert fields["trainer"] | expected == fields["trainer"]
    assert fields["model"]["init_args"]["position_embedding_type"] == "rotary"
    assert (
        "  torchrun --nproc-per-node=4 --nnodes=2 --node-rank=1 --rdzv-backend=static --rdzv-endpoint=10.0.0.1:29501 -m"
        f" lightning_megatron fit --config {output}\n"
    ) in printed.out
    code, again, error = run_cli(
        tmp_path,
        "fit",
        "--config",
        str(output),
        "--print_config",
    )
    assert code == 0, error
    assert yaml.safe_load(again)["trainer"]["strategy"]["init_args"]["recompute"] == "full"


SAMPLES = {
    "train_samples": 1000,
    "lr_warmup_samples": 100,
    "micro_batch_size": 2,
    "lr_decay_style": "cosine",
}


def test_sample_counts_become_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 processes are 2 replicas with 2 microbatches of 2 rows: 8 rows a step; or 4 for the first 100 samples."""
    keys = {f"megatron_lm_{key}": value for key, value in SAMPLES.items()}
    _, output, printed = convert(tmp_path, with_keys(**keys), capsys)
    message = "1,000 samples are 125 steps of 8 rows (micro_batch_size=2 x 2 x dp=2)\n"
    assert f"\nmegatron_lm_train_samples: {message}" in printed.out
    assert (
        "100 samples are 12 steps of 8 rows (micro_batch_size=2 x 2 x dp=2), and 4 are left over\n"
        in printed.out
    )
    model, trainer = (yaml.safe_load(output.read_text())[name] for name in ("model", "trainer"))
    assert trainer["max_steps"] == 125
    schedule = {"style": "cosine", "warmup_fraction": None, "warmup_steps": 12}
    assert model["init_args"]["lr_schedule"] == schedule
    output.unlink()
    ramp = with_keys(**keys, megatron_lm_rampup_batch_size="4 4 100", gpu_ids="0,1")
    _, output, printed = convert(tmp_path, ramp, capsys)
    assert "  CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=8 -m lightning" in printed.out
    assert (
        "samples are 137 steps of 4 rows, growing to 8 rows (micro_batch_size=2 x 2 x dp=2), and 4"
        in printed.out
    )
    assert yaml.safe_load(output.read_text())["data"]["init_args"]["rampup_batch_size"] == [
        4,
        4,
        100,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"megatron_lm_tp_degre": 2},
            "megatron_lm_tp_degre is not among the keys .*; did you mean megatron_lm_tp_deg",
        ),
        ({"megatron_lm_tp_degree": 3}, "world size 8 .* is not a multiple of tp=3 x pp=2"),
        ({"megatron_lm_sequence_parallelism": "perhaps"}, "expected yes or no, got 'perhaps'"),
        (
            {"megatron_lm_expert_tensor_parallel_size": 2},
            "expected 1, got 2; experts are not split",
        ),
        (
            {"mixed_precision": "fp8"},
            "expected bf16 or .* no, got 'fp8'; .*for fp8 write bf16, and set",
        ),
        (
            {"megatron_lm_train_samples": 9, "num_processes": None},
            "train_samples: .* expected num_processes, got none",
        ),
        (
            {"megatron_lm_train_samples": 9, "megatron_lm_rampup_batch_size": [3, 4, 5]},
            r"\[3, 4, 5\]: expected a",
        ),
        (
            {"num_machines": 3},
            "num_machines=3 does not divide num_processes=8; choose num_machines from 1, 2, 4, 8",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_accelerate_config_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, printed = convert(tmp_path, with_keys(**changes), capsys)
    assert (code, printed.err.count("\n")) == (2, 1)
    assert re.search(message, printed.err), printed.err
    assert not output.exists()


def answer(
    monkeypatch: pytest.MonkeyPatch,
    *answers: str,
    terminal: bool = False,
) -> None:
    """Give ``answers`` to stdin, one per line."""
    stdin = io.StringIO("".join(f"{each}\n" for each in answers))
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", stdin)


# model, accelerator, machines, tp, sequence parallel, pp, microbatches, recompute, optimizer, clip, devices, precision
LAYOUT = (
    "gpt2",
    "cpu",
    "",
    "2",
    "",
    "2",
    "",
    "no",
    "n",
    "0.5",
    "8",
    "bf16",
)


def test_answers_become_yaml_and_terminals_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = []
    for terminal, wrong in ((False, ()), (True, ("many", "5"))):
        answer(
            monkeypatch,
            *LAYOUT[:3],
            *wrong,
            *LAYOUT[3:],
            "data/x",
            "512",
            "",
            "",
            "77",
            terminal=terminal,
        )
        assert main(["config", "--overwrite"]) == 0
        configs.append(Path("config.yaml").read_text())
        out = capsys.readouterr().out
        assert terminal or "\ntp: tensor parallel size: " in out
    assert "  trainer.strategy.tp: expected an integer of at least 1, got 'many'\n" in out
    assert "  tp=5 does not divide num_attention_heads=12" in out
    assert configs[0] == configs[1]
    trainer, model, data = (
        yaml.safe_load(configs[0])[name] for name in ("trainer", "model", "data")
    )
    assert trainer.pop("strategy")["init_args"] == {
        **{"tp": 2, "pp": 2, "num_microbatches": 2, "sequence_parallel": True},
        **{"distributed_optimizer": False, "recompute": None},
    }
    expected = {
        "accelerator": "cpu",
        "devices": 8,
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.5,
    }
    assert trainer | expected | {"max_steps": 77} == trainer
    assert model["init_args"]["model"] == {"model_type": "gpt2"}
    assert (
        data["init_args"] | {"data_path": "data/x", "seq_length": 512, "micro_batch_size": 4}
        == data["init_args"]
    )


def test_wrong_answer_from_a_pipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for answers, message in (
        (
            ("gpt2", "cpu", "", "5"),
            "tp=5 does not divide num_attention_heads=12; choose tp from 1, 2, 3, 4, 6, 12",
        ),
        (
            (*LAYOUT[:10], "6"),
            "world size 6 (devices x num_nodes) is not a multiple of tp=2 x pp=2 = 4; use 8",
        ),
        (
            ("gpt2", "cpu"),
            "trainer.num_nodes: expected an answer, got the end of the input (default: 1)",
        ),
    ):
        answer(monkeypatch, *answers)
        assert main(["config"]) == 2
        error = capsys.readouterr().err
        assert (message in error, error.count("\n")) == (True, 1), error
    assert list(tmp_path.iterdir()) == []


def test_local_model_directory_is_fine_tuned_on_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    (folder / "model.safetensors").touch()
    answer(
        monkeypatch, "model", "", "cpu", "", "", "", "", "", "", "", "", "answers.jsonl", *[""] * 5
    )
    assert main(["config"]) == 0
    fields = yaml.safe_load(Path("config.yaml").read_text())
    model = fields["model"]["init_args"]
    data = fields["data"]
    assert model | {"model": "model", "pretrained": True, "lr": 2e-5} == model
    assert (data["class_path"], data["init_args"]["tokenizer"]) == (
        "InstructionDataModule",
        "model",
    )


def test_template_is_written_and_files_are_replaced_only_with_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("config.yaml")
    file.write_text("mine")
    names = ", ".join(sorted(each.stem for each in (ROOT / "configs").glob("*.yaml")))
    exists = "--output config.yaml exists; give another name, or --overwrite"
    unknown = f"--template gpt5 is unknown; choose from {names}"
    for arguments, message in (
        ("", exists),
        ("--template gpt2_small", exists),
        ("--template gpt5", unknown),
    ):
        assert main(["config", *arguments.split()]) == 2
        assert capsys.readouterr().err == f"error: {message}\n"
    assert file.read_text() == "mine"
    assert main(["config", "--template", "llama_1b", "--overwrite"]) == 0
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(
        (ROOT / "configs/llama_1b.yaml").read_text()
    )
    assert "fit --config config.yaml " in file.read_text()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]["wheel"]
    assert wheel["force-include"] == {"configs": "lightning_megatron/configs"}
