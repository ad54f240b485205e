"""Preferences in a Trainer: reference log-probabilities of any layout, their cache, resumed runs, and refusals."""

import json
import math
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.marks import exhaustive
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    Case,
    Layout,
    refusal,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_log, recorded_warnings
from tests.tokenizers import make_tokenizer

STEPS = 3
BETA = 0.5
RECORDS = [
    {"prompt": f"question {number}: is it?", "chosen": " yes" * (number + 1), "rejected": " no"}
    for number in range(7)
]
_CP = Layout(cp=2, cp_comm_type="all_gather", tp=2, sequence_parallel=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of preferences on the model in ``folder``."""

    folder: str
    layout: Layout = field(default_factory=Layout)
    model: dict[str, Any] = field(default_factory=dict)
    """Arguments of the module."""
    data: dict[str, Any] = field(default_factory=dict)
    """Arguments of the data module."""
    load_from: str | None = None
    steps: int = STEPS


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A directory with a model, a tokenizer, and pairs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.families.parity import tiny_model
    from tests.models import LLAMA

    make_tokenizer(tmp_path / "model")
    config = LlamaConfig(vocab_size=311, **LLAMA)
    tiny_model(LlamaForCausalLM, config).save_pretrained(tmp_path / "model")
    lines = [json.dumps(record) for record in RECORDS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return str(tmp_path)


def _fit(
    run: Run,
    save_to: str | None = None,
    ckpt_path: str | None = None,
) -> dict[str, Any]:
    """Train; logged values, the batches, the lines that say where references are from, and the last logits."""
    from lightning.pytorch import seed_everything
    from lightning_utilities.core import rank_zero

    from lightning_megatron import DPOTrainStep, MegatronModule, PreferenceDataModule
    from tests.checkpoint.runs import callback

    batches: list[dict[str, Tensor]] = []
    logged: list[dict[str, float]] = []

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        batches.append({name: tensor.clone() for name, tensor in batch.items()})
        logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    seed_everything(3, verbose=False)
    options = {
        "model": f"{run.folder}/model",
        "pretrained": True,
        "train_step": DPOTrainStep(beta=BETA),
        "lr": 1e-2,
        **run.model,
    }
    module = MegatronModule(**options)
    trainer = trainer_of(
        Case(layout=run.layout, steps=run.steps),
        callbacks=[callback(on_train_batch_end=record)],
        default_root_dir=run.folder,
    )
    if run.load_from is not None:
        trainer.strategy.checkpointing._load_from = _load_from(run.load_from)
    settings = {"data_path": f"{run.folder}/pairs.jsonl", "tokenizer": f"{run.folder}/model"}
    data = PreferenceDataModule(
        **{**settings, "split": "5,2,0", "seq_length": 48, "micro_batch_size": 1, **run.data}
    )
    with recorded_log(rank_zero.log.name) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    lines = [line for line in log.getvalue().splitlines() if "eference log-prob" in line]
    logits = module.logits(torch.arange(12)[None])
    return {"batches": batches, "logged": logged, "lines": lines, "logits": logits}


def _load_from(path: str) -> Any:
    from lightning_megatron import LoadFrom

    return LoadFrom(path=path)


def _expected(batch: dict[str, Tensor], directory: str) -> dict[str, Tensor]:
    """Reference log-probabilities of a batch by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    sums = {}
    for name in ("chosen", "rejected"):
        with torch.no_grad():
            logits = model(
                input_ids=batch[f"{name}_input_ids"],
                attention_mask=batch[f"{name}_attention_mask"],
            ).logits
        labels = batch[f"{name}_labels"][:, 1:]
        logps = torch.log_softmax(logits[:, :-1], dim=-1)
        of_labels = logps.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        sums[f"reference_{name}_logps"] = (of_labels * (labels != -100)).sum(dim=-1)
    return sums


@pytest.mark.parametrize(
    "layout",
    [FOUR_RANKS, *(exhaustive(each) for each in (Layout(), PP2_DP2, INTERLEAVED, _CP))],
    ids=str,
)
def test_references_are_those_of_transformers_and_are_cached(layout: Layout, folder: str) -> None:
    run = Run(folder=folder, layout=layout)
    ranks = run_ranks(_fit, layout.world_size, run)
    for rank in ranks:
        for batch in rank["batches"]:
            for name, values in _expected(batch, f"{folder}/model").items():
                torch.testing.assert_close(
                    batch[name],
                    values,
                    rtol=1e-5,
                    atol=1e-5,
                )
        first = rank["logged"][0]
        assert first["train_loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert first["train_margin"] == pytest.approx(0.0, abs=1e-4)
        assert rank["logged"][-1]["train_loss"] < 0.5
    lines = ranks[0]["lines"]
    assert len(lines) == 2
    assert lines[0].startswith("Computing the reference log-probabilities of 5 pairs with ")
    assert len(list(Path(folder, "reference_logps").glob("reference-*/logps.npy"))) == 2
    again = run_ranks(_fit, layout.world_size, run)
    assert all(line.startswith("Reference log-pro") for line in again[0]["lines"])
    for before, after in zip(ranks, again, strict=True):
        assert torch.equal(before["logits"], after["logits"])
        assert before["logged"] == after["logged"]


def _touched(folder: str) -> None:
    """Other weights in files of the same size."""
    from safetensors.torch import load_file, save_file

    file = f"{folder}/model/model.safetensors"
    times = os.stat(file)
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _other_pair(folder: str) -> None:
    path = Path(folder, "pairs.jsonl")
    path.write_text(path.read_text().replace('" no"', '" no."', 1))


def _damaged(folder: str) -> None:
    for file in Path(folder, "reference_logps").glob("reference-*/logps.npy"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def _one_rank(
    folder: str,
    change: Any,
    options: dict[str, Any],
) -> list[list[str]]:
    """Lines of a first run, and of a second one after a change."""
    before = _fit(Run(folder=folder, steps=1))
    if change is not None:
        change(folder)
    after = _fit(Run(folder=folder, steps=1, **options))
    for batch in after["batches"]:
        for name, values in _expected(batch, f"{folder}/model").items():
            torch.testing.assert_close(
                batch[name],
                values,
                rtol=1e-5,
                atol=1e-5,
            )
    return [before["lines"], after["lines"]]


@pytest.mark.parametrize(
    ("change", "options", "num_computed"),
    [
        exhaustive(None, {}, 0, id="nothing"),
        pytest.param(_touched, {}, 2, id="weights"),
        pytest.param(_other_pair, {}, 1, id="data"),
        pytest.param(_damaged, {}, 2, id="damage"),
        exhaustive(None, {"data": {"seq_length": 10}}, 2, id="length"),
        exhaustive(None, {"data": {"separator": " "}}, 2, id="separator"),
        exhaustive(None, {"data": {"pad_to_multiple_of": 16}}, 0, id="padding"),
    ],
)
def test_a_cache_of_anything_else_is_computed_again(
    change: Any, options: dict[str, Any], num_computed: int, folder: str
) -> None:
    ((first, second),) = run_ranks(
        _one_rank,
        1,
        folder,
        change,
        options,
    )
    assert [line.split()[0] for line in first] == ["Computing", "Computing"]
    computed = [line for line in second if line.startswith("Computing")]
    assert (len(second), len(computed)) == (2, num_computed)


@pytest.mark.parametrize(
    "layout",
    [Layout(), exhaustive(PP2_DP2)],
    ids=str,
)
def test_a_resumed_run_keeps_the_reference_of_its_start(layout: Layout, folder: str) -> None:
    run = Run(folder=folder, layout=layout, steps=4)
    (straight, *_) = run_ranks(_fit, layout.world_size, run)
    checkpoint = f"{folder}/half.ckpt"
    half = Run(folder=folder, layout=layout, steps=2)
    run_ranks(_fit, layout.world_size, half, checkpoint)
    shutil.rmtree(f"{folder}/reference_logps")
    (resumed, *_) = run_ranks(
        _fit,
        layout.world_size,
        run,
        None,
        checkpoint,
    )
    steps = zip(resumed["logged"], straight["logged"][2:], strict=True)
    for after, before in steps:
        assert after["train_rewards_chosen"] == before["train_rewards_chosen"]
        assert after["train_rewards_rejected"] == before["train_rewards_rejected"]
    assert torch.equal(resumed["logits"], straight["logits"])


def _from_checkpoint(folder: str) -> dict[str, Any]:
    """Train, and then again with the result as initial weights of a model without any."""
    _fit(Run(folder=folder), f"{folder}/tuned.ckpt")
    return _fit(
        Run(
            folder=folder,
            model={"pretrained": False},
            load_from=f"{folder}/tuned.ckpt",
            steps=1,
        )
    )


def _from_weights_of_a_checkpoint(folder: str) -> tuple[str, list[str]]:
    """The refusal of weights of a checkpoint alone, and what a second fit of a module says."""
    from lightning_megatron import DPOTrainStep, MegatronModule, PreferenceDataModule

    def data() -> Any:
        return PreferenceDataModule(
            f"{folder}/pairs.jsonl",
            f"{folder}/model",
            split="5,2,0",
            seq_length=48,
            micro_batch_size=1,
        )

    module = MegatronModule(f"{folder}/model", train_step=DPOTrainStep(), pretrained=True)
    trainer = trainer_of(Case(steps=1), default_root_dir=folder)
    with recorded_warnings("reference=None") as messages:
        trainer.fit(module, datamodule=data())
        trainer.validate(module, datamodule=data(), verbose=False)
        assert messages == []
        trainer_of(Case(steps=1), default_root_dir=folder).fit(module, datamodule=data())
    trainer.save_checkpoint(f"{folder}/tuned.ckpt")
    other = trainer_of(Case(steps=1), default_root_dir=folder)
    other.strategy.load_weights_only = True
    other_module = MegatronModule(f"{folder}/model", train_step=DPOTrainStep(), pretrained=True)
    path = f"{folder}/tuned.ckpt"
    return refusal(other.fit, other_module, datamodule=data(), ckpt_path=path), messages


def test_reference_of_another_start_is_not_taken_for_its_weights(folder: str) -> None:
    ((message, warnings),) = run_ranks(_from_weights_of_a_checkpoint, 1, folder)
    assert "tuned.ckpt with load_weights_only=True" in message
    (warning,) = warnings
    assert f"the reference is still {folder}/model" in warning


def test_weights_of_load_from_are_the_reference(folder: str) -> None:
    (second,) = run_ranks(_from_checkpoint, 1, folder)
    assert second["logged"][0]["train_margin"] == pytest.approx(0.0, abs=1e-4)
    assert second["lines"][0].endswith("reference_logps/reference-" + second["lines"][0][-24:])
    assert "tuned.ckpt" in second["lines"][0]


def _adapters_and_rewards(folder: str) -> dict[str, Any]:
    """Batches of LoRA with and without ``reference``, and of a reward model."""
    from lightning_megatron import LoRA

    lora = {"lora": LoRA(rank=2)}
    return {
        "lora": _fit(Run(folder=folder, model=lora, steps=1)),
        "given": _fit(
            Run(
                folder=folder,
                model=lora,
                data={"reference": f"{folder}/model"},
                steps=1,
            )
        ),
        "reward": _fit(
            Run(
                folder=folder,
                model={
                    "train_step": "reward",
                    "task": "sequence_classification",
                    "num_labels": 1,
                },
                steps=1,
            )
        ),
    }


def test_adapters_and_rewards_need_no_reference(folder: str) -> None:
    (runs,) = run_ranks(_adapters_and_rewards, 1, folder)
    references = {f"reference_{name}_logps" for name in ("chosen", "rejected")}
    keys = {name: set(run["batches"][0]) for name, run in runs.items()}
    assert not keys["lora"] & references
    assert references < keys["given"]
    assert keys["lora"] | references == keys["given"]
    inputs = ("input_ids", "attention_mask")
    assert keys["reward"] == {
        f"{answer}_{name}" for answer in ("chosen", "rejected") for name in inputs
    }
    assert [runs[name]["lines"] == [] for name in ("lora", "given", "reward")] == [
        True,
        False,
        True,
    ]
    for name in ("lora", "given"):
        assert runs[name]["logged"][0]["train_margin"] == pytest.approx(0.0, abs=1e-4)


def _refusals(folder: str) -> list[str]:
    from lightning_megatron import MegatronModule

    def provider(*_: Any) -> Any:
        raise AssertionError("nothing is built")

    other = MegatronModule(model={"model_type": "gpt2", "vocab_size": 17, "n_embd": 8, "n_head": 1})
    Path(folder, "other").mkdir()
    Path(folder, "other/config.json").write_text(json.dumps(other.hugging_face_config))
    shutil.copy(f"{folder}/model/model.safetensors", f"{folder}/other")
    Path(folder, "file").touch()
    runs = [
        Run(folder=folder, model={"pretrained": False}),
        Run(folder=folder, model={"pretrained": False, "model_provider": provider}),
        Run(folder=folder, model={"model_provider": provider}),
        Run(folder=folder, data={"reference": f"{folder}/other"}),
        Run(folder=folder, data={"reference": f"{folder}/none"}),
        Run(folder=folder, data={"reference_cache": f"{folder}/file"}),
        Run(
            folder=folder,
            data={"reference": f"{folder}/model"},
            model={"train_step": "reward", "task": "sequence_classification", "num_labels": 1},
        ),
    ]
    return [refusal(_fit, run) for run in runs]


def test_what_has_no_reference_is_refused(folder: str) -> None:
    (messages,) = run_ranks(_refusals, 1, folder)
    expected = [
        "reference=None: expected a model with pretrained=True or a strategy with load_from, whose",
        "reference=None: expected a model with pretrained=True or a strategy with load_from, whose",
        "reference=None: expected this package's model, got a model_provider, whose weights cannot",
        "expected the model's vocabulary of 311 tokens, got 17; give a model with the same tokenizer",
        "none",
        "set reference_cache",
        "model: expected a train step that compares with a reference, as 'dpo' does, got RewardTrain",
    ]
    for message, part in zip(messages, expected, strict=True):
        assert part in message
