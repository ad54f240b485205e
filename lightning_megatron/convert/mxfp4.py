"""MXFP4 weights of a model directory, read as bf16.

Open Compute Project 2023, Microscaling Formats 1.0: blocks of 32 numbers of four bits (one for the sign, two for the
exponent, one for the mantissa) share a power of two. gpt-oss stores its experts so: ``<name>_blocks`` [experts, out,
in / 32, 16], two numbers a byte, and ``<name>_scales`` [experts, out, in / 32], exponents plus 127, both uint8.
transformers, and so this module, make ``<name>`` [experts, in, out] of them. Each number is exact in bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import WeightFiles, add_tensor

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BYTES_PER_BLOCK = 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


class _Packed(NamedTuple):
    """Names of the two tensors that hold a weight."""

    blocks: str
    scales: str


class UnpackedFiles(WeightFiles):
    """Weight files whose MXFP4 tensors are replaced by the weights that they hold.

    Args:
        files: The weight files as they are.

    Raises:
        CheckpointError: If a weight is stored unpacked, too.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._packed: dict[str, _Packed] = {}
        tensors = dict(files.tensors)
        for name in files.tensors:
            packed = _packed_weight(name, files)
            if packed is None:
                continue
            weight = name.removesuffix(_BLOCKS)
            self._packed[weight] = packed
            blocks = tensors.pop(packed.blocks)
            tensors.pop(packed.scales)
            experts, rows, num_blocks, _ = blocks.shape
            shape = (experts, num_blocks * 2 * _BYTES_PER_BLOCK, rows)
            stored = Stored(shape, torch.bfloat16, blocks.location)
            add_tensor(tensors, weight, stored, f"{name} and {packed.scales}")
        super().__init__(tensors)

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """See ``WeightFiles``; reads no more rows than ``box`` has."""
        if name not in self._packed:
            return self._files.read(name, box)
        experts, columns, rows = (*box, *(slice(None),) * (3 - len(box)))
        packed = self._packed[name]
        blocks = self._files.read(packed.blocks, (experts, rows))
        scales = self._files.read(packed.scales, (experts, rows))
        return _unpack(blocks, scales).transpose(1, 2)[:, columns]


def _packed_weight(name: str, files: WeightFiles) -> _Packed | None:
    """The two tensors of a weight, if ``name`` is that of its blocks."""
    scales = f"{name.removesuffix(_BLOCKS)}{_SCALES}"
    if not name.endswith(_BLOCKS) or scales not in files.tensors:
        return None
    of_blocks = files.tensors[name]
    of_scales = files.tensors[scales]
    are_bytes = of_blocks.dtype is torch.uint8 and of_scales.dtype is torch.uint8
    expected = (*of_scales.shape, _BYTES_PER_BLOCK)
    if not are_bytes or len(of_scales.shape) != 3 or of_blocks.shape != expected:
        return None
    return _Packed(blocks=name, scales=scales)


def _unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Weights [experts, out, in], bf16, of blocks and scales; the lower half of a byte comes first."""
    negative = tuple(-magnitude for magnitude in _MAGNITUDES)
    values = torch.tensor(_MAGNITUDES + negative, dtype=torch.bfloat16)
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - _EXPONENT_BIAS
    numbers = torch.ldexp(values[halves.int()], exponents[..., None])
    return numbers.to(torch.bfloat16).flatten(-2)
