"""Shards of a live model's weights, loading them from any ``Source``, and gathering them to Hugging Face tensors.

Every conversion passes through a live model: each format has a ``Source``, whose tensors ``WeightLoader`` copies into
the shards, and a save function that reads the shards. *Full tensor* means the shards of all ranks put together without
vocabulary padding, under Megatron-Core's name.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from lightning_megatron.convert.family import VOCABULARY
from lightning_megatron.convert.registry import rules_of
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.adapter_names import is_adapter
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Supported dtypes of stored weights."""
_MAX_NAMED = 20
_MIN_BAR_BYTES = 10**9
"""Smaller models load and save too fast for a progress bar to be of use."""
TIMEOUT = timedelta(minutes=30)
"""Of collectives in which ranks wait while another one reads or writes files."""
_LAYER_NUMBER = re.compile(r"(.*?\blayers)\.(\d{1,9})\.(.+)")
NO_WEIGHTS = re.compile(
    r"_extra_state|(^|\.)(rng_state|inv_freq|masked_bias|position_ids|(attn|attention)\.bias)(\.|$|/)"
)
"""Entries of a checkpoint that are no weights: fp8 scales, random number generator states and recomputed buffers."""
_STACKS = ("", "encoder", "decoder")
EXPERTS = ".experts.experts."
"""Part of the name of a tensor that stacks one matrix per expert."""


class Key(NamedTuple):
    """Identifies one tensor of a model."""

    name: str
    """``Rule.megatron``: the name without layer index, e.g. ``decoder.layers.mlp.linear_fc1.weight``."""
    layer: int | None = None
    """Global layer index in its stack, from 0, over all pipeline stages; None for tensors outside layers."""
    expert: int | None = None
    """Index of the expert in its layer, from 0; None for tensors that belong to no expert."""

    def __str__(self) -> str:
        """Name with layer and expert index, for messages."""
        name = (
            self.name
            if self.layer is None
            else self.name.replace(".layers.", f".layers.{self.layer}.", 1)
        )
        return name if self.expert is None else name.replace(EXPERTS, f".experts.{self.expert}.", 1)


def parse_key(name: str) -> Key:
    """Split the layer index off a name such as ``decoder.layers.3.mlp.linear_fc1.weight``."""
    parts = _LAYER_NUMBER.fullmatch(name)
    return Key(f"{parts[1]}.{parts[3]}", int(parts[2])) if parts else Key(name)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Region of a full tensor that a shard covers; metadata only, exchanged between ranks."""

    key: Key
    shape: tuple[int, ...]
    """Of the full tensor, without vocabulary padding."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the shard, padding included."""
    dtype: torch.dtype

    @property
    def unpadded(self) -> Region:
        """The region without vocabulary padding."""
        rows = max(0, min(self.size[0], self.shape[0] - self.offset[0]))
        return replace(self, size=(rows, *self.size[1:]))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the region in the full tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """Shard of a tensor on this rank."""

    region: Region
    data: torch.Tensor
    """Shares the parameter's memory."""
    is_main_replica: bool
    """Whether this is the first of the replicas of the shard on all ranks and chunks (``replica_id`` 0)."""


def shards_of(chunks: Iterable[Any], model: ModelConfig) -> list[Shard]:
    """This rank's shards of all weights that have a ``Rule``, in the order of ``sorted_keys`` and of their rows.

    Args:
        chunks: This rank's model chunks, wrapped or not.
        model: Config that the chunks were built from.
    """
    names = {
        rule.megatron for rule in rules_of(model)
    }  # excludes the expert bias, which the engine initializes
    candidates = (_shard(part, model) for _, parts in _sharded_parameters(chunks) for part in parts)
    shards = [shard for shard in candidates if shard.region.key.name in names]
    index = {
        key: i for i, key in enumerate(sorted_keys({shard.region.key for shard in shards}, model))
    }
    return sorted(shards, key=lambda shard: (index[shard.region.key], shard.region.offset))


def named_shards(chunks: Iterable[Any]) -> Iterator[tuple[Key, torch.Tensor]]:
    """This rank's shards of all tensors of a checkpoint with their keys, also of those without a ``Rule``."""
    for _, parts in _sharded_parameters(chunks):
        for part in parts:
            if part.data is not None:
                yield _key(part), part.data.detach()


def _sharded_parameters(
    chunks: Iterable[Any],
) -> Iterator[tuple[torch.Tensor, list[ShardedTensor]]]:
    """Each parameter with its sharded tensors in checkpoints: one, or two for a gated linear layer."""
    # Imported here, as reading headers needs no engine, whose import takes seconds.
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from lightning_megatron.engine.wrap import unwrap

    for chunk in chunks:
        for tensor in nested_values(unwrap(chunk).sharded_state_dict()):
            if isinstance(tensor, ShardedTensorFactory):
                yield tensor.data, list(nested_values({"": tensor.build()}))
            elif isinstance(tensor, ShardedTensor):
                yield tensor.data, [tensor]


