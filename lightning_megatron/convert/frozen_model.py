"""A frozen model at the layout of the trained one: the reference of preferences, the teacher of distillation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_megatron.checkpoint.load import LoadFrom, load_initial_weights
from lightning_megatron.checkpoint.state import EXPERT_BIAS, RunState
from lightning_megatron.convert.hugging_face import load_hugging_face
from lightning_megatron.convert.weight_files import open_weights
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.runtime import Runtime, unchanged_environment
from lightning_megatron.engine.settings import EngineSettings, Recompute
from lightning_megatron.engine.wrap import to_16bit
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.build import build_chunks
from lightning_megatron.models.checks import check_model
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.storage.checksums import CHECKSUMS

_SAMPLED_BYTES = 1 << 16
_NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class FrozenWeights:
    """Where the weights of a frozen model are, and of which model they are."""

    model: ModelConfig
    """Config of the model, without adapters."""
    source: Path | LoadFrom
    """A directory of Hugging Face weights, or a checkpoint of this package."""

    def settings(self, settings: EngineSettings) -> EngineSettings:
        """The settings of a run for this model: nothing is recomputed, and a model without experts spreads none."""
        parallel = settings.parallel
        if self.model.experts is None:
            parallel = replace(parallel, ep=1)
        return replace(settings, parallel=parallel, recompute=Recompute(), cuda_graphs=False)

    def check(self, settings: EngineSettings, option: str) -> None:
        """Check that the model supports the settings of a run, before anything is built.

        Args:
            settings: Those of the run.
            option: The option that named the model, for messages.

        Raises:
            ConfigError: If it does not.
            CheckpointError: If it has no weights.
        """
        try:
            check_model(self.model, self.settings(settings))
        except ConfigError as error:
            raise ConfigError(f"{option}={self.path}: {error}") from error
        if isinstance(self.source, Path):
            open_weights(self.source)

    def build(self, settings: EngineSettings, topology: Topology) -> torch.nn.ModuleList:
        """Build this rank's chunks, in evaluation mode and without gradients. Collective over the world, in the engine.

        Raises:
            CheckpointError: On every rank, if the weights are missing, damaged or of another model.
        """
        settings = self.settings(settings)
        with unchanged_environment():
            chunks = build_chunks(self.model, settings)
        chunks.requires_grad_(False).eval()
        if isinstance(self.source, Path):
            missing = load_hugging_face(chunks, self.model, self.source)
            if missing:
                raise CheckpointError(
                    f"{self.source}: expected the weights of a whole {self.model.family} for task={self.model.task!r}, "
                    f"got none of {', '.join(sorted(missing))}; give a complete model"
                )
        else:
            self._load_checkpoint(chunks, settings, topology, self.source)
        return to_16bit(chunks, settings.params_dtype, settings.fp8)

    def _load_checkpoint(
        self,
        chunks: torch.nn.ModuleList,
        settings: EngineSettings,
        topology: Topology,
        source: LoadFrom,
    ) -> None:
        description = self.model.to_dict()
        if settings.overrides.transformer.get("moe_router_enable_expert_bias"):
            description[EXPERT_BIAS] = True
        run = RunState(
            chunks=list(chunks),
            optimizer=None,
            runtime=Runtime(settings.device),
            topology=topology,
            model_description=description,
        )
        load_initial_weights(run, replace(source, optimizer=False))

    @property
    def path(self) -> Path:
        """The directory of the weights.

        Raises:
            CheckpointError: If a checkpoint is missing or not complete.
        """
        if isinstance(self.source, Path):
            return self.source
        return self.source.resolve()

    @property
    def identity(self) -> str:
        """Hash that differs for other weights and other configs.

        Of a checkpoint by its checksums; of Hugging Face's files by their names, sizes, times of modification and a
        sample of their content, since reading all of it takes as long as loading the model.

        Raises:
            CheckpointError: If there are no weights.
        """
        fields = json.dumps(self.model.to_dict(), sort_keys=True, default=repr)
        digest = hashlib.sha256(fields.encode())
        if not isinstance(self.source, Path):
            digest.update((self.path / CHECKSUMS).read_bytes())
            return digest.hexdigest()
        for file in self._files():
            stat = file.stat()
            digest.update(repr((file.name, stat.st_size, stat.st_mtime_ns)).encode())
            with file.open("rb") as stream:
                for sample in range(_NUM_SAMPLES):
                    stream.seek(stat.st_size * sample // _NUM_SAMPLES)
                    digest.update(stream.read(_SAMPLED_BYTES))
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        """The weight files of Hugging Face's directory, in order."""
        assert isinstance(self.source, Path)
        tensors = open_weights(self.source).tensors.values()
        named = {stored.location for stored in tensors if isinstance(stored.location, Path)}
        if any(isinstance(stored.location, Tensor) for stored in tensors):
            named |= set(self.source.glob("*.bin"))
        return sorted(named)
