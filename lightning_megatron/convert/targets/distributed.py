"""Write weights as a ``*.ckpt`` of ``MegatronStrategy``, which any layout loads, and Megatron-Core, too.

Beside the shards (chunk_files.py) stands what the strategy reads before it loads them: what the model is. There is no
optimizer state: a run begins with these weights, and does not go on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import COMMON, META, checksums_of_file, failures_as_errors, write_checksums
from lightning_megatron.convert.companions import companion_files, copy_companions
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.reading import read_box
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.shapes import num_layers
from lightning_megatron.convert.stored.base import Key, StoredModel
from lightning_megatron.convert.stored.distributed import COMPANIONS
from lightning_megatron.convert.targets.casting import dtype_of
from lightning_megatron.convert.targets.chunk_files import Chunk, write_chunks
from lightning_megatron.convert.targets.layout import Box, TargetLayout
from lightning_megatron.models.config import ModelConfig


def write_distributed(source: StoredModel, options: ConvertOptions) -> None:
    """Write the folder ``options.save_path``; whoever calls gives it its final name.

    Args:
        source: What to write.
        options: The layout, dtype and padding.

    Raises:
        CheckpointError: If the source is damaged, a number does not fit into the dtype, or the disk is full.
    """
    folder = options.save_path
    target = _Target(source, options)
    with failures_as_errors(f"checkpoint {folder} is not written"):
        folder.mkdir(parents=True, exist_ok=True)
        target.write(folder)


class _Target:
    """One conversion."""

    def __init__(self, source: StoredModel, options: ConvertOptions) -> None:
        model = replace(source.model, make_vocab_size_divisible_by=options.make_vocab_size_divisible_by)
        self._source, self._options = source, options
        self._dtype = dtype_of(options.dtype)
        self._layout = TargetLayout.of(model, options)

    def write(self, folder: Path) -> None:
        """Write all files, ``meta.pt`` and its checksums last."""
        # Not above: the engine's imports take seconds.
        from lightning_megatron.checkpoint.state import FORMAT_VERSION, SHARDING

        options = self._options
        companions = companion_files(self._source.companions, options.tokenizer)
        if companions:
            (folder / COMPANIONS).mkdir()
            copy_companions(companions, folder / COMPANIONS)
        chunks = sorted(self._chunks(), key=lambda chunk: chunk.rank)
        checksums = write_chunks(
            folder, options.tp * options.pp, chunks, _extra_states(self._layout.model, self._source.tensors)
        )
        torch.save({"content_metadata": dict(SHARDING)}, folder / COMMON)
        meta = {
            "format_version": FORMAT_VERSION,
            "layout": {"tp": options.tp, "pp": options.pp, "vpp": options.vpp, "cp": 1, "dp": None},
            "has_optimizer": False,
            "optimizer_format": None,
            "model_description": self._layout.model.to_dict(),
            "has_checksums": True,
            "hugging_face_config": _config_fields(self._source),
            "lightning": {
                "epoch": 0,
                "global_step": self._source.iteration,
                "pytorch-lightning_version": version("lightning"),
                "state_dict": {},
            },
        }
        torch.save(meta, folder / META)
        files = (file for file in folder.iterdir() if file.is_file() and file.name not in checksums)
        write_checksums(folder, checksums | {file.name: checksums_of_file(file) for file in files})

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[Chunk]:
        """Everything to write."""
        for key, spec in self._source.tensors.items():
            dtype = self._dtype or spec.dtype
            shape = self._layout.padded_shape(key, spec.shape)
            stack = () if key.layer is None else (num_layers(key.name.split(".")[0], self._layout.model),)
            for box in self._layout.boxes(key, shape):
                yield Chunk(
                    rank=box.rank,
                    entry=key.name,
                    whole=(*stack, *shape),
                    dtype=dtype,
                    start=(*(() if key.layer is None else (key.layer,)), *box.start),
                    size=(*((1,) if stack else ()), *box.size),
                    read=partial(self._read, key, box, dtype),
                )

    def _read(self, key: Key, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of a box, some rows of the source at a time; zero in rows that pad the vocabulary."""
        result = torch.empty(box.size, dtype=dtype)
        read_box(self._source, key, box.start, result)
        return result if key.layer is None else result[None]


def _extra_states(model: ModelConfig, tensors: Iterable[Key]) -> dict[str, bytes]:
    """The entries in which Megatron-Core's linear layers keep scales of fp8: they must be there, and are empty."""
    stream = io.BytesIO()
    torch.save([None], stream)
    names = []
    for key in tensors:
        module, _, kind = key.name.rpartition(".")
        if kind == "weight" and key.layer is not None and ".linear_" in module:
            count = num_layers(key.name.split(".")[0], model)
            names.append(f"{module}._extra_state/shard_{key.layer}_{count}")
    if model.has_output_layer and model.architecture != "gpt":
        names.append("output_layer._extra_state/shard_0_1")
    return dict.fromkeys(names, stream.getvalue())


def _config_fields(source: StoredModel) -> dict[str, Any]:
    """What ``config.json`` would hold."""
    fields: dict[str, Any] = json.loads(source.hf_config.to_json_string())
    return {**fields, "architectures": [family_of(source.model.family).architectures[source.model.task]]}