def _key(tensor: ShardedTensor) -> Key:
    stacked = [int(index) for index in tensor.global_offset[: tensor.prepend_axis_num]]
    key = parse_key(tensor.key)
    return Key(key.name, *(() if key.layer is None else (key.layer,)), *stacked)


def _shard(tensor: ShardedTensor, model: ModelConfig) -> Shard:
    axes, key = tensor.prepend_axis_num, _key(tensor)
    shape = tuple(tensor.global_shape)[axes:]
    region = Region(
        key=key,
        shape=(model.vocab_size, *shape[1:]) if key.name in VOCABULARY else shape,
        offset=tuple(tensor.global_offset)[axes:],
        size=tuple(tensor.local_shape),
        dtype=tensor.dtype,
    )
    replica = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id,)
    return Shard(region=region, data=tensor.data.detach(), is_main_replica=not any(replica))


def _host_group() -> Any:
    from lightning_megatron.engine.groups import host_group  # the engine's import takes seconds

    return host_group(TIMEOUT)


def _all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_host_group())
    return values


def sorted_keys(keys: Iterable[Key], model: ModelConfig) -> list[Key]:
    """Sort keys: tensors outside layers first, then each stack (T5's encoder before its decoder) layer by layer."""
    index = {rule.megatron: i for i, rule in enumerate(rules_of(model))}

    def order(key: Key) -> tuple[int, int, int, int]:
        stack = key.name.split(".")[0] if key.layer is not None else ""
        return _STACKS.index(stack), key.layer or 0, key.expert or 0, index[key.name]

    return sorted(keys, key=order)


