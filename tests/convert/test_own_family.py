"""A family registered from outside the package: that of docs/own_model.md."""

import importlib
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.models import LLAMA, QUIET, VOCAB_SIZE
from tests.pages import blocks, token_loader
from tests.ranks import run_ranks

PAGE = "docs/own_model.md"


def _own_module(folder: str) -> Any:
    """Import the page's module."""
    Path(folder, "scaled_llama.py").write_text(blocks(PAGE, "python")[-1])
    sys.path.insert(0, folder)
    return importlib.import_module("scaled_llama")


def _save_source(folder: str) -> None:
    """Save a model of the page's class with random weights."""
    import torch

    own: Any = _own_module(folder)
    torch.manual_seed(1)
    config = own.ScaledLlamaConfig(
        logit_scale=0.25,
        vocab_size=VOCAB_SIZE,
        initializer_range=0.2,
        **LLAMA,
    )
    own.ScaledLlamaForCausalLM(config).save_pretrained(f"{folder}/source")


def _differences(folder: str) -> tuple[float, float, float]:
    """Largest differences of logits at tp2 from transformers', as loaded and as exported; and what a step changes."""
    import torch
    from lightning.pytorch import Trainer
    from transformers import AutoModelForCausalLM

    from lightning_megatron import MegatronModule, MegatronStrategy

    _own_module(folder)
    tokens = torch.arange(16)[None]
    model = MegatronModule(f"{folder}/source", pretrained=True, lr=1e-2)
    before: list[Any] = []
    model.on_train_start = lambda: before.append(model.logits(tokens))  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(tp=2),
        max_steps=1,
        **QUIET,
    )
    trainer.fit(model, token_loader())
    after = model.logits(tokens)
    model.save_pretrained(f"{folder}/trained")
    with torch.no_grad():
        source, trained = (
            AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")(tokens).logits
            for name in ("source", "trained")
        )
    return (
        (before[0] - source).abs().max().item(),
        (after - trained).abs().max().item(),
        (trained - source).abs().max().item(),
    )


def test_registered_family_loads_trains_and_exports_at_tp2(tmp_path: Path) -> None:
    run_ranks(_save_source, 1, str(tmp_path))
    for loaded, exported, learned in run_ranks(_differences, 2, str(tmp_path)):
        assert loaded < 1e-5
        assert exported < 1e-5
        assert learned > 1e-3


def _refusals(folder: str) -> list[str]:
    """Messages of wrong registrations, and of a model whose family is not registered."""
    from lightning_megatron import ConfigError, Family, register_family
    from lightning_megatron.convert.registry import model_config

    def family(name: str, *aliases: str) -> Any:
        return Family(
            name=name,
            aliases=aliases,
            architectures={"causal_lm": "NoSuchClass"},
            defaults={},
        )

    messages = []

    def record(call: Any, argument: Any) -> None:
        try:
            call(argument)
            messages.append("accepted")
        except ConfigError as error:
            messages.append(str(error))

    record(model_config, {"model_type": "scaled_llama"})
    own: Any = _own_module(folder)
    record(model_config, {"model_type": "scaled_llama", "logit_scale": 2.0})
    for wrong in (
        "llama",
        family("llama"),
        family("scaled_llama"),
        family("mamba", "llama"),
        family("phi"),
        family("no_such_type"),
        family("mamba"),
    ):
        record(register_family, wrong)
    from lightning_megatron.convert.registry import known_families

    record(register_family, known_families()["scaled_llama"])
    assert own.ScaledLlamaConfig.model_type in known_families()
    return messages


def test_wrong_registrations_are_one_line(tmp_path: Path) -> None:
    exists = (
        "register_family: expected a new model_type, got {!r}, which exists; choose another name"
    )
    (messages,) = run_ranks(_refusals, 1, str(tmp_path))
    unknown, known, *wrong, again = messages
    assert unknown.startswith("model_type='scaled_llama' is not a known model family; choose from ")
    assert unknown.endswith(", or add it with register_family")
    assert known == again == "accepted"
    assert wrong == [
        "register_family: expected a Family, got a str; give Family(name=..., ...)",
        *map(exists.format, ("llama", "scaled_llama", "llama", "phi")),
        "register_family: expected a model_type of transformers, got 'no_such_type'; call "
        "transformers.AutoConfig.register('no_such_type', CONFIG_CLASS) first",
        "architectures of the family 'mamba': expected a class of the module transformers, got 'NoSuchClass', which it "
        "does not have; give Family(module=...) where it is defined",
    ]


def _by_entry_point(folder: str, module: str) -> str:
    """Name of the family that a package registers by an entry point, or the message."""
    from lightning_megatron import ConfigError
    from lightning_megatron.convert import registry

    Path(folder, "scaled_llama.py").write_text(blocks(PAGE, "python")[0])
    sys.path.insert(0, folder)
    point = EntryPoint(name="scaled", value=module, group="lightning_megatron.families")
    vars(registry)["entry_points"] = lambda group: [point] * (group == point.group)
    registry._import_entry_points.cache_clear()
    try:
        return registry.family_of("scaled_llama").name
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("scaled_llama", "scaled_llama"),
        (
            "no_such_module",
            "entry point scaled = no_such_module of lightning_megatron.families cannot be imported (No module named "
            "'no_such_module'); correct or uninstall its package",
        ),
    ],
)
def test_entry_points_of_installed_packages_register_families(
    module: str, expected: str, tmp_path: Path
) -> None:
    assert run_ranks(_by_entry_point, 1, str(tmp_path), module) == [expected]
