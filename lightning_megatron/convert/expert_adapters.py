"""Files of ``peft`` adapters of routed experts, in both of their forms.

``fused``: to transformers 5 a linear of all experts of a layer is one parameter, ``experts.gate_up_proj`` [experts,
2 * ffn, h] or ``experts.down_proj``. ``peft`` adapts parameters (``target_parameters``) by modules around the experts:
``experts.base_layer.lora_A`` and ``lora_B`` are of the first of two, ``experts.lora_A`` and ``lora_B`` of the second or
only one. A is [experts * r, in], expert by expert; B is [out, r * experts], with the experts side by side in each of
the r columns.

``per_expert``: files of transformers 4 have ``experts.N.gate_proj.lora_A`` and so on. ``peft`` reads them in
transformers 5 as this module does: gate and up get one adapter of twice the rank, whose B is block-diagonal at first.

Here the matrices of each expert have names of their own (``expert_adapter``): A [r, in], B [out, r].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatron.convert.registry import rules_of
from lightning_megatron.convert.rules import (
    EXPERT,
    LAYER,
    PEFT_PREFIX,
    expert_adapter,
    expert_rules,
    fused_parameter,
)
from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import WeightFiles, add_tensor
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

OLDEST_PEFT = "0.19.1"
"""The first ``peft`` to which a parameter [experts, out, in] is a linear from in to out."""
_WITHOUT_VERSION = "0.17.0"
"""Of files that do not say which ``peft`` wrote them."""
_MAX_CACHED = 4
"""Tensors of all experts of a layer that are kept while those of each are read: two A and two B."""


@dataclass(frozen=True, kw_only=True)
class ExpertLinear:
    """A linear of routed experts, and what Hugging Face calls it."""

    megatron: str
    """Megatron's name of the module, without the layer number."""
    parameter: str
    """Parameter that holds it for all experts of a layer, with ``LAYER``."""
    modules: tuple[str, ...]
    """Modules of one expert that make it up, with ``LAYER`` and ``EXPERT``; none if files on the hub have the parameter
    for all experts, too."""
    num_experts: int
    outputs: int
    inputs: int
    is_transposed: bool
    """Whether the parameter is [experts, in, out]."""

    @property
    def container(self) -> str:
        """Module that has the parameter, with ``LAYER``."""
        return self.parameter.rpartition(".")[0]

    def matrix(
        self,
        kind: str,
        layer: str,
        expert: int,
    ) -> str:
        """Name of the matrix A or B of one expert."""
        name = expert_adapter(self.parameter, kind)
        return name.replace(LAYER, layer).replace(EXPERT, str(expert))


def expert_linears(model: ModelConfig) -> list[ExpertLinear]:
    """Linears of the routed experts of a model, in the order of its parameters; none without experts."""
    if model.experts is None:
        return []
    width = model.experts.ffn_hidden_size
    outputs = {
        "linear_fc1": width * (1 + model.gated_linear_unit),
        "linear_fc2": model.hidden_size,
    }
    inputs = {"linear_fc1": model.hidden_size, "linear_fc2": width}
    linears = []
    for name, rule in expert_rules(rules_of(model)).items():
        linear = name.rpartition(".")[2]
        linears.append(
            ExpertLinear(
                megatron=name,
                parameter=fused_parameter(name, rule),
                modules=() if rule.num_stacked else rule.modules,
                num_experts=model.experts.num_experts,
                outputs=outputs[linear],
                inputs=inputs[linear],
                is_transposed=rule.transposed,
            )
        )
    return linears


def adapted_expert_linears(model: ModelConfig) -> list[ExpertLinear]:
    """Those of ``expert_linears`` that have adapters."""
    if model.lora is None:
        return []
    adapted = dict(model.lora.linears)
    return [linear for linear in expert_linears(model) if linear.megatron in adapted]


def in_layer(name: str) -> str:
    """Name of a module within its layer, or with ``LAYER`` in place of the layer number."""
    return re.sub(r"^.*?\.(?:\d+|\{layer\})\.", "", name)


def module_pattern(name: str) -> re.Pattern[str]:
    """Pattern of a name with ``LAYER`` and perhaps ``EXPERT``."""
    text = re.escape(name)
    text = text.replace(re.escape(LAYER), r"(?P<layer>\d+)")
    return re.compile(text.replace(re.escape(EXPERT), r"(?P<expert>\d+)"))