# ---- loading --------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """Shape and dtype of one full tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    location: Any = None
    """Where the values are stored, in terms of the format."""

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Source(ABC):
    """Checkpoint of one format: opened by its headers, then described as a model, matched with it and read.

    Args:
        path: Directory or file of the checkpoint; only headers are read.

    Raises:
        CheckpointError: If the checkpoint is damaged, unfinished or unsafe.
    """

    kind: str
    """Name of the format, for messages, e.g. ``Hugging Face model directory``."""
    stored: Mapping[str, Stored]
    """All tensors of the checkpoint, by their names in the format."""
    metadata: Mapping[str, Any]
    """Everything else that the checkpoint records, as plain data for ``inspect``."""
    model: ModelConfig
    """Config of the model; set by ``describe``."""
    hf_config: Any
    """Hugging Face config object of ``model``; set by ``describe``."""
    iteration: int = 0
    """Optimizer steps done when the checkpoint was written; 0 if unknown."""
    companions: Path | None = None
    """Directory with the tokenizer and generation config of the model."""
    base: str | None = None
    """Name or directory of the base model of the adapters, if known."""
    frozen: Source | None = None
    """Source of the base weights of a checkpoint that holds adapters only; opened by ``describe_with_base``."""
    has_base_weights: bool = True
    """Whether the checkpoint holds weights other than adapters."""
    has_adapters: bool = True
    """Whether the format stores adapters, if the model has any."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def describe(self, config: Path | None) -> None:
        """Set ``model`` and ``hf_config``.

        Args:
            config: Hugging Face ``config.json``, or a directory with one; None: use what the checkpoint records.

        Raises:
            CheckpointError: If the checkpoint does not record its model, or no known family computes it.
            ConfigError: If the config is unsupported, or would have no effect.
        """

    def holds(self, key: Key) -> bool:
        """Whether the tensor belongs in this checkpoint; ``match`` is called with such keys only."""
        return self.has_adapters if is_adapter(key.name) else self.has_base_weights

    @abstractmethod
    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> Mapping[Key, torch.dtype]:
        """Find the tensors of the model in the checkpoint; does not communicate.

        Args:
            expected: Full shapes of the model's tensors.

        Returns:
            Stored dtype of each tensor found; those of a head may be absent.

        Raises:
            CheckpointError: Listing all tensors that are missing, unexpected, or of another shape or an unsupported
                dtype.
        """

    @abstractmethod
    def read(self, region: Region) -> torch.Tensor:
        """Values of an unpadded region; may be a view of the mapped file, so copy before keeping it."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources that together hold all tensors of the model: the base weights first, if they are separate."""
        return (self,) if self.frozen is None else (self.frozen, self)

    @property
    def weights(self) -> dict[str, Stored]:
        """``stored`` without optimizer state."""
        return {
            name: tensor for name, tensor in self.stored.items() if ".optimizer." not in f".{name}"
        }

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the largest weight."""
        weights = self.sources[0].weights.values()
        return max(
            weights, key=lambda tensor: tensor.num_bytes, default=Stored((), torch.float32)
        ).dtype

    def check(self, found: Mapping[Any, Stored], expected: Mapping[Any, tuple[int, ...]]) -> None:
        """Compare the tensors found with those of the model.

        Args:
            found: Tensors of the checkpoint, by name or key; Megatron's vocabulary tensors may have padding.
            expected: Full shapes of the model's tensors, by the same names or keys.

        Raises:
            CheckpointError: Listing all mismatches.
        """
        problems = [f"'{name}' is missing" for name in expected if name not in found]
        for name, (shape, dtype, _) in found.items():
            full = expected.get(name)
            if full is None:
                problems.append(f"'{name}' is not part of the model")
            elif shape != full and not (
                str(name) in VOCABULARY and shape > full and shape[1:] == full[1:]
            ):
                problems.append(f"'{name}' has the shape {list(shape)}, not {list(full)}")
            elif dtype not in _FLOATS:
                problems.append(
                    f"'{name}' is {str(dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
                )
        self.raise_mismatches(problems)

    def raise_mismatches(self, problems: Sequence[str]) -> None:
        """Raise if ``problems`` is not empty.

        Raises:
            CheckpointError: Listing the first ``_MAX_NAMED`` problems.
        """
        if problems:
            more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise CheckpointError(
                f"the weights in {self.path} are not those of this {self.model.family} model ({self.model.task}), "
                f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {'; '.join(problems[:_MAX_NAMED])}{more}"
                ". Use the config that belongs to the weights, and all of their files, unquantized"
            )


class WeightLoader:
    """Load weights from a checkpoint into a live model. Constructor and methods are collective over the world.

    Args:
        chunks: This rank's model chunks, built from ``source.model``.
        source: A checkpoint of any format, opened on every rank.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or is not of this model.
    """

    def __init__(self, chunks: Iterable[Any], source: Source) -> None:
        from lightning_megatron.engine.collectives import (
            call_on_all_ranks,
        )  # the engine's import takes seconds

        self._chunks, self._model = list(chunks), source.model
        shapes: dict[Key, tuple[int, ...]] = {}
        for part in _all_gather(
            {s.region.key: s.region.shape for s in shards_of(self._chunks, source.model)}
        ):
            shapes |= part
        keys = sorted_keys(shapes, source.model)

        def match() -> dict[Key, tuple[Source, torch.dtype]]:
            matches = (
                (part, part.match({k: shapes[k] for k in keys if part.holds(k)}))
                for part in source.sources
            )
            return {key: (part, dtype) for part, dtypes in matches for key, dtype in dtypes.items()}

        self._found = call_on_all_ranks(match)  # the first rank compares tied tensors
        self.missing = frozenset(shapes) - frozenset(self._found)
        """Tensors of the model that ``source`` lacks (those of a head, or adapters); ``fill`` leaves them unchanged."""

    @torch.no_grad()
    def fill(self, *, as_stored: bool = False, dtype: torch.dtype | None = None) -> None:
        """Copy the checkpoint's values into this rank's weights; vocabulary padding becomes zero.

        Args:
            as_stored: Convert each weight to its stored dtype; False: keep the dtypes of the chunks.
            dtype: With ``as_stored``: convert each weight to this dtype instead.

        Raises:
            CheckpointError: On every rank, if a file is damaged or a finite value overflows ``dtype``.
        """
        from lightning_megatron.engine.collectives import call_on_all_ranks

        if as_stored:
            for key, tensor in self.filled():
                tensor.data = torch.empty_like(tensor, dtype=dtype or self._found[key][1])
        shards = [
            shard
            for shard in shards_of(self._chunks, self._model)
            if shard.region.key in self._found
        ]
        with progress_bar("loading weights", sum(shard.data.nbytes for shard in shards)) as bar:

            def fill_all() -> None:
                for shard in shards:
                    region = shard.region.unpadded
                    values, target = (
                        self._found[region.key][0].read(region),
                        shard.data[: region.size[0]],
                    )
                    shard.data[region.size[0] :] = 0
                    target.copy_(values)
                    if dtype is not None:
                        check_overflow(region.key, values, target)
                    bar.update(shard.data.nbytes)

            call_on_all_ranks(fill_all)

    def filled(self) -> list[tuple[Key, torch.Tensor]]:
        """This rank's parameters that ``fill`` writes, each after the key of its (first) tensor in the checkpoint."""
        keyed = [(_key(parts[0]), tensor) for tensor, parts in _sharded_parameters(self._chunks)]
        return [(key, tensor) for key, tensor in keyed if key in self._found]


