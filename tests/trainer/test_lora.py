"""LoRA runs: trained weights, checkpoints, resume, export and refusals."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.planning.parameters import trained_with_lora
from tests.checkpoint.runs import callback, read_tensors
from tests.cli.command import run_all
from tests.convert.directories import tiny_llama
from tests.parity.sharding import full_tensors, shards
from tests.parity.training import FOUR_RANKS, Case, loader_of, refusal, trainer_of
from tests.ranks import run_ranks

TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")
TOKENS = torch.arange(24).reshape(2, 12) % 80
SPLIT = Case(model="llama", layout=FOUR_RANKS, steps=4)


def _module(folder: Path, **changes: Any) -> Any:
    from lightning.pytorch import seed_everything

    from lightning_megatron import LoRA, MegatronModule

    seed_everything(11, verbose=False)
    options = {
        "model": str(folder / "base"),
        "pretrained": True,
        "lr": 5e-2,
        "lora": LoRA(rank=3, alpha=5, targets=TARGETS),
    }
    return MegatronModule(**{**options, **changes})


def _train(
    folder: Path, case: Case, ckpt_path: str | None = None, **options: Any
) -> dict[str, Any]:
    """Train; save at step 2, and both kinds of checkpoints at the end; return weights, sizes, logits and sequences."""
    initial: list[Any] = []

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(folder / "half.ckpt")

    saver = callback(
        on_train_start=lambda trainer, module: initial.extend(shards(module)),
        on_train_batch_end=save,
    )
    module = _module(folder, **options)
    trainer = trainer_of(case, callbacks=[saver])
    trainer.fit(module, loader_of(case), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "adapters.ckpt", weights_only=True)
    (optimizer,) = trainer.strategy.optimizers
    weights = module.model_chunks.parameters()
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.parts[0].optimizer.state.values()
    moments = [tensor.numel() for state in states for tensor in state.values()]
    return {
        "initial": initial,
        "final": shards(module),
        "trained": sum(p.numel() for p in weights if p.requires_grad),
        "summary": _trained_in_summary(module),
        "announced": trained_with_lora(module.model_config),
        "moments": sum(size for size in moments if size > 1),
        "masters": sum(p.numel() for p in masters),
        "results": _infer(module),
    }


def _trained_in_summary(module: Any) -> dict[str, int]:
    """Trained elements of this stage over tp, by parameter, as Lightning's summary counts them."""
    from lightning_megatron.callbacks.model_summary import _describe_chunk

    (chunk,) = map(unwrap, module.megatron.chunks)
    _, counts = _describe_chunk(chunk, module.model_config, module.megatron.parallel)
    return {name: trained for name, (_, trained, _) in counts.items()}


def _infer(module: Any) -> tuple[Tensor, Tensor]:
    sequences = module.generate(TOKENS, max_new_tokens=4, eos_token_id=())
    return module.logits(TOKENS), sequences


