"""The live model in the middle of every conversion: its weights as shards of whole, named tensors.

Every file format is one loader, which fills these shards, and one saver, which reads them. A tensor is whole here when
its parts on all ranks are put together without the rows that pad the vocabulary; its name is Megatron-Core's.
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
from lightning_megatron.engine.adapter_names import is_adapter
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What weights may be stored in."""
_MAX_NAMED = 20
_MIN_BAR_BYTES = 10**9
"""Smaller models are there before anyone would look at a progress bar."""
TIMEOUT = timedelta(minutes=30)
"""For ranks that wait while another one reads or writes."""
_LAYER_NUMBER = re.compile(r"(.*?\blayers)\.(\d{1,9})\.(.+)")
NO_WEIGHTS = re.compile(
    r"_extra_state|(^|\.)(rng_state|inv_freq|masked_bias|position_ids|(attn|attention)\.bias)(\.|$|/)"
)
"""Entries of files without a weight: the scales of fp8, random states, and tables that are computed anew."""
_STACKS = ("", "encoder", "decoder")
EXPERTS = ".experts.experts."
"""In the names of tensors with one matrix for each expert."""


class Key(NamedTuple):
    """One tensor of a model."""

    name: str
    """As a rule's ``megatron``, without the layer's number: ``decoder.layers.mlp.linear_fc1.weight``."""
    layer: int | None = None
    """Number of the layer in its stack, from 0, over all pipeline stages; None for tensors of no layer."""
    expert: int | None = None
    """Number of the expert in its layer, from 0; None for tensors of none."""

    def __str__(self) -> str:
        """With the numbers, for messages."""
        name = self.name if self.layer is None else self.name.replace(".layers.", f".layers.{self.layer}.", 1)
        return name if self.expert is None else name.replace(EXPERTS, f".experts.{self.expert}.", 1)


def parse_key(name: str) -> Key:
    """The key of a name in which the layer's number stands: ``decoder.layers.3.mlp.linear_fc1.weight``."""
    parts = _LAYER_NUMBER.fullmatch(name)
    return Key(f"{parts[1]}.{parts[3]}", int(parts[2])) if parts else Key(name)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a shard stands in its tensor; small, and sent between ranks."""

    key: Key
    shape: tuple[int, ...]
    """Of the whole tensor, without the rows that pad the vocabulary."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Of the shard, padding included."""
    dtype: torch.dtype

    @property
    def unpadded(self) -> Region:
        """Without the rows that pad the vocabulary."""
        rows = max(0, min(self.size[0], self.shape[0] - self.offset[0]))
        return replace(self, size=(rows, *self.size[1:]))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """A shard of this rank."""

    region: Region
    data: torch.Tensor
    """The parameter's own memory."""
    is_main_replica: bool
    """Whether no other rank (or chunk) comes before this one with the same part."""


def shards_of(chunks: Iterable[Any], model: ModelConfig) -> list[Shard]:
    """This rank's shards of weights that Hugging Face has names for, in the order of ``sorted_keys`` and of their rows.

    Args:
        chunks: This rank's model chunks, wrapped or not.
        model: The description that the chunks were built from.
    """
    named = {rule.megatron for rule in rules_of(model)}  # not so the bias of experts, which the engine begins with
    found = (_shard(part, model) for _, parts in _sharded_parameters(chunks) for part in parts)
    shards = [each for each in found if each.region.key.name in named]
    number = {key: i for i, key in enumerate(sorted_keys({each.region.key for each in shards}, model))}
    return sorted(shards, key=lambda each: (number[each.region.key], each.region.offset))


def _sharded_parameters(chunks: Iterable[Any]) -> Iterator[tuple[torch.Tensor, list[ShardedTensor]]]:
    """Each parameter, with the one or several parts (a gated layer has two) that it is in checkpoints."""
    # Not above: whoever only looks at files needs no engine, whose import takes seconds.
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


def _all_gather(mine: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine, group=_host_group())
    return parts


