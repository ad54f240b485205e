"""Runs with adapters: what is trained, saved, resumed, exported and refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from tests.checkpoint.runs import read_tensors
from tests.cli.command import run_all, run_cli
from tests.cli.corpus import make_corpus
from tests.convert.directories import tiny_llama
from tests.parity.sharding import shards, whole
from tests.parity.training import Case, Layout, loader_of, trainer_of
from tests.ranks import run_ranks

TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
TOKENS = torch.arange(24).reshape(2, 12) % 80
SPLIT = Case(model="llama", layout=Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2), steps=4)


def _module(folder: Path, **options: Any) -> Any:
    from lightning.pytorch import seed_everything

    from lightning_megatron import LoRA, MegatronModule

    seed_everything(11, verbose=False)
    lora = LoRA(rank=3, alpha=5, targets=TARGETS)
    return MegatronModule(**{"model": str(folder / "base"), "pretrained": True, "lr": 5e-2, "lora": lora, **options})


def _train(folder: Path, case: Case, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
    """Fit, save both kinds of checkpoints after the second step and the last, and say what is there."""
    from lightning.pytorch import Callback

    begun: list[Any] = []

    class Save(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.extend(shards(pl_module))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(folder / "half.ckpt")

    module, trainer = _module(folder, **options), trainer_of(case, callbacks=[Save()])
    trainer.fit(module, loader_of(case), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "adapters.ckpt", weights_only=True)
    states = trainer.strategy.optimizers[0].parts[0].optimizer.state
    return {
        "begun": begun,
        "ended": shards(module),
        "trained": sum(p.numel() for p in module.model_chunks.parameters() if p.requires_grad),
        "moments": sum(t.numel() for state in states.values() for t in state.values() if t.numel() > 1),
        "masters": sum(p.numel() for group in trainer.strategy.optimizers[0].param_groups for p in group["params"]),
        "logits": module.logits(TOKENS),
        "written": module.generate(TOKENS, max_new_tokens=4, eos_token_id=()),
    }


def _ask(folder: Path, checkpoint: str) -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_megatron import MegatronModule

    module = MegatronModule.load_from_checkpoint(folder / checkpoint)
    return module.logits(TOKENS), module.generate(TOKENS, max_new_tokens=4, eos_token_id=())


def _ask_transformers(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        written = model.generate(TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=None)
        return model(TOKENS).logits, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tiny_llama().save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(_train, 4, folder, SPLIT)


def test_only_adapters_have_optimizer_states_and_they_begin_alike_at_every_layout(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    for rank in ranks:
        assert rank["moments"] == 2 * rank["trained"] == 2 * rank["masters"]
        assert all(one.data.equal(two.data) for one, two in zip(rank["begun"], rank["ended"], strict=True)
                   if not one.key.endswith(("_lora.A", "_lora.B")))  # fmt: skip
    (tmp_path / "base").symlink_to(folder / "base")
    (alone,) = run_ranks(_train, 1, tmp_path, Case(model="llama", steps=1))
    adapters = [[shard for shard in rank["begun"] if "_lora." in shard.key] for rank in (alone, *ranks)]
    expected, begun = whole(adapters[:1]), whole(adapters[1:])
    assert begun.keys() == expected.keys()
    for name, tensor in begun.items():
        assert tensor.equal(expected[name])
        # As torch.nn.Linear: kaiming_uniform(a=sqrt(5)) is uniform in +-1/sqrt(in).
        limit = 0.0 if name.endswith(".B") else tensor.shape[-1] ** -0.5
        assert 0.95 * limit <= tensor.abs().max() <= limit


def test_a_run_resumes_exactly_and_its_weights_alone_are_adapters(ranks: list[dict[str, Any]], folder: Path) -> None:
    weights = read_tensors(folder / "adapters.ckpt")
    assert weights.keys() == {name for name in read_tensors(folder / "full.ckpt") if name.endswith(("lora.A", "lora.B"))
                              and not name.startswith("optimizer.")}  # fmt: skip
    for rank, again in zip(ranks, run_ranks(_train, 4, folder, SPLIT, str(folder / "half.ckpt")), strict=True):
        assert all(a.data.equal(b.data) for a, b in zip(rank["ended"], again["ended"], strict=True))
    for name in ("full.ckpt", "adapters.ckpt"):
        ((logits, written),) = run_ranks(_ask, 1, folder, name)
        torch.testing.assert_close(logits, ranks[0]["logits"], rtol=1e-5, atol=2e-5)
        assert written.equal(ranks[0]["written"])


def test_commands_read_adapters_and_their_base(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    commands = [
        ["convert", "--load-path", folder / "full.ckpt", "--save-path", "whole", "--to", "hf"],
        ["convert", "--load-path", folder / "adapters.ckpt", "--save-path", "joined", "--to", "hf"],
        ["convert", "--load-path", folder / "adapters.ckpt", "--save-path", "kept.ckpt", "--to", "megatron"],
        ["convert", "--load-path", "kept.ckpt", "--save-path", "again", "--to", "hf"],
        ["convert", "--load-path", folder / "adapters.ckpt", "--save-path", "alone", "--to", "peft"],
        ["convert", "--load-path", "alone", "--save-path", "merged", "--to", "hf"],
        ["inspect", folder / "adapters.ckpt"],
        ["inspect", "alone"],
    ]
    results = run_all(tmp_path, commands)
    assert [code for code, _, _ in results] == [0] * len(commands), results
    assert re.search(rf"base +{folder / 'base'}\n", results[-2][1])
    assert "lora_A" in results[-1][1]
    for name in ("whole", "joined", "again", "merged"):
        ((logits, written),) = run_ranks(_ask_transformers, 1, tmp_path / name)
        torch.testing.assert_close(logits, ranks[0]["logits"], rtol=1e-5, atol=2e-5)
        assert written.equal(ranks[0]["written"])


def _refused(folder: Path, adapter: Path) -> dict[str, str]:
    """What each mistake is told."""
    from lightning_megatron import LoRA, MegatronModule

    def changed(name: str, value: Any) -> Path:
        path = adapter.with_name(f"{name}_changed")
        shutil.copytree(adapter, path)
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**config, name: value}))
        return path

    mistakes: dict[str, Any] = {
        "target": lambda: _module(folder, lora=LoRA(targets=("q_proj", "query"))),
        "head": lambda: _module(folder, lora=LoRA(targets=("lm_head",))),
        "rank": lambda: LoRA(rank=0),
        "dropout": lambda: LoRA(dropout=1.0),
        "text": lambda: LoRA(targets="q_proj"),  # type: ignore[arg-type]
        "field": lambda: _module(folder, lora={"r": 8}),
        "folder": lambda: _module(folder, lora=str(folder / "base")),
        "dora": lambda: _module(folder, lora=str(changed("use_dora", True))),
        "bias": lambda: _module(folder, lora=str(changed("bias", "all"))),
        "provider": lambda: _module(folder, model_provider=print),
        "merge": lambda: _module(folder, lora=None).save_pretrained("merged", merge=True),
        "no base": lambda: MegatronModule.load_from_checkpoint(folder / "adapters.ckpt", model=str(folder / "gone")),
        "other base": lambda: _begin(folder, lora=str(adapter), model=str(folder / "narrow")),
        "other rank": lambda: _begin(folder, ckpt_path=folder / "full.ckpt", lora=LoRA(rank=2, targets=TARGETS)),
        "no lora": lambda: _begin(folder, ckpt_path=folder / "full.ckpt", lora=None),
        "random base": lambda: _begin(folder, ckpt_path=folder / "adapters.ckpt", pretrained=False),
    }
    told = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
        except ConfigError as error:
            told[name] = str(error)
    return told


def _begin(folder: Path, ckpt_path: Path | None = None, **options: Any) -> None:
    case = Case(model="llama", steps=1)
    trainer_of(case).validate(_module(folder, **options), loader_of(case), ckpt_path=ckpt_path)


def test_mistakes_are_told_in_one_line(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    to_peft = ["convert", "--load-path", folder / "full.ckpt", "--save-path", "adapter", "--to", "peft"]
    whole_to_peft = ["convert", "--load-path", folder / "base", "--save-path", "other", "--to", "peft"]
    (code, _, _), (refused, _, reason) = run_all(tmp_path, [to_peft, whole_to_peft])
    assert (code, refused) == (0, 2)
    assert "expected a model with adapters (LoRA), got one without" in reason
    tiny_llama(hidden_size=48, intermediate_size=40).save_pretrained(folder / "narrow")
    (told,) = run_ranks(_refused, 1, folder, tmp_path / "adapter")
    assert "\n" not in "".join(told.values())
    expected = {
        "target": "linears of llama layers, one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, got "
        "'query'",
        "head": "got 'lm_head'",
        "rank": "lora rank=0 must be at least 1",
        "dropout": "expected alpha > 0 and dropout < 1, got alpha=32.0 and dropout=1.0",
        "text": "got 'q_proj'",
        "field": "must be LoRA(...) with fields from rank, alpha, dropout, targets",
        "folder": "expected a folder with adapter_config.json and adapter_model.safetensors, got none",
        "dora": "expected it unset for use_dora, got True",
        "bias": "expected 'none' for bias, got 'all'",
        "provider": "expected this package's layers, got a model_provider",
        "merge": "expected a module with lora, got one without",
        "no base": "gone",
        "other base": "has the shape",
        "other rank": "is of another model: lora=",
        "no lora": "is of another model: lora=",
        "random base": "expected a whole model, got the adapters of",
    }
    assert told.keys() == expected.keys()
    for name, words in expected.items():
        assert words in told[name], told[name]


@pytest.mark.exhaustive
def test_adapters_train_on_instructions_beside_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    model = tiny_llama(vocab_size=512, max_position_embeddings=32)
    model.save_pretrained(tmp_path / "base")
    lines = [json.dumps({"prompt": f"w{i}", "completion": f" w{i + 1} w{i + 2}"}) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    lora = "{rank: 4, targets: [q_proj, v_proj], dropout: 0.1}"
    fit = ["fit", "--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.max_steps", "4"]
    fit += ["--trainer.strategy", "MegatronStrategy", "--trainer.strategy.tp", "2"]
    fit += ["--trainer.strategy.load_from", "base.ckpt", "--model.model", "base/config.json", "--model.lora", lora]
    fit += ["--data", "InstructionDataModule", "--data.data_path", "data.jsonl", "--data.tokenizer", "tok"]
    fit += [
        "--data.seq_length",
        "16",
        "--data.micro_batch_size",
        "2",
        "--data.split",
        "80,20,0",
        "--data.packing",
        "true",
    ]
    fit += ["--trainer.default_root_dir", "runs"]
    convert = ["convert", "--load-path", "base", "--save-path", "base.ckpt", "--to", "megatron"]
    ((code, _, err),) = run_all(tmp_path, [convert])
    assert code == 0, err
    code, _, err = run_cli(tmp_path, *fit, ranks=2)
    assert code == 0, err
    assert "random ones" not in err
    (checkpoint,) = tmp_path.glob("runs/**/*.ckpt")
    after = [
        ["generate", "--checkpoint", checkpoint, "--tokenizer", "tok", "--prompt", "w1", "--max-new-tokens", "4"],
        ["convert", "--load-path", checkpoint, "--save-path", "adapter", "--to", "peft"],
    ]
    assert [code for code, _, _ in run_all(tmp_path, after)] == [0, 0]
    weights, base = read_tensors(checkpoint), read_tensors(tmp_path / "base.ckpt")
    assert all(weights[name].equal(base[name]) for name in base if "word_embeddings" not in name)
    assert any(tensor.any() for name, tensor in weights.items() if name.endswith("linear_qkv_lora.B"))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] is None
