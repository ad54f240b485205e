"""Lightning's model summaries for a sharded model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count
from typing_extensions import override

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.weight_names import global_name
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.lora import Adapter
from lightning_megatron.planning.flops import forward_flops


def whole_summaries(callbacks: Sequence[Callback]) -> list[Callback]:
    """Replacements for Lightning's model summaries among ``callbacks`` that show the whole model.

    Lightning's own show the shard of one stage that this rank holds.
    """
    kinds: dict[type, type[WholeModelSummary]] = {
        ModelSummary: WholeModelSummary,
        RichModelSummary: WholeRichModelSummary,
    }
    whole: list[Callback] = []
    for callback in callbacks:
        kind = kinds.get(type(callback))
        if kind is not None:
            summary: Any = callback
            whole.append(kind(summary._max_depth, **summary._summarize_kwargs))
    return whole


class WholeModelSummary(ModelSummary):
    """Text summary of the whole model, gathered over pipeline stages."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather module and parameter counts over the pipeline group, and print them on rank 0."""
        if not self._max_depth:
            return
        module: Any = pl_module
        strategy = module.megatron
        topology = strategy.topology
        model = module.model_config
        chunks = [unwrap(chunk) for chunk in strategy.chunks]
        own = [_describe_chunk(chunk, model, topology.parallel) for chunk in chunks]
        stages = gather_objects(own, topology.pp_group)
        if not trainer.is_global_zero:
            return
        in_pipeline_order = list(chain(*zip(*stages, strict=True)))
        kinds = _merge(in_pipeline_order, 0)
        weights = _merge(in_pipeline_order, 1)
        local = _merge(own, 1)
        names = list(kinds)
        if self._max_depth > 0:
            names = [name for name in names if name.count(".") < self._max_depth]
        modes = [is_training for _, is_training in kinds.values()]
        total = _sum_within("", weights, 0)
        bytes_per_weight = strategy.settings.params_dtype.itemsize
        self.summarize(
            _columns(names, kinds, weights, local),
            total_parameters=total,
            trainable_parameters=_sum_within("", weights, 1),
            model_size=total * bytes_per_weight * 1e-6,
            total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
            total_flops=_flops_per_token(model, topology.parallel),
            **self._summarize_kwargs,
        )


class WholeRichModelSummary(WholeModelSummary, RichModelSummary):
    """The same as a table of rich."""


def _describe_chunk(
    chunk: Any,
    model: ModelConfig,
    parallel: ParallelConfig,
) -> tuple[dict[str, tuple[str, bool]], dict[str, tuple[int, int, int]]]:
    """Class and training mode of each module, and element counts of each weight, by names in the whole model.

    The counts are: all elements over tp or ep, without vocabulary padding, copies of a tied embedding, and rows of
    adapters that stay zero; those of them that are trained; those on this rank.
    """
    kinds = {
        global_name(name, chunk): (type(part).__name__, part.training)
        for name, part in chunk.named_modules()
        if name
    }
    unused = {
        f"{name}.B": part.num_unused
        for name, part in chunk.named_modules()
        if isinstance(part, Adapter)
    }
    weights: dict[str, tuple[int, int, int]] = {}
    for name, weight in chunk.named_parameters():
        is_split = getattr(weight, "tensor_model_parallel", False)
        is_expert = not getattr(weight, "allreduce", True)
        total = weight.numel() - unused.get(name, 0)
        if is_expert:
            total *= parallel.ep
        elif is_split:
            total *= parallel.tp
        if is_split and re.search(r"(word_embeddings|output_layer)\.(weight|bias)$", name):
            total = total // model.padded_vocab_size(parallel.tp) * model.vocab_size
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            total = 0
        counts = (total, total * weight.requires_grad, weight.numel())
        weights[global_name(name, chunk)] = counts
    return kinds, weights


def _columns(
    names: Sequence[str],
    kinds: Mapping[str, tuple[str, bool]],
    weights: Mapping[str, Any],
    local: Mapping[str, Any],
) -> list[tuple[str, list[str]]]:
    """Columns of the table, one row per module."""
    count = get_human_readable_count
    return [
        (" ", [str(index) for index in range(len(names))]),
        ("Name", list(names)),
        ("Type", [kinds[name][0] for name in names]),
        ("Params", [count(_sum_within(name, weights, 0)) for name in names]),
        ("Params per Device", [count(_sum_within(name, local, 2)) for name in names]),
        ("Mode", ["train" if kinds[name][1] else "eval" for name in names]),
    ]


def _flops_per_token(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Of a row of maximum length (512 tokens for a T5), attention included."""
    lengths: tuple[int, ...] = (model.max_position_embeddings,)
    if model.architecture == "t5":
        lengths = (512, 512)
    padded = model.padded_vocab_size(parallel.tp)
    return int(forward_flops(model, lengths, padded) / sum(lengths))


def _merge(chunks: Sequence[Any], index: int) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for chunk in chunks:
        merged |= chunk[index]
    return merged


def _sum_within(
    module: str,
    weights: Mapping[str, Any],
    index: int,
) -> int:
    """Sum of a count over the weights of a module; "" is the whole model."""
    prefix = f"{module}."
    total = 0
    for name, counts in weights.items():
        if not module or name.startswith(prefix):
            total += counts[index]
    return total
