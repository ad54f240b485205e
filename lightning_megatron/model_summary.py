"""Lightning's model summary for a model that is split over ranks: the whole model's layers, and this rank's share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.accounting import forward_flops
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planner import GIB, make_run, memory

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
        model: Any = pl_module.model_config
        data: Any = getattr(trainer, "datamodule", None)
        rows = data.micro_batch_size if hasattr(data, "seq_length") else 0
        named = data.lengths(model) if rows else {"seq_length": 1, "seq_length_decoder": 1}
        lengths = tuple(length for name, length in named.items() if name.startswith("seq_length"))
        run = make_run(model, strategy.settings, rows=rows, lengths=lengths, world_size=trainer.world_size)
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
    kinds = {ModelSummary: WholeModelSummary, RichModelSummary: WholeRichModelSummary}
    given: list[Any] = [each for each in callbacks if type(each) in kinds]
    return [kinds[type(each)](each._max_depth, **each._summarize_kwargs) for each in given]


class WholeModelSummary(ModelSummary):
    """Sums up the stages of a pipeline, whose ranks all join, as text."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the stages over the pipeline group, and show them on rank 0."""
        if not self._max_depth:
            return
        module: MegatronModule = pl_module  # type: ignore[assignment]
        topology, model = module.megatron.topology, module.model_config
        own = [_contents(unwrap(chunk), model, topology.parallel) for chunk in module.megatron._chunks]
        stages: list[Any] = [None] * topology.parallel.pp
        dist.all_gather_object(stages, own, group=topology.pp_group)
        if not trainer.is_global_zero:
            return
        chunks = list(chain(*zip(*stages, strict=True)))  # in the order of the pipeline
        kinds, weights, mine = _joined(chunks, 0), _joined(chunks, 1), _joined(own, 1)
        names = [name for name in kinds if self._max_depth < 0 or name.count(".") < self._max_depth]
        modes = [is_training for _, is_training in kinds.values()]
        # Of a row as long as the model reads (512 tokens for a T5), attention included.
        lengths = (512, 512) if model.architecture == "t5" else (model.max_position_embeddings,)
        count, padded = get_human_readable_count, model.padded_vocab_size(topology.parallel.tp)
        self.summarize(
            [
                (" ", [str(index) for index in range(len(names))]),
                ("Name", names),
                ("Type", [kinds[name][0] for name in names]),
                ("Params", [count(_within(name, weights, 0)) for name in names]),
                ("Params per Device", [count(_within(name, mine, 2)) for name in names]),
                ("Mode", ["train" if kinds[name][1] else "eval" for name in names]),
            ],
            total_parameters=_within("", weights, 0),
            trainable_parameters=_within("", weights, 1),
            model_size=_within("", weights, 0) * module.megatron.settings.params_dtype.itemsize * 1e-6,
            total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
            total_flops=int(forward_flops(model, lengths, padded) / sum(lengths)),
            **self._summarize_kwargs,
        )


class WholeRichModelSummary(WholeModelSummary, RichModelSummary):
    """As a table of rich."""


def _contents(
    chunk: Any, model: ModelConfig, parallel: ParallelConfig
) -> tuple[dict[str, tuple[str, bool]], dict[str, tuple[int, int, int]]]:
    """By the names of the whole model: each module's class and whether it trains; and the numbers of each weight.

    These are how many there are over tp or ep, without rows that pad the vocabulary and copies of a tied embedding, how
    many of them are trained, and how many this rank has.
    """

    def renumbered(name: str) -> str:
        """With the number that a layer has in the whole model."""
        return re.sub(
            r"(?<=\blayers\.)\d+",
            lambda found: str(getattr(chunk.get_submodule(name[: found.end()]), "layer_number", int(found[0]) + 1) - 1),
            name,
            count=1,
        )

    kinds = {renumbered(name): (type(each).__name__, each.training) for name, each in chunk.named_modules() if name}
    weights: dict[str, tuple[int, int, int]] = {}
    for name, weight in chunk.named_parameters():
        is_split, is_expert = getattr(weight, "tensor_model_parallel", False), not getattr(weight, "allreduce", True)
        whole = weight.numel() * (parallel.ep if is_expert else parallel.tp if is_split else 1)
        if is_split and re.search(r"(word_embeddings|output_layer)\.(weight|bias)$", name):
            whole = whole // model.padded_vocab_size(parallel.tp) * model.vocab_size
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            whole = 0
        weights[renumbered(name)] = whole, whole * weight.requires_grad, weight.numel()
    return kinds, weights


def _joined(chunks: Sequence[Any], index: int) -> dict[str, Any]:
    return {name: of for chunk in chunks for name, of in chunk[index].items()}


def _within(module: str, weights: Mapping[str, Any], index: int) -> int:
    return sum(of[index] for name, of in weights.items() if not module or name.startswith(f"{module}."))
