"""FP8 weights with a scale for each block of a model directory, read as bf16.

DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.3.2: ``<name>.weight`` [rows, columns] in e4m3, and
``<name>.weight_scale_inv`` [blocks of rows, blocks of columns], fp32, by which the numbers of a block are multiplied.
The last block of a dimension may be smaller. The products are rounded once, as transformers does for a model in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import WeightFiles
from lightning_megatron.errors import CheckpointError

_BLOCK = (128, 128)


class BlockScaledFiles(WeightFiles):
    """Weight files whose FP8 tensors are replaced by the weights that they hold.

    Args:
        files: The weight files as they are.
        block: Rows and columns of a block.
    """

    def __init__(self, files: WeightFiles, block: tuple[int, int]) -> None:
        self._files = files
        self._block = block
        self._scaled: set[str] = set()
        tensors = dict(files.tensors)
        for name, stored in files.tensors.items():
            if self._is_scaled(name, stored):
                self._scaled.add(name)
                del tensors[_scales_of(name)]
                tensors[name] = Stored(stored.shape, torch.bfloat16, stored.location)
        super().__init__(tensors)

    def _is_scaled(self, name: str, stored: Stored) -> bool:
        """Whether a tensor has one scale for each block."""
        scales = self._files.tensors.get(_scales_of(name))
        if scales is None or stored.dtype is not torch.float8_e4m3fn or len(stored.shape) != 2:
            return False
        blocks = tuple(
            -(-size // width) for size, width in zip(stored.shape, self._block, strict=True)
        )
        return scales.shape == blocks and scales.dtype is torch.float32

    def read(
        self,
        name: str,
        box: tuple[slice, ...],
    ) -> Tensor:
        """See ``WeightFiles``; reads no more of a tensor than ``box`` has."""
        if name not in self._scaled:
            return self._files.read(name, box)
        full = (*box, *(slice(None),) * (2 - len(box)))
        values = self._files.read(name, full).float()
        shape = self._files.tensors[name].shape
        blocks = []
        blocks_of_dimension = []
        for part, size, width in zip(full, shape, self._block, strict=True):
            start, stop, _ = part.indices(size)
            first = start // width
            blocks.append(slice(first, -(-stop // width)))
            blocks_of_dimension.append(torch.arange(start, stop) // width - first)
        rows, columns = blocks_of_dimension
        scales = self._files.read(_scales_of(name), tuple(blocks))
        return (values * scales[rows][:, columns]).to(torch.bfloat16)


def _scales_of(name: str) -> str:
    """Name of the scales of a weight."""
    return f"{name}_scale_inv"


def block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block, by the ``quantization_config`` of a model's config.

    Raises:
        CheckpointError: If it is no pair of positive numbers.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        return _BLOCK
    block = quantization.get("weight_block_size", _BLOCK)
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in block):
        raise CheckpointError(
            f"weight_block_size={block!r} of quantization_config: expected two positive numbers, e.g. [128, 128]; "
            "correct the config.json, or use the model that the quantized one was made from"
        )
    rows, columns = block
    return rows, columns
