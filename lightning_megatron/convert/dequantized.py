"""Weight files of a model directory, whose quantized tensors are read as the weights that they hold."""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.convert.block_scaled import BlockScaledFiles, block_of
from lightning_megatron.convert.mxfp4 import UnpackedFiles
from lightning_megatron.convert.registry import read_json
from lightning_megatron.convert.weight_files import CONFIG_FILE, WeightFiles, open_weights


def open_dequantized(directory: Path) -> WeightFiles:
    """Open the weight files of ``directory``; see ``open_weights``.

    Raises:
        CheckpointError: If there are none, one is damaged, or the config's ``weight_block_size`` is no pair of sizes.
    """
    config = {}
    if (directory / CONFIG_FILE).is_file():
        config = read_json(directory)
    files = BlockScaledFiles(open_weights(directory), block_of(config))
    return UnpackedFiles(files)
