"""Weight files with all experts of a layer in one tensor, read as files with tensors of each.

transformers 5 computes with ``mlp.experts.gate_up_proj`` [experts, 2 * ffn, h] and ``mlp.experts.down_proj`` [experts,
h, ffn], and ``save_pretrained(save_original_format=False)`` writes them; files on the hub have tensors of each expert.
Families whose files on the hub have one tensor for all (gpt-oss) need nothing of this.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor

from lightning_megatron.convert.decoder_rules import DecoderNames
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.rules import FUSED_EXPERTS
from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import WeightFiles
from lightning_megatron.models.config import ModelConfig

_NAMES = "|".join(map(re.escape, FUSED_EXPERTS.values()))
_STACKED = re.compile(rf"(?P<layer>.*)\b(?P<linear>{_NAMES})")


class _Part(NamedTuple):
    """Rows of one expert in a tensor of all."""

    name: str
    """Name of the tensor in the files."""
    expert: int
    first: int
    rows: int


def with_separate_experts(files: WeightFiles, model: ModelConfig) -> WeightFiles:
    """``files`` by the names that files of ``model`` have on the hub."""
    names = family_of(model.family).names
    if model.experts is None or names.stacked_experts is not None:
        return files
    return _SeparateExperts(files, names, model.experts.num_experts)


class _SeparateExperts(WeightFiles):
    """Weight files whose tensors of all experts are replaced by tensors of each.

    Args:
        files: The weight files as they are.
        names: Names of the family's weights on the hub.
        num_experts: Experts of a layer; tensors of another number stay as they are.
    """

    def __init__(
        self,
        files: WeightFiles,
        names: DecoderNames,
        num_experts: int,
    ) -> None:
        self._files = files
        self._names = names
        self._num_experts = num_experts
        self._parts: dict[str, _Part] = {}
        self._renamed: dict[str, str] = {}
        tensors: dict[str, Stored] = {}
        for name, stored in files.tensors.items():
            parts = self._split(name, stored)
            if parts and not parts.keys() & files.tensors.keys():
                self._parts |= parts
                for own, part in parts.items():
                    shape = (part.rows, stored.shape[2])
                    tensors[own] = Stored(shape, stored.dtype, stored.location)
                continue
            own = _name_on_hub(name, names)
            if own in files.tensors:
                own = name
            self._renamed[own] = name
            tensors[own] = stored
        super().__init__(tensors)

    def _split(self, name: str, stored: Stored) -> dict[str, _Part]:
        """Parts of a tensor by their names on the hub; none if it is not one of all experts."""
        found = _STACKED.fullmatch(name)
        if found is None or len(stored.shape) != 3 or stored.shape[0] != self._num_experts:
            return {}
        gate, up, down = self._names.expert
        linears = [gate, up]
        if found["linear"] == FUSED_EXPERTS["linear_fc2"]:
            linears = [down]
        rows, rest = divmod(stored.shape[1], len(linears))
        if rest:
            return {}
        parts: dict[str, _Part] = {}
        for expert in range(self._num_experts):
            module = f"{found['layer']}{self._names.experts}.experts.{expert}"
            for index, linear in enumerate(linears):
                parts[f"{module}.{linear}.weight"] = _Part(name, expert, index * rows, rows)
        return parts

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """See ``WeightFiles``; reads no more rows than ``box`` has."""
        if name not in self._parts:
            return self._files.read(self._renamed[name], box)
        part = self._parts[name]
        start, stop, _ = box[0].indices(part.rows)
        expert = slice(part.expert, part.expert + 1)
        rows = slice(part.first + start, part.first + stop)
        return self._files.read(part.name, (expert, rows, *box[1:]))[0]


def _name_on_hub(name: str, names: DecoderNames) -> str:
    """Name on the hub of a tensor that transformers calls ``name``."""
    for ours, on_hub in names.renamed.items():
        name = name.replace(f".{ours}.", f".{on_hub}.")
    return name
