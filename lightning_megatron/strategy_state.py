"""What may be asked of a strategy while it runs? Sizes, this rank's place, devices, and collectives over all ranks."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _sync_ddp_if_available
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer, OptimizerReport
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.runtime import Runtime
from lightning_megatron.engine.schedule import StepShape
from lightning_megatron.engine.wrap import GradientReduction
from lightning_megatron.models.transformer_config import EngineSettings, Recompute
from lightning_megatron.precision import MegatronPrecision


class StrategyState(ParallelStrategy):
    """The readable side of ``MegatronStrategy``, which sets the attributes below."""

    parallel: ParallelConfig
    distributed_optimizer: bool
    num_nodes: int
    _recompute: Recompute
    _overrides: dict[str, Any]
    _overlap_communication: bool | None
    _topology: Topology | None
    _runtime: Runtime | None
    _step_shape: StepShape | None

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.parallel.tp

    @property
    def pp(self) -> int:
        """Pipeline parallel size."""
        return self.parallel.pp

    @property
    def vpp(self) -> int | None:
        """Model chunks per stage, None for one."""
        return self.parallel.vpp

    @property
    def cp(self) -> int:
        """Context parallel size."""
        return self.parallel.cp

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence."""
        return self.parallel.sequence_parallel

    @property
    def num_microbatches(self) -> int:
        """Microbatches per optimizer step of one data-parallel rank."""
        return self.parallel.num_microbatches

    @property
    def topology(self) -> Topology:
        """This rank's place on every axis.

        Raises:
            RuntimeError: Before ``setup_environment``.
        """
        return ready(self._topology, "setup_environment")

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model."""
        return self.parallel.data_parallel_size(self.num_nodes * self.num_processes)

    @property
    def data_parallel_rank(self) -> int:
        """Which copy this rank is part of."""
        return self.topology.dp_rank

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's shard, one per copy; metrics of batches are synced over them."""
        return self.topology.dp_group

    @property
    def is_data_source(self) -> bool:
        """Whether this rank reads data: tp_rank 0 of the first stage, whose batch goes to its copy's ranks."""
        return self.topology.is_data_source

    @property
    def _ramped_micro_batch_size(self) -> int | None:
        """Rows of a microbatch if a data module changes their number from step to step, else None."""
        datamodule: Any = getattr(ready(self.lightning_module, "connect").trainer, "datamodule", None)
        return None if getattr(datamodule, "rampup", None) is None else datamodule.micro_batch_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage, which computes the loss."""
        return self.topology.is_last_stage

    @property
    def step_shape(self) -> StepShape | None:
        """Rows and tokens of the last step; None before the first."""
        return self._step_shape

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step over all ranks.

        Raises:
            RuntimeError: Before the first batch, which tells the micro batch size.
        """
        return ready(self._step_shape, "the first batch").global_batch_size

    @property
    def optimizer_report(self) -> OptimizerReport | None:
        """Gradient norm, overflow and loss scale of the last optimizer step; None before the first."""
        optimizer = self._megatron_optimizer
        return optimizer.report if optimizer else None

    @property
    def _signums(self) -> list[int]:
        """Signals for which Lightning registers handlers that communicate."""
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            return [signal.SIGTERM, environment.requeue_signal]
        return [signal.SIGTERM]

    @property
    def _megatron_optimizer(self) -> MegatronOptimizer | None:
        return next((o for o in self.optimizers if isinstance(o, MegatronOptimizer)), None)

    @property
    def _chunks(self) -> list[Any]:
        return list(ready(self.lightning_module, "connect").model_chunks)  # type: ignore[arg-type]

    @property
    def settings(self) -> EngineSettings:
        """Everything but the model itself that Megatron's config depends on."""
        return EngineSettings(
            parallel=self.parallel,
            dtypes=self._megatron_precision.dtypes,
            device=self.root_device,
            reduction=self.reduction,
            recompute=self._recompute,
            overrides=self._overrides,
        )

    @property
    def reduction(self) -> GradientReduction:
        """How gradients travel between the copies of the model."""
        overlap = self._overlap_communication
        if overlap is None:
            overlap = self.root_device.type == "cuda" and self.data_parallel_size > 1
        return GradientReduction(distributed_optimizer=self.distributed_optimizer, overlap=overlap)

    def engine(self) -> AbstractContextManager[None]:
        """Where Megatron's modules may be called: slot fillers, random streams and CPU emulation are active."""
        return ready(self._runtime, "setup_environment").active()

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._megatron_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = MegatronPrecision.adopt(plugin)

    @property
    def _megatron_precision(self) -> MegatronPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MegatronPrecision) else MegatronPrecision()

    @property
    @override
    def root_device(self) -> torch.device:
        return ready(self.parallel_devices, "the Trainer")[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or [])

    def set_world_ranks(self) -> None:
        """Tell the environment, and Lightning's rank-zero functions, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # ---- collectives over all ranks -------------------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src, group=dist.group.WORLD)
        return objects[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Losses and metrics of steps are equal on all ranks already, and their mean over the world is the same again.
        return (
            _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, torch.Tensor) else tensor
        )


T = TypeVar("T")


def ready(value: T | None, hook: str) -> T:
    """``value``, which Lightning sets in ``hook``.

    Raises:
        RuntimeError: If it is asked for too early.
    """
    if value is None:
        raise RuntimeError(f"this is only known after {hook}; use it from within Trainer.fit, validate or test")
    return value