def sorted_keys(keys: Iterable[Key], model: ModelConfig) -> list[Key]:
    """Tensors of no layer first, then each stack (T5's encoder before its decoder) layer after layer."""
    number = {rule.megatron: i for i, rule in enumerate(rules_of(model))}

    def order(key: Key) -> tuple[int, int, int, int]:
        stack = key.name.split(".")[0] if key.layer is not None else ""
        return _STACKS.index(stack), key.layer or 0, key.expert or 0, number[key.name]

    return sorted(keys, key=order)


# ---- loading --------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """One tensor of a checkpoint, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    location: Any = None
    """Where its numbers are, if the format says it for each tensor."""

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class Source(ABC):
    """A checkpoint of some format: by its headers, and when it is described, as a model.

    Args:
        path: Its folder or file. Nothing but names and sizes is read.

    Raises:
        CheckpointError: If it is damaged, unfinished or unsafe.
    """

    kind: str
    """Its format, for messages: ``Hugging Face model directory``."""
    stored: Mapping[str, Stored]
    """Its tensors, under names of the format."""
    metadata: Mapping[str, Any]
    """What else it says of itself: plain data by name."""
    model: ModelConfig
    """What it is a checkpoint of; set by ``describe``."""
    hf_config: Any
    """The Hugging Face config object of ``model``; likewise."""
    iteration: int = 0
    """Optimizer steps done when it was written; 0 if it does not say."""
    companions: Path | None = None
    """Folder with the tokenizer and the generation config that belong to it."""
    base: str | None = None
    """Name or folder of the model that its adapters were trained beside, if it is known."""
    frozen: Source | None = None
    """Of adapters alone: the weights that they were trained beside, which are opened when they are described."""
    has_base_weights: bool = True
    """Whether there is more than adapters."""
    has_adapters: bool = True
    """Whether checkpoints of this format hold adapters, of models that have some."""

    @abstractmethod
    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def describe(self, config: Path | None) -> None:
        """Find out which model it is of.

        Args:
            config: A Hugging Face ``config.json``, or a folder with one; None: as the checkpoint says.

        Raises:
            CheckpointError: If it does not say it, or computes what no known family does.
            ConfigError: If the config cannot be honoured, or would do nothing.
        """

    def holds(self, key: Key) -> bool:
        """Whether such a tensor is looked for here; ``match`` is not asked for others."""
        return self.has_adapters if is_adapter(key.name) else self.has_base_weights

    @abstractmethod
    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> Mapping[Key, torch.dtype]:
        """Find the tensors of the model, whose whole shapes are ``expected``; does not communicate.

        Returns:
            What each of those that are there is stored in; a head may be absent.

        Raises:
            CheckpointError: With all that is missing, foreign, or of another shape or kind.
        """

    @abstractmethod
    def read(self, region: Region) -> torch.Tensor:
        """The part of a tensor at ``region``, which has no padding; not to be kept, it may be the file's own memory."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources that hold the model's tensors."""
        return (self,) if self.frozen is None else (self.frozen, self)

    @property
    def weights(self) -> dict[str, Stored]:
        """What of ``stored`` is no optimizer state."""
        return {name: each for name, each in self.stored.items() if ".optimizer." not in f".{name}"}

    @property
    def dtype(self) -> torch.dtype:
        """Of the largest weight."""
        weights = self.sources[0].weights.values()
        return max(weights, key=lambda each: each.num_bytes, default=Stored((), torch.float32)).dtype

    def check(self, found: Mapping[Any, Stored], expected: Mapping[Any, tuple[int, ...]]) -> None:
        """Raise if its tensors are not those of the model.

        Args:
            found: Each by its name or key; only a vocabulary of Megatron's may be larger, by its padding.
            expected: Whole shapes of the model's tensors.

        Raises:
            CheckpointError: That names what is wrong.
        """
        problems = [f"'{name}' is missing" for name in expected if name not in found]
        for name, (shape, dtype, _) in found.items():
            wanted = expected.get(name)
            if wanted is None:
                problems.append(f"'{name}' is not part of the model")
            elif shape != wanted and not (str(name) in VOCABULARY and shape > wanted and shape[1:] == wanted[1:]):
                problems.append(f"'{name}' has the shape {list(shape)}, not {list(wanted)}")
            elif dtype not in _FLOATS:
                problems.append(f"'{name}' is {str(dtype).removeprefix('torch.')}, not float32, float16 or bfloat16")
        self.raise_mismatches(problems)

    def raise_mismatches(self, problems: Sequence[str]) -> None:
        """Raise if there are problems with its tensors.

        Raises:
            CheckpointError: That names them.
        """
        if problems:
            more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            raise CheckpointError(
                f"the weights in {self.path} are not those of this {self.model.family} model ({self.model.task}), "
                f"{len(problems)} problem{'s' if len(problems) > 1 else ''}: {'; '.join(problems[:_MAX_NAMED])}{more}"
                ". Use the config that belongs to the weights, and all of their files, unquantized"
            )