def _b_of(name_of_a: str) -> str:
    return name_of_a.replace(".lora_A.", ".lora_B.")


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _OneOfAll:
    """A matrix of one expert, in a tensor of all."""

    name: str
    """Name of the tensor."""
    stored_as: Literal["A", "B"]
    """Order of the tensor's axes."""
    is_transposed: bool
    """Whether it has the transposed matrix."""
    expert: int
    num_experts: int

    def of(self, files: SeparateExpertAdapters) -> Tensor:
        """Its values."""
        tensor = files.whole(self.name)
        matrix: Tensor
        if self.stored_as == "A":
            matrix = tensor.unflatten(0, (self.num_experts, -1))[self.expert]
        else:
            matrix = tensor.unflatten(1, (-1, self.num_experts))[..., self.expert]
        return matrix.t() if self.is_transposed else matrix


@dataclass(frozen=True, kw_only=True)
class _OneOfModules:
    """A matrix of one expert, from those of several modules."""

    names: tuple[str, ...]
    """Names of the modules' tensors."""
    kind: Literal["A", "B"]

    def of(self, files: SeparateExpertAdapters) -> Tensor:
        """Its values."""
        tensors = [files.whole(name) for name in self.names]
        if self.kind == "A":
            return torch.cat(tensors)
        diagonal: Tensor = torch.block_diag(*tensors)
        return diagonal


class SeparateExpertAdapters(WeightFiles):
    """Weights of an adapter in which the matrices of each expert have names of their own.

    Tensors that are no adapters of the model's experts stay as they are.

    Args:
        files: The weights as they are.
        model: Config of the base model.
        config: The adapter's config.

    Raises:
        CheckpointError: If the config does not say which parameter the adapters of experts belong to, or if only some
            of the modules that are one parameter have adapters.
    """

    def __init__(
        self,
        files: WeightFiles,
        model: ModelConfig,
        config: Mapping[str, Any],
    ) -> None:
        self._files = files
        self._matrices: dict[str, _OneOfAll | _OneOfModules] = {}
        self._cached: dict[str, Tensor] = {}
        self.parameters: dict[str, str] = {}
        """Names in their layer of the parameters with adapters, by the names of the A of each of their experts."""
        self.adapted: dict[str, tuple[str, int]] = {}
        """What each A of the files belongs to, a module or a parameter, and its rank; by the name of that A."""
        tensors = dict(files.tensors)
        linears = expert_linears(model)
        for linear, suffix in _fused(linears, files.tensors, config):
            self._split(linear, suffix, config, tensors)
        for linear in linears:
            self._join(linear, tensors)
        for name in files.tensors:
            if ".lora_A." in name:
                module = name.removeprefix(PEFT_PREFIX).rpartition(".lora_A.")[0]
                self.adapted.setdefault(name, (module, _num_rows(files.tensors[name])))
        super().__init__(tensors)

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """See ``WeightFiles``."""
        if name in self._matrices:
            return self._matrices[name].of(self)[box]
        return self._files.read(name, box)

    def whole(self, name: str) -> Tensor:
        """All values of a tensor of the files; kept until some others have been read."""
        if name not in self._cached:
            while len(self._cached) >= _MAX_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[name] = self._files.read(name, (slice(None), slice(None)))
        return self._cached[name]

    def _split(
        self,
        linear: ExpertLinear,
        suffix: str,
        config: Mapping[str, Any],
        tensors: dict[str, Stored],
    ) -> None:
        """Replace adapters of a parameter by those of each expert in ``tensors``, unless their shapes are wrong."""
        pattern = module_pattern(f"{PEFT_PREFIX}{linear.container}{suffix}.lora_A.weight")
        for name_of_a, found in _matching(pattern, tensors):
            a = tensors[name_of_a]
            b = tensors[_b_of(name_of_a)]
            is_transposed = _is_transposed(linear, a, config)
            sizes = (linear.inputs, linear.outputs)
            if is_transposed:
                sizes = (linear.outputs, linear.inputs)
            rank, rest = divmod(a.shape[0], linear.num_experts)
            if rest or a.shape[1:] != sizes[:1] or b.shape != (sizes[1], a.shape[0]):
                continue
            self.adapted[name_of_a] = (linear.parameter.replace(LAYER, found["layer"]), rank)
            sources: tuple[tuple[str, Literal["A", "B"], Stored], ...] = (
                (name_of_a, "A", a),
                (_b_of(name_of_a), "B", b),
            )
            if is_transposed:
                sources = sources[::-1]
            for name, _, _ in sources:
                del tensors[name]
            for expert in range(linear.num_experts):
                for kind, (name, stored_as, stored) in zip("AB", sources, strict=True):
                    matrix = _OneOfAll(
                        name=name,
                        stored_as=stored_as,
                        is_transposed=is_transposed,
                        expert=expert,
                        num_experts=linear.num_experts,
                    )
                    own = self._add(linear, kind, found["layer"], expert, matrix)
                    tensors[own] = Stored(_shape(linear, kind, rank), stored.dtype, stored.location)

    def _join(self, linear: ExpertLinear, tensors: dict[str, Stored]) -> None:
        """Replace adapters of the modules of each expert by those of its linear in ``tensors``."""
        names_of_a: dict[tuple[str, str], list[str | None]] = {}
        for index, module in enumerate(linear.modules):
            pattern = module_pattern(f"{PEFT_PREFIX}{module}.lora_A.weight")
            for name, found in _matching(pattern, tensors):
                place = (found["layer"], found["expert"])
                names = names_of_a.setdefault(place, [None] * len(linear.modules))
                names[index] = name
        for (layer, expert), names in names_of_a.items():
            present = tuple(name for name in names if name is not None)
            if len(present) < len(names):
                raise CheckpointError(
                    f"adapter: expected adapters of {_names_of(linear.modules)} in each expert, which are one "
                    f"parameter in transformers 5, got only {present[0]} in layer {layer}; use an adapter of both"
                )
            rank = sum(tensors[name].shape[0] for name in present)
            kinds: tuple[tuple[Literal["A", "B"], tuple[str, ...]], ...] = (
                ("A", present),
                ("B", tuple(map(_b_of, present))),
            )
            for kind, sources in kinds:
                stored = [tensors.pop(name) for name in sources]
                matrix = _OneOfModules(names=sources, kind=kind)
                own = self._add(linear, kind, layer, int(expert), matrix)
                shape = _joined_shape(kind, stored, rank)
                tensors[own] = Stored(shape, stored[0].dtype, stored[0].location)

    def _add(
        self,
        linear: ExpertLinear,
        kind: str,
        layer: str,
        expert: int,
        matrix: _OneOfAll | _OneOfModules,
    ) -> str:
        """Note how a matrix of an expert is read, and return its name."""
        name = linear.matrix(kind, layer, expert)
        add_tensor(self._matrices, name, matrix, "adapter")
        if kind == "A":
            self.parameters[name] = in_layer(linear.parameter)
        return name


