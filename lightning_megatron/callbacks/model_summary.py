"""Lightning's summary of a model for one that is split over ranks: the whole model's layers, and this rank's share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from typing_extensions import override

from lightning_megatron.accounting.flops import TRAINING_OVER_FORWARD, forward_flops_per_token
from lightning_megatron.accounting.t5 import t5_model_flops_per_row
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.module import MegatronModule


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A parameter of one stage."""

    size: int
    """Of the whole, over tp and without rows that pad the vocabulary."""
    here: int
    """On this rank."""
    trains: bool
    flops: int
    """Of the product with one token."""


@dataclass(kw_only=True)
class _Stage:
    """What one stage holds, by the names of the whole model."""

    types: dict[str, tuple[str, bool]]
    """Each module's class, and whether it is in training mode."""
    weights: dict[str, _Weight]


def whole_summaries(callbacks: Sequence[Callback]) -> list[Callback]:
    """For each of Lightning's two summaries among ``callbacks`` its like that shows the whole model."""
    kinds: dict[type[Callback], Any] = {ModelSummary: WholeModelSummary, RichModelSummary: WholeRichModelSummary}
    return [
        kinds[type(each)](each._max_depth, **each._summarize_kwargs)
        for each in callbacks
        if isinstance(each, ModelSummary) and type(each) in kinds
    ]


class _Whole(ModelSummary):
    """Sums up the stages of a pipeline, whose ranks all join."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._max_depth:
            return
        module: MegatronModule = pl_module  # type: ignore[assignment]
        topology, model = module.megatron.topology, module.model_config
        padded = model.padded_vocab_size(topology.parallel.tp)
        own = _own_stage(module.megatron._chunks, model, topology.parallel.tp, padded)
        stages: list[Any] = [None] * topology.parallel.pp
        dist.all_gather_object(stages, own, group=topology.pp_group)
        if not trainer.is_global_zero:
            return
        types, weights = own.types, own.weights
        for stage in stages[1:]:
            types, weights = {**stage.types, **types}, {**stage.weights, **weights}
        rows = sorted((name for name in types if self._max_depth < 0 or name.count(".") < self._max_depth), key=_order)
        total = sum(weight.size for weight in weights.values())
        modes = [training for _, training in types.values()]
        self.summarize(
            [
                (" ", [str(index) for index in range(len(rows))]),
                ("Name", rows),
                ("Type", [types[name][0] for name in rows]),
                ("Params", [_count(name, "size", weights) for name in rows]),
                ("Params per Device", [_count(name, "here", own.weights) for name in rows]),
                ("Mode", ["train" if types[name][1] else "eval" for name in rows]),
                ("FLOPs", [_count(name, "flops", weights) for name in rows]),
            ],
            total_parameters=total,
            trainable_parameters=sum(weight.size for weight in weights.values() if weight.trains),
            model_size=total * module.megatron.settings.dtypes.params.itemsize * 1e-6,
            total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
            total_flops=int(_forward_flops_per_token(model, padded)),
            **self._summarize_kwargs,
        )


class WholeModelSummary(_Whole):
    """As text."""


class WholeRichModelSummary(_Whole, RichModelSummary):
    """As a table of rich."""


def _own_stage(chunks: Sequence[Any], model: ModelConfig, tp: int, padded: int) -> _Stage:
    stage = _Stage(types={}, weights={})
    for chunk in map(unwrap, chunks):
        numbers = {
            name: re.sub(r"\d+$", str(layer.layer_number - 1), name)
            for name, layer in chunk.named_modules()
            if hasattr(layer, "layer_number") and name.rpartition(".")[2].isdecimal()
        }

        def named(name: str, numbers: dict[str, str] = numbers) -> str:
            layer = next((each for each in numbers if f"{name}.".startswith(f"{each}.")), None)
            return name if layer is None else numbers[layer] + name[len(layer) :]

        stage.types |= {named(n): (type(m).__name__, m.training) for n, m in chunk.named_modules() if n}
        for name, weight in chunk.named_parameters():
            is_copy = name == "output_layer.weight" and model.share_embeddings_and_output_weights
            whole, is_split = weight.numel() * tp, getattr(weight, "tensor_model_parallel", False)
            if is_split and weight.shape[0] * tp == padded:
                whole = whole // padded * model.vocab_size
            stage.weights[named(name)] = _Weight(
                size=0 if is_copy else whole if is_split else weight.numel(),
                here=weight.numel(),
                trains=weight.requires_grad,
                flops=2 * (whole if is_split else weight.numel()) * (weight.dim() == 2 and "embedding" not in name),
            )
    if "output_layer" in stage.types and model.share_embeddings_and_output_weights:  # multiplies with the embedding
        own = _Weight(size=0, here=0, trains=False, flops=2 * model.vocab_size * model.hidden_size)
        stage.weights.setdefault("output_layer.weight", own)
    return stage


def _count(row: str, what: str, weights: dict[str, _Weight]) -> str:
    inside = (weight for name, weight in weights.items() if name.startswith(f"{row}."))
    return get_human_readable_count(sum(getattr(weight, what) for weight in inside))


def _order(name: str) -> list[tuple[str, int]]:
    first = {"embedding": " 0", "encoder": " 1", "decoder": " 2"}
    parts = name.split(".")
    return [(first.get(parts[0], parts[0]), 0), *(("", int(p)) if p.isdecimal() else (p, 0) for p in parts[1:])]


def _forward_flops_per_token(model: ModelConfig, padded: int) -> float:
    """Of a row as long as the model reads (512 tokens for a T5), attention included."""
    if model.architecture == "t5":
        return t5_model_flops_per_row(model, 512, 512, padded) / TRAINING_OVER_FORWARD / 1024
    return forward_flops_per_token(model, model.max_position_embeddings, padded)