class WeightLoader:
    """The tensors of a model, found in a checkpoint. Every rank must make one, and call the same methods.

    Args:
        chunks: This rank's model chunks, built from ``source.model``.
        source: A checkpoint of any format, opened on every rank.

    Raises:
        CheckpointError: If it is damaged, or not of this model: on all ranks alike.
    """

    def __init__(self, chunks: Iterable[Any], source: Source) -> None:
        from lightning_megatron.engine.collectives import call_on_all_ranks  # the engine's import takes seconds

        self._chunks, self._model = list(chunks), source.model
        shapes: dict[Key, tuple[int, ...]] = {}
        regions = (shard.region for shard in shards_of(self._chunks, source.model))
        for part in _all_gather({region.key: region.shape for region in regions}):
            shapes |= part
        keys = sorted_keys(shapes, source.model)

        def match() -> dict[Key, tuple[Source, torch.dtype]]:
            matches = ((each, each.match({k: shapes[k] for k in keys if each.holds(k)})) for each in source.sources)
            return {key: (each, dtype) for each, dtypes in matches for key, dtype in dtypes.items()}

        self._found = call_on_all_ranks(match)  # the first rank looks at what is tied
        self.missing = frozenset(shapes) - frozenset(self._found)
        """What ``source`` does not hold, and the tensors of a head that it lacks; their weights stay as they are."""

    @torch.no_grad()
    def fill(self, *, as_stored: bool = False, dtype: torch.dtype | None = None) -> None:
        """Write this rank's weights; rows that pad the vocabulary become zero.

        Args:
            as_stored: Give each weight the dtype that it is stored in; else it is rounded to that of the chunks.
            dtype: With ``as_stored``: give each weight this dtype instead.

        Raises:
            CheckpointError: If a file is damaged, or a finite number would be infinite in ``dtype``; on all ranks
                alike.
        """
        from lightning_megatron.engine.collectives import call_on_all_ranks

        if as_stored:
            for tensor, parts in _sharded_parameters(self._chunks):
                if (key := _key(parts[0])) in self._found:
                    tensor.data = torch.empty_like(tensor, dtype=dtype or self._found[key][1])
        shards = [shard for shard in shards_of(self._chunks, self._model) if shard.region.key in self._found]
        with progress_bar("loading weights", sum(shard.data.nbytes for shard in shards)) as bar:

            def fill_all() -> None:
                for shard in shards:
                    region = shard.region.unpadded
                    part, ours = self._found[region.key][0].read(region), shard.data[: region.size[0]]
                    shard.data[region.size[0] :] = 0
                    ours.copy_(part)
                    if dtype is not None:
                        check_overflow(region.key, part, ours)
                    bar.update(shard.data.nbytes)

            call_on_all_ranks(fill_all)