def _fused(
    linears: Sequence[ExpertLinear],
    stored: Mapping[str, Stored],
    config: Mapping[str, Any],
) -> Iterator[tuple[ExpertLinear, str]]:
    """Linears whose parameters have adapters, and what follows the name of their module in those of the adapters."""
    for container in dict.fromkeys(linear.container for linear in linears):
        group = [linear for linear in linears if linear.container == container]
        inner = module_pattern(f"{PEFT_PREFIX}{container}.base_layer.lora_A.weight")
        outer = module_pattern(f"{PEFT_PREFIX}{container}.lora_A.weight")
        if any(map(inner.fullmatch, stored)):
            yield from zip(group, (".base_layer", ""), strict=False)
        elif any(map(outer.fullmatch, stored)):
            yield _only_target(group, config), ""


def _only_target(group: Sequence[ExpertLinear], config: Mapping[str, Any]) -> ExpertLinear:
    """The linear whose parameter alone has adapters."""
    targets = config.get("target_parameters")
    if not isinstance(targets, list):
        targets = []
    found = []
    for linear in group:
        name = f".{in_layer(linear.parameter)}"
        if any(name.endswith(f".{in_layer(str(target))}") for target in targets):
            found.append(linear)
    if len(found) != 1:
        raise CheckpointError(
            f"adapter: expected one of {_names_of(linear.parameter for linear in group)} in target_parameters, as its "
            f"weights have adapters of one parameter of experts, got {targets}; correct its config"
        )
    return found[0]


def _num_rows(stored: Stored) -> int:
    return stored.shape[0] if stored.shape else 0


def _names_of(modules: Any) -> str:
    return " and ".join(module.rpartition(".")[2] for module in modules)