def _load_and_infer(path: Path) -> tuple[Tensor, Tensor]:
    """Logits and sequences of a checkpoint, or of a Hugging Face directory by transformers."""
    from transformers import AutoModelForCausalLM

    from lightning_megatron import MegatronModule

    if path.suffix == ".ckpt":
        return _infer(MegatronModule.load_from_checkpoint(path))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(TOKENS).logits, model.generate(
            TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=None
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tiny_llama().save_pretrained(folder / "base")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(_train, 4, folder, SPLIT)


def test_only_adapters_are_trained_and_initial_values_are_equal_on_every_layout(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    for rank in ranks:
        assert rank["moments"] == 2 * rank["trained"] == 2 * rank["masters"]
        pairs = zip(rank["initial"], rank["final"], strict=True)
        assert {"_lora." in a.key for a, b in pairs if not a.data.equal(b.data)} == {True}
    (tmp_path / "base").symlink_to(folder / "base")
    (one_process,) = run_ranks(
        _train,
        1,
        tmp_path,
        Case(model="llama", steps=1),
    )
    adapters = [
        [shard for shard in rank["initial"] if "_lora." in shard.key]
        for rank in (one_process, *ranks)
    ]
    expected = full_tensors(adapters[:1])
    actual = full_tensors(adapters[1:])
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.equal(expected[name])
        # As torch.nn.Linear: kaiming_uniform(a=sqrt(5)) is uniform in +-1/sqrt(in).
        limit = tensor.shape[-1] ** -0.5
        if name.endswith(".B"):
            limit = 0.0
        assert 0.95 * limit <= tensor.abs().max() <= limit


def test_summary_counts_the_adapters_that_are_announced(ranks: list[dict[str, Any]]) -> None:
    """Rows of B of matrices without an adapter (here keys and gate) stay zero."""
    first, *_, last = ranks
    counts = first["summary"] | last["summary"]
    assert sum(counts.values()) == first["announced"]


def test_resume_is_exact_and_weights_only_checkpoints_hold_adapters(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    names = read_tensors(folder / "full.ckpt").keys()
    weights = {name for name in names if not name.startswith("optimizer.")}
    adapters = {name for name in weights if name.endswith(("lora.A", "lora.B"))}
    assert read_tensors(folder / "adapters.ckpt").keys() == adapters
    resumed = run_ranks(_train, 4, folder, SPLIT, str(folder / "half.ckpt"))
    for expected, actual in zip(ranks, resumed, strict=True):
        for a, b in zip(expected["final"], actual["final"], strict=True):
            assert a.data.equal(b.data)


def _convert(
    load_path: Path | str,
    save_path: str,
    to: str,
) -> list[Any]:
    return ["convert", "--load-path", load_path, "--save-path", save_path, "--to", to]


def test_checkpoints_and_converted_exports_give_equal_results(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    adapters = folder / "adapters.ckpt"
    commands = [
        _convert(folder / "full.ckpt", "full", to="hf"),
        _convert(adapters, "merged_adapters", to="hf"),
        _convert(adapters, "kept.ckpt", to="megatron"),
        _convert("kept.ckpt", "again", to="hf"),
        _convert(adapters, "adapter", to="peft"),
        _convert("adapter", "merged", to="hf"),
        ["inspect", adapters],
        ["inspect", "adapter"],
    ]
    results = run_all(tmp_path, commands)
    assert [code for code, _, _ in results] == [0] * len(commands), results
    assert re.search(rf"base +{folder / 'base'}\n", results[-2][1])
    assert "lora_A" in results[-1][1]
    exports = map(tmp_path.joinpath, ("full", "merged_adapters", "again", "merged"))
    for path in (folder / "full.ckpt", adapters, *exports):
        ((logits, sequences),) = run_ranks(_load_and_infer, 1, path)
        torch.testing.assert_close(
            logits,
            ranks[0]["results"][0],
            rtol=1e-5,
            atol=2e-5,
        )
        assert sequences.equal(ranks[0]["results"][1])


def _refusals(folder: Path, adapter: Path) -> list[tuple[str, str]]:
    """For each mistake the expected fragment and the message."""
    from lightning_megatron import LoRA

    changed = adapter.with_name("changed")
    shutil.copytree(adapter, changed)
    file = changed / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "use_dora": True}))
    other_type = adapter.with_name("other_type")
    shutil.copytree(adapter, other_type)
    of_ia3 = {"feedforward_modules": ["down_proj"], **config, "peft_type": "IA3"}
    (other_type / file.name).write_text(json.dumps(of_ia3))
    of_eva = {**config, "init_lora_weights": "eva", "eva_config": {"rho": 1.0, "tau": 0.99}}
    eva = adapter.with_name("eva")
    shutil.copytree(adapter, eva)
    (eva / file.name).write_text(json.dumps(of_eva))
    module = partial(_module, folder)
    assert module(lora=str(eva)).adaptation, "EVA determines initial values alone"
    validate = partial(_validate, folder)
    other = LoRA(rank=2, targets=TARGETS)
    full = folder / "full.ckpt"
    adapters = folder / "adapters.ckpt"
    mistakes: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        (
            "one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_pr",
            module,
            {"lora": LoRA(targets=("query",))},
        ),
        ("lora rank=0 must be at least 1", LoRA, {"rank": 0}),
        ("LoRA has no option 'r'; use rank", module, {"lora": {"r": 8}}),
        (
            "expected a directory with adapter_config.json and",
            module,
            {"lora": str(folder / "base")},
        ),
        ("expected it unset for use_dora, got True", module, {"lora": str(changed)}),
        ("expected 'LORA' for peft_type, got 'IA3'", module, {"lora": str(other_type)}),
        ("expected this package's layers, got a model_provider", module, {"model_provider": print}),
        (
            "a module with lora, got one",
            module(lora=None).save_pretrained,
            {"save_directory": "merged", "merge": True},
        ),
        (
            "has the shape",
            validate,
            {"lora": str(adapter), "model": str(folder / "narrow")},
        ),
        ("is of another model: lora=", validate, {"ckpt_path": full, "lora": other}),
        ("is of another model: lora=", validate, {"ckpt_path": full, "lora": None}),
        (
            "expected a complete model, got the adapters of",
            validate,
            {"ckpt_path": adapters, "pretrained": False},
        ),
    )
    return [(expected, refusal(mistake, **arguments)) for expected, mistake, arguments in mistakes]


def _validate(
    folder: Path,
    ckpt_path: Path | None = None,
    **options: Any,
) -> None:
    case = Case(model="llama", steps=1)
    module = _module(folder, **options)
    trainer_of(case).validate(module, loader_of(case), ckpt_path=ckpt_path)


def test_mistakes_are_refused_in_one_line(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    commands = [
        _convert(folder / "full.ckpt", "adapter", to="peft"),
        _convert(folder / "base", "other", to="peft"),
    ]
    (code, _, _), (refused_code, _, reason) = run_all(tmp_path, commands)
    assert (code, refused_code) == (0, 2)
    assert "expected a model with adapters (LoRA), got one without" in reason
    tiny_llama(hidden_size=48, intermediate_size=40).save_pretrained(folder / "narrow")
    for expected, line in run_ranks(_refusals, 1, folder, tmp_path / "adapter")[0]:
        assert expected in line