def check_overflow(name: object, given: torch.Tensor, rounded: torch.Tensor) -> None:
    """Raise if a finite number of ``given`` has become infinite in the dtype of ``rounded``."""
    # Counting costs several times what rounding does, and hardly a weight has anything to count.
    if rounded.isinf().any() and rounded.isinf().sum() > given.isinf().sum():
        raise CheckpointError(
            f"{name}: expected numbers up to {torch.finfo(rounded.dtype).max:.4g} ({str(rounded.dtype)[6:]}), got "
            f"{given[given.isfinite()].abs().max().item():.4g}; keep the dtype, or use bf16 or fp32"
        )


def progress_bar(what: str, total_bytes: int) -> tqdm[Any]:
    """A bar on rank 0, for models that take a while, in a terminal."""
    hidden = dist.get_rank() != 0 or total_bytes < _MIN_BAR_BYTES
    # None: shown only if standard error is a terminal.
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=True if hidden else None)


# ---- saving ---------------------------------------------------------------------------------------------------------


class WeightGatherer:
    """The Hugging Face tensors of a model that is split over ranks, put together on rank 0 one after the other.

    Every rank must make one and iterate over ``tensors``.

    Args:
        chunks: This rank's model chunks. Whatever the parameters' ``data`` holds is taken, gradients for example.
        model: The description that they were built from.
        include: Which tensors; all by default.
    """

    def __init__(
        self, chunks: Iterable[Any], model: ModelConfig, include: Callable[[Key], bool] = lambda key: True
    ) -> None:
        self._group = _host_group()
        self._rules = {rule.megatron: rule for rule in rules_of(model)}
        self._mine = [each for each in shards_of(chunks, model) if each.is_main_replica and include(each.region.key)]
        found: dict[Key, dict[tuple[int, ...], tuple[int, int, Region]]] = {}
        for rank, regions in enumerate(_all_gather([each.region for each in self._mine])):
            for number, region in enumerate(regions):
                found.setdefault(region.key, {}).setdefault(region.offset, (rank, number, region))
        self._parts = {key: list(found[key].values()) for key in sorted_keys(found, model)}

    def contents(self) -> dict[str, Stored]:
        """Each Hugging Face tensor, in the order of ``tensors``."""
        contents: dict[str, Stored] = {}
        for key, parts in self._parts.items():
            region = parts[0][2]
            tensors = self._rules[key.name].tensors(region.shape, key.layer, key.expert)
            contents |= {name: Stored(shape, region.dtype) for name, shape in tensors.items()}
        return contents

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each Hugging Face tensor, on rank 0 on the CPU and in the parameters' dtype; None elsewhere.

        It may share the memory of a parameter.
        """
        for key in self._parts:
            rule, whole = self._rules[key.name], self._gather(key)
            names = rule.names(*key[1:])
            if whole is None:
                yield from ((name, None) for name in names if name)
                continue
            rows = whole if rule.order is None else whole[torch.argsort(rule.order)]
            for name, part in zip(names, rows.split(rule.rows or len(rows)), strict=True):
                if name:
                    yield name, (part.t() if rule.transposed else part).contiguous()

    def _gather(self, key: Key) -> torch.Tensor | None:
        """One of Megatron's tensors, on rank 0."""
        parts, shape = self._parts[key], self._parts[key][0][2].shape
        if dist.get_rank() != 0:
            for rank, number, _ in parts:
                if rank == dist.get_rank():
                    # As bytes, since gloo does not send every dtype.
                    data = self._mine[number].data.cpu().contiguous().view(-1).view(torch.uint8)
                    dist.send(data, 0, group=self._group)
            return None
        if len(parts) == 1:
            return self._receive(*parts[0])[: shape[0]]
        whole = torch.empty(shape, dtype=parts[0][2].dtype)
        for rank, number, each in parts:
            whole[each.unpadded.slices] = self._receive(rank, number, each)[: each.unpadded.size[0]]
        return whole

    def _receive(self, rank: int, number: int, region: Region) -> torch.Tensor:
        if rank == 0:
            return self._mine[number].data.cpu()
        buffer = torch.empty(math.prod(region.size) * region.dtype.itemsize, dtype=torch.uint8)
        dist.recv(buffer, rank, group=self._group)
        return buffer.view(region.dtype).view(region.size)