def _matching(
    pattern: re.Pattern[str],
    tensors: Mapping[str, Stored],
) -> list[tuple[str, re.Match[str]]]:
    """Names of two-dimensional A that have a B, with what the pattern finds in them."""
    matches = []
    for name in tensors:
        found = pattern.fullmatch(name)
        if found is None or _b_of(name) not in tensors:
            continue
        if len(tensors[name].shape) == len(tensors[_b_of(name)].shape) == 2:
            matches.append((name, found))
    return matches


def _is_transposed(linear: ExpertLinear, a: Stored, config: Mapping[str, Any]) -> bool:
    """Whether A and B are of the transposed matrix, as ``peft`` had them before ``OLDEST_PEFT``.

    The sizes tell, except for a square matrix.
    """
    if linear.inputs != linear.outputs:
        return a.shape[1:] == (linear.outputs,)
    version = _numbers(str(config.get("peft_version") or _WITHOUT_VERSION))
    if linear.is_transposed:
        return version == _numbers("0.19.0")
    return version < _numbers(OLDEST_PEFT)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _shape(linear: ExpertLinear, kind: str, rank: int) -> tuple[int, int]:
    return (rank, linear.inputs) if kind == "A" else (linear.outputs, rank)


def _joined_shape(
    kind: str,
    stored: Sequence[Stored],
    rank: int,
) -> tuple[int, int]:
    """Shape of the matrix that modules make up; whether it is that of the model is checked with all others."""
    if kind == "A":
        return (rank, stored[0].shape[1])
    return (sum(tensor.shape[0] for tensor in stored), rank)


# ---- writing --------------------------------------------------------------------------------------------------------

Matrices = dict[tuple[ExpertLinear, str], dict[str, list[Tensor]]]
"""Matrices A and B of all experts, in their order, by linear and layer."""


def take_matrices(tensors: dict[str, Tensor], model: ModelConfig) -> Matrices:
    """Remove the matrices of experts from ``tensors``, and return them."""
    matrices: Matrices = {}
    for linear in adapted_expert_linears(model):
        for kind in "AB":
            pattern = module_pattern(expert_adapter(linear.parameter, kind))
            for name in list(tensors):
                found = pattern.fullmatch(name)
                if found is not None:
                    of_layer = matrices.setdefault((linear, found["layer"]), {"A": [], "B": []})
                    of_layer[kind].append(tensors.pop(name))
    return matrices


def fused_tensors(matrices: Matrices) -> dict[str, Tensor]:
    """Tensors of all experts, by their names in files."""
    linears = list(dict.fromkeys(linear for linear, _ in matrices))
    tensors = {}
    for (linear, layer), of_layer in matrices.items():
        module = linear.container.replace(LAYER, layer)
        if linear is not linears[-1]:
            module += ".base_layer"
        b = torch.stack(of_layer["B"], dim=-1)
        tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = torch.cat(of_layer["A"])
        tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = b.flatten(1)
    return tensors


def separate_tensors(matrices: Matrices) -> dict[str, Tensor]:
    """Tensors of the modules of each expert, by their names in files.

    Modules that are one parameter share its A, unless each column of B belongs to one of them: then each gets its own
    part, which ``peft`` and ``SeparateExpertAdapters`` put together again.
    """
    tensors = {}
    linears = dict.fromkeys(linear for linear, _ in matrices)
    has_blocks = {
        linear: all(
            _is_block_diagonal(b, len(linear.modules))
            for (other, _), of_layer in matrices.items()
            if other is linear
            for b in of_layer["B"]
        )
        for linear in linears
    }
    for (linear, layer), of_layer in matrices.items():
        count = len(linear.modules)
        pairs = zip(of_layer["A"], of_layer["B"], strict=True)
        for expert, (a, b) in enumerate(pairs):
            for index, (name, rows) in enumerate(zip(linear.modules, b.chunk(count), strict=True)):
                own_a = a
                own_b = rows
                if has_blocks[linear]:
                    own_a = a.chunk(count)[index]
                    own_b = rows.chunk(count, dim=1)[index]
                module = name.replace(LAYER, layer).replace(EXPERT, str(expert))
                tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"] = own_a.clone()
                tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"] = own_b.clone()
    return tensors


def _is_block_diagonal(matrix: Tensor, count: int) -> bool:
    """Whether a matrix consists of ``count`` equal blocks on its diagonal, and of zeros."""
    if matrix.shape[1] % count:
        return False
    parts = [part.chunk(count, dim=1) for part in matrix.chunk(count)]
    blocks = [part[index] for index, part in enumerate(parts)]
    return torch.equal(matrix, torch.block_diag(*blocks))
