"""Weights that are NaN or infinite: which they are, and the file that they came from.

No batch gives a finite loss with such weights, so a step that is not finite looks at them before it names its batch. A
step that is finite costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.checkpoint.meta import load_meta
from lightning_megatron.convert.hugging_face import files_of_tensors, hugging_face_names
from lightning_megatron.convert.shards import Key, named_shards
from lightning_megatron.engine.wrap import finish_parameter_gathers
from lightning_megatron.errors import ConfigError, NonFiniteError
from lightning_megatron.models.adapter_names import is_adapter, is_trained_with_lora
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.storage.publish import recover


@dataclass(frozen=True, kw_only=True)
class WeightOrigin:
    """Where the weights of a run were before its first step."""

    checkpoint: Path | None = None
    """Checkpoint of this package that the run has loaded."""
    model: Path | None = None
    """Model directory of Hugging Face, with the weights that the checkpoint does not hold."""
    adapter: Path | None = None
    """Directory of a ``peft`` adapter, likewise."""

    def folder_of(self, key: Key) -> Path | None:
        """Checkpoint or directory with the tensor; None for one that was initialized at random."""
        is_trained = is_trained_with_lora(key.name)
        checkpoint = self.checkpoint
        if checkpoint is not None and (is_trained or not _has_only_adapters(checkpoint)):
            return checkpoint
        if is_adapter(key.name) or (is_trained and self.adapter is not None):
            return self.adapter
        return self.model


def _has_only_adapters(checkpoint: Path) -> bool:
    try:
        return bool(load_meta(recover(checkpoint)).get("part") == "adapters")
    except (ConfigError, OSError):  # it may have been removed since
        return False


@torch.no_grad()
def check_weights(
    chunks: Sequence[Any],
    *,
    step: int,
    origin: WeightOrigin | None,
    model: ModelConfig | None,
    group: dist.ProcessGroup,
) -> None:
    """Raise on all ranks if weights of any rank are not finite. Collective over the world; waits for the device.

    Args:
        chunks: This rank's model chunks.
        step: Number of the step in which loss or gradients are not finite.
        origin: Where the weights are from; None if they have been trained since.
        model: Config of the chunks; None for a module without one.
        group: All ranks, over gloo.

    Raises:
        NonFiniteError: If so; it names the first such weight, and the file that it is from.
    """
    finish_parameter_gathers(list(chunks))
    own = _nonfinite(chunks)
    problem = ""
    if own:
        problem = _problem(own[0], origin, model)
    finding = (problem, [str(key) for key in own])
    findings = [finding] * dist.get_world_size(group)
    dist.all_gather_object(findings, finding, group=group)
    problems = [text for text, _ in findings if text]
    if not problems:
        return
    names = {name for _, of_rank in findings for name in of_rank}
    message = f"step {step}: {problems[0]}"
    if len(names) > 1:
        message += f" ({len(names) - 1} more weights are not finite either)"
    raise NonFiniteError(message)


def _nonfinite(chunks: Iterable[Any]) -> list[Key]:
    """Keys of this rank's tensors that have a value that is NaN or infinite, in the order of the model."""
    keys: list[Key] = []
    are_finite: list[torch.Tensor] = []
    for key, tensor in named_shards(chunks):
        if tensor.is_floating_point():
            keys.append(key)
            are_finite.append(tensor.isfinite().all())
    if not keys:
        return []
    finite = torch.stack(are_finite).tolist()  # waits for the device once
    return list(dict.fromkeys(key for key, ok in zip(keys, finite, strict=True) if not ok))


def _problem(
    key: Key,
    origin: WeightOrigin | None,
    model: ModelConfig | None,
) -> str:
    expected = f"weight {key}: expected finite numbers, got NaN or infinite ones"
    if origin is None:
        return f"{expected} since an earlier step or run; begin from before it, with a lower learning rate"
    folder = origin.folder_of(key)
    if folder is None:
        return f"{expected} before the first step, and no file has them; look at what has set them"
    if folder == origin.checkpoint:
        return f"{expected}, as in checkpoint {folder}; begin with another one"
    files: dict[str, tuple[str, bool]] = {}
    if model is not None and folder == origin.model:
        try:
            files = files_of_tensors(folder, hugging_face_names([key], model), model)
        except (ConfigError, OSError):  # the directory may have changed since
            files = {}
    for name, (file, is_finite) in files.items():
        if not is_finite:
            return f"{expected}, as {name} in {file}; fetch or export that file again"
    for name, (file, _) in files.items():
        return f"{expected}, although {name} in {file} is finite; train with bf16 or fp32, which can hold its values"
    return f"{expected}, as in {folder}; fetch or export its weights again"
