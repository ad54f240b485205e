"""Lightning's model summary for a model that is split over ranks: the whole model's layers, and this rank's share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.accounting import forward_flops
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planner import GIB, memory, run_of

if TYPE_CHECKING:
    from lightning_megatron.module import MegatronModule


class MemoryEstimate(Callback):
    """Says before a model is built how much memory training is expected to take, and warns if a GPU has less."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tell it on rank 0; the length of rows is known of this package's data modules only."""
        strategy: Any = trainer.strategy
        if stage != "fit" or strategy.root_device.type != "cuda":
            return
        module: Any = pl_module
        data: Any = getattr(trainer, "datamodule", None)
        rows = data.micro_batch_size if hasattr(data, "seq_length") else 0
        named = data.lengths(module.model_config) if rows else {"seq_length": 1, "seq_length_decoder": 1}
        lengths = tuple(length for name, length in named.items() if name.startswith("seq_length"))
        run = run_of(module.model_config, strategy.settings, rows=rows, lengths=lengths, world_size=trainer.world_size)
        expected, there = memory(run), torch.cuda.get_device_properties(strategy.root_device).total_memory
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in asdict(expected).items())
        line = f"Expected memory of the fullest GPU: {expected.total / GIB:.1f} of {there / GIB:.1f} GiB ({parts})"
        if expected.total > there:
            rank_zero_warn(f"{line}; raise tp, pp or dp, lower micro_batch_size, or set recompute")
        else:
            rank_zero_info(line if rows else f"{line}, and what the rows of a microbatch take")


def whole_summaries(callbacks: Sequence[Callback]) -> list[Callback]:
    """For each of Lightning's two summaries among ``callbacks`` its like that shows the whole model.

    Lightning's own sums up what this rank holds: a share of one stage.
    """
    kinds: dict[type[Callback], Any] = {ModelSummary: WholeModelSummary, RichModelSummary: WholeRichModelSummary}
    return [
        kinds[type(each)](each._max_depth, **each._summarize_kwargs)
        for each in callbacks
        if isinstance(each, ModelSummary) and type(each) in kinds
    ]


class WholeModelSummary(ModelSummary):
    """Sums up the stages of a pipeline, whose ranks all join, as text."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the stages over the pipeline group, and show them on rank 0."""
        if not self._max_depth:
            return
        module: MegatronModule = pl_module  # type: ignore[assignment]
        topology, model = module.megatron.topology, module.model_config
        padded = model.padded_vocab_size(topology.parallel.tp)
        own = _stage(module.megatron._chunks, model, topology.parallel.tp, padded)
        stages: list[Any] = [None] * topology.parallel.pp
        dist.all_gather_object(stages, own, group=topology.pp_group)
        if not trainer.is_global_zero:
            return
        kinds, weights = ({name: of for stage in reversed(stages) for name, of in stage[i].items()} for i in (0, 1))

        def within(module: str, numbers: Mapping[str, Any], index: int) -> int:
            return sum(of[index] for name, of in numbers.items() if not module or name.startswith(f"{module}."))

        modes = [is_training for _, is_training in kinds.values()]
        names = sorted((n for n in kinds if self._max_depth < 0 or n.count(".") < self._max_depth), key=_order)
        # Of a row as long as the model reads (512 tokens for a T5), attention included.
        lengths = (512, 512) if model.architecture == "t5" else (model.max_position_embeddings,)
        count = get_human_readable_count
        self.summarize(
            [
                (" ", [str(index) for index in range(len(names))]),
                ("Name", names),
                ("Type", [kinds[name][0] for name in names]),
                ("Params", [count(within(name, weights, 0)) for name in names]),
                ("Params per Device", [count(within(name, own[1], 2)) for name in names]),
                ("Mode", ["train" if kinds[name][1] else "eval" for name in names]),
            ],
            total_parameters=within("", weights, 0),
            trainable_parameters=within("", weights, 1),
            model_size=within("", weights, 0) * module.megatron.settings.params_dtype.itemsize * 1e-6,
            total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
            total_flops=int(forward_flops(model, lengths, padded) / sum(lengths)),
            **self._summarize_kwargs,
        )


class WholeRichModelSummary(WholeModelSummary, RichModelSummary):
    """As a table of rich."""


def _stage(
    chunks: Sequence[Any], model: ModelConfig, tp: int, padded: int
) -> tuple[dict[str, tuple[str, bool]], dict[str, tuple[int, int, int]]]:
    """By the names of the whole model: each module's class and whether it trains; and the numbers of each weight.

    These are how many there are over tp, without rows that pad the vocabulary and copies of a tied embedding, how many
    of them are trained, and how many this rank has.
    """
    kinds: dict[str, tuple[str, bool]] = {}
    weights: dict[str, tuple[int, int, int]] = {}

    for chunk in map(unwrap, chunks):
        numbers = {
            name: re.sub(r"\d+$", str(layer.layer_number - 1), name)
            for name, layer in chunk.named_modules()
            if hasattr(layer, "layer_number") and name.rpartition(".")[2].isdecimal()
        }

        def named(name: str, numbers: dict[str, str] = numbers) -> str:
            layer = next((each for each in numbers if f"{name}.".startswith(f"{each}.")), None)
            return name if layer is None else numbers[layer] + name[len(layer) :]

        kinds |= {named(name): (type(each).__name__, each.training) for name, each in chunk.named_modules() if name}
        for name, weight in chunk.named_parameters():
            is_copy = name == "output_layer.weight" and model.share_embeddings_and_output_weights
            whole = weight.numel()
            if getattr(weight, "tensor_model_parallel", False):
                whole *= tp
                if weight.shape[0] * tp == padded:
                    whole = whole // padded * model.vocab_size
            counted = 0 if is_copy else whole
            weights[named(name)] = counted, counted * weight.requires_grad, weight.numel()
    return kinds, weights


def _order(name: str) -> list[tuple[str, int]]:
    first = {"embedding": " 0", "encoder": " 1", "decoder": " 2"}
    parts = name.split(".")
    return [(first.get(parts[0], parts[0]), 0), *(("", int(p)) if p.isdecimal() else (p, 0) for p in parts[1:])]
