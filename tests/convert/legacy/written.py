"""What is in a legacy checkpoint that was written? Read with torch's own loader, which takes tensors and plain data."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.base import Key, Spec, StoredModel, Training

GROUPS = (
    {"lr": 2e-4, "wd_mult": 1.0, "lr_mult": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7},
    {"lr": 2e-4, "wd_mult": 0.0, "lr_mult": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7},
)
SCHEDULE = {"max_lr": 2e-4, "num_steps": 448, "lr_warmup_steps": 10, "lr_decay_steps": 900, "lr_decay_style": "cosine"}


def load(file: Path) -> dict[str, Any]:
    """The pickle of one rank."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(file, weights_only=True)
    assert isinstance(state, dict)
    return state


def files(root: Path) -> list[str]:
    """Every file below ``root``, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def flat(nested: Mapping[str, Any], before: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries under the joined names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in nested.items():
        tensors |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return tensors


def options(source: Path, target: Path, **fields: Any) -> ConvertOptions:
    """With a small multiple for the vocabulary: each layout has rows that pad it."""
    base = ConvertOptions(load_path=source, save_path=target, to="megatron-legacy", make_vocab_size_divisible_by=8)
    return replace(base, **fields)


@dataclass(frozen=True, kw_only=True, eq=False)
class InTraining:
    """A stored model with moments, as a run's checkpoint gives it; they follow from the weights, in any shard."""

    weights: StoredModel
    training: Training = Training(iteration=7, consumed_samples=448, param_groups=GROUPS, lr_scheduler=SCHEDULE)

    @property
    def path(self) -> Path:
        return self.weights.path

    @property
    def kind(self) -> str:
        return "a run"

    @property
    def model(self) -> Any:
        return self.weights.model

    @property
    def hf_config(self) -> Any:
        return self.weights.hf_config

    @property
    def companions(self) -> Path | None:
        return None

    @functools.cached_property
    def tensors(self) -> Mapping[Key, Spec]:
        tensors: dict[Key, Spec] = {}
        for key, spec in self.weights.tensors.items():
            tensors[key] = spec
            for state in ("param", "exp_avg", "exp_avg_sq"):
                tensors[key._replace(state=state)] = replace(spec, dtype=torch.float32)
        return tensors

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        rows = self.weights.read(key._replace(state="weight"), start, stop)
        return rows if key.state == "weight" else of_state(rows, key.state)


def of_state(weight: torch.Tensor, state: str) -> torch.Tensor:
    """What ``InTraining`` has for a weight."""
    numbers = weight.float()
    return {"param": 2 * numbers, "exp_avg": numbers / 4, "exp_avg_sq": numbers * numbers}[state]