def check_overflow(name: object, values: torch.Tensor, rounded: torch.Tensor) -> None:
    """Raise if a finite value of ``values`` is infinite in ``rounded``."""
    # Counting costs several times as much as rounding, and hardly any weight has infinite values.
    if rounded.isinf().any() and rounded.isinf().sum() > values.isinf().sum():
        raise CheckpointError(
            f"{name}: expected values up to {torch.finfo(rounded.dtype).max:.4g} ({str(rounded.dtype)[6:]}), got "
            f"{values[values.isfinite()].abs().max().item():.4g}; keep the dtype, or use bf16 or fp32"
        )


def progress_bar(what: str, total_bytes: int) -> tqdm[Any]:
    """Progress bar on rank 0, shown for large models only and only if standard error is a terminal."""
    hidden = dist.get_rank() != 0 or total_bytes < _MIN_BAR_BYTES
    # disable=None hides the bar unless standard error is a terminal.
    return tqdm(
        desc=what, total=total_bytes, unit="B", unit_scale=True, disable=True if hidden else None
    )


# ---- saving ---------------------------------------------------------------------------------------------------------


class WeightGatherer:
    """Gather the Hugging Face tensors of a sharded model to rank 0, one at a time.

    Collective over the world: every rank must construct one and iterate over ``tensors``.

    Args:
        chunks: This rank's model chunks. The values of ``parameter.data`` are gathered, which may be gradients.
        model: Config that the chunks were built from.
        include: Selects tensors by key; all by default.
    """

    def __init__(
        self,
        chunks: Iterable[Any],
        model: ModelConfig,
        include: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        self._group = _host_group()
        self._rules = {rule.megatron: rule for rule in rules_of(model)}
        self._shards = [
            s for s in shards_of(chunks, model) if s.is_main_replica and include(s.region.key)
        ]
        found: dict[Key, dict[tuple[int, ...], tuple[int, int, Region]]] = {}
        for rank, regions in enumerate(_all_gather([shard.region for shard in self._shards])):
            for index, region in enumerate(regions):
                found.setdefault(region.key, {}).setdefault(region.offset, (rank, index, region))
        self._parts = {key: list(found[key].values()) for key in sorted_keys(found, model)}

    def contents(self) -> dict[str, Stored]:
        """Shape and dtype of each Hugging Face tensor, in the order of ``tensors``."""
        contents: dict[str, Stored] = {}
        for key, parts in self._parts.items():
            region = parts[0][2]
            tensors = self._rules[key.name].tensors(region.shape, key.layer, key.expert)
            contents |= {name: Stored(shape, region.dtype) for name, shape in tensors.items()}
        return contents

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield name and values of each Hugging Face tensor: CPU tensors of the parameters' dtype on rank 0, else None.

        A tensor may share memory with a parameter.
        """
        for key in self._parts:
            rule, tensor = self._rules[key.name], self._gather(key)
            names = rule.names(*key[1:])
            if tensor is None:
                yield from ((name, None) for name in names if name)
                continue
            rows = tensor if rule.order is None else tensor[torch.argsort(rule.order)]
            for name, part in zip(names, rows.split(rule.rows or len(rows)), strict=True):
                if name:
                    yield name, (part.t() if rule.transposed else part).contiguous()

    def _gather(self, key: Key) -> torch.Tensor | None:
        """Gather one of Megatron's tensors, without padding, to rank 0; None on other ranks."""
        parts, shape = self._parts[key], self._parts[key][0][2].shape
        if dist.get_rank() != 0:
            for rank, index, _ in parts:
                if rank == dist.get_rank():
                    # As bytes, since gloo does not send every dtype.
                    data = self._shards[index].data.cpu().contiguous().view(-1).view(torch.uint8)
                    dist.send(data, 0, group=self._group)
            return None
        if len(parts) == 1:
            return self._receive(*parts[0])[: shape[0]]
        tensor = torch.empty(shape, dtype=parts[0][2].dtype)
        for rank, index, region in parts:
            tensor[region.unpadded.slices] = self._receive(rank, index, region)[
                : region.unpadded.size[0]
            ]
        return tensor

    def _receive(self, rank: int, index: int, region: Region) -> torch.Tensor:
        if rank == 0:
            return self._shards[index].data.cpu()
        buffer = torch.empty(math.prod(region.size) * region.dtype.itemsize, dtype=torch.uint8)
        dist.recv(buffer, rank, group=self._group)
        return buffer.view(region.dtype).view(region.size)
