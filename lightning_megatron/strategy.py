"""How does Lightning's Trainer drive Megatron-Core? ``MegatronStrategy``: Lightning's hooks in the order they are called."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.checkpoint_io import load_lightning_checkpoint, only_weights, save_lightning_checkpoint
from lightning_megatron.data.broadcast import broadcast_batch
from lightning_megatron.data.loaders import EvaluationLoader, ResumableLoader, is_map_style
from lightning_megatron.engine import checkpoint, groups
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.launch import die_with_parent, seed_of_run
from lightning_megatron.engine.optimizer import (
    MegatronOptimizer,
    OptimizerContext,
    OptimizerOptions,
    OptimizerReport,
    build_optimizer,
)
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.runtime import Runtime
from lightning_megatron.engine.schedule import Schedule, StepOutput, StepShape
from lightning_megatron.engine.wrap import GradientReduction, connect_schedule, to_16bit, to_ddp
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.transformer_config import EngineSettings, Recompute
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.preflight import check_trainer, preflight

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.steps.base import Batch, TrainStep

__all__ = ["MegatronStrategy", "preflight"]

_EVALUATING = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING, RunningStage.PREDICTING)


class MegatronStrategy(ParallelStrategy):
    """Trains one model with Megatron-Core's tensor, pipeline, sequence and data parallelism.

    One batch of the DataLoader is one optimizer step of one data-parallel rank: ``micro_batch_size x num_microbatches``
    rows. Losses and metrics are the same on every rank. Runs on GPUs (NCCL) and on CPUs (gloo) alike.

    Args:
        tp: Tensor parallel size; divides the attention heads and the MLP.
        pp: Pipeline parallel size; divides the layers.
        vpp: Model chunks per pipeline stage (interleaved schedule); needs ``num_microbatches`` to be a multiple of pp.
        cp: Context parallel size; above 1 it needs Transformer Engine's attention and is refused.
        sequence_parallel: Split activations along the sequence between the tp ranks; saves memory at no cost.
        num_microbatches: Microbatches per optimizer step; more of them keep a pipeline busier.
        distributed_optimizer: Shard the optimizer state over the data-parallel ranks (ZeRO-1).
        recompute: Recompute activations in the backward pass: ``selective`` (core attention) or ``full`` (layers).
        recompute_method: For ``full``: ``uniform`` (all layers) or ``block`` (the first ones of each stage).
        recompute_num_layers: For ``full``: layers per group (uniform) or per stage (block).
        overlap_communication: Reduce gradients and gather parameters while computing; None: on GPUs with dp > 1.
        load_weights_only: ``ckpt_path`` gives only weights: training starts anew from them.
        transformer_config_overrides: Fields of Megatron's ``TransformerConfig`` to set by hand.
        process_group_backend: ``nccl`` or ``gloo``; None: what fits the device.
        timeout: How long a collective may wait for other ranks before the run is given up.

    Raises:
        ConfigError: If the sizes do not fit together.
    """

    is_distributed = True  # Lightning injects samplers and syncs logged values only for strategies that say so

    def __init__(  # noqa: D107 (described on the class)
        self,
        tp: int = 1,
        pp: int = 1,
        vpp: int | None = None,
        cp: int = 1,
        sequence_parallel: bool = False,
        num_microbatches: int = 1,
        distributed_optimizer: bool = True,
        recompute: Literal["selective", "full"] | None = None,
        recompute_method: Literal["uniform", "block"] = "uniform",
        recompute_num_layers: int = 1,
        overlap_communication: bool | None = None,
        load_weights_only: bool = False,
        transformer_config_overrides: dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__()
        self.parallel = ParallelConfig(
            tp=tp, pp=pp, vpp=vpp, cp=cp, sequence_parallel=sequence_parallel, num_microbatches=num_microbatches
        )
        self._recompute = Recompute(granularity=recompute, method=recompute_method, num_layers=recompute_num_layers)
        self.distributed_optimizer = distributed_optimizer
        self.load_weights_only = load_weights_only
        self._overlap_communication = overlap_communication
        self._overrides = dict(transformer_config_overrides or {})
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._topology: Topology | None = None
        self._runtime: Runtime | None = None
        self._schedule: Schedule | None = None
        self._train_step: TrainStep | None = None
        self._step_shape: StepShape | None = None
        self._train_rows: int | None = None
        self.num_nodes = 1

    # ---- what the user may ask ------------------------------------------------------------------------------------

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
        return _ready(self._topology, "setup_environment")

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
        """Whether this rank reads data (tp_rank 0 of the first stage); its batch is broadcast to its copy's ranks."""
        return self.topology.is_data_source

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
        return _ready(self._step_shape, "the first batch").global_batch_size

    @property
    def optimizer_report(self) -> OptimizerReport | None:
        """Gradient norm, overflow and loss scale of the last optimizer step; None before the first."""
        optimizer = next((o for o in self.optimizers if isinstance(o, MegatronOptimizer)), None)
        return optimizer.report if optimizer else None

    @property
    def settings(self) -> EngineSettings:
        """Everything but the model itself that Megatron's config depends on."""
        return EngineSettings(
            parallel=self.parallel,
            dtypes=self._megatron_precision.dtypes,
            device=self.root_device,
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
        """Where Megatron's modules may be called: slot fillers, random streams and, on a CPU, the emulation are active."""
        return _ready(self._runtime, "setup_environment").active()

    # ---- Lightning: construction and launch -----------------------------------------------------------------------

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
        return _ready(self.parallel_devices, "the Trainer")[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices or [])

    @property
    def process_group_backend(self) -> str | None:
        """The backend that was asked for; None for the device's own."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.dp, "rank": self.topology.dp_rank}

    @override
    def _configure_launcher(self) -> None:
        environment = _ready(self.cluster_environment, "the Trainer")
        # The first moment at which the world size is known, before any process is started.
        self.parallel.data_parallel_size(self.num_nodes * self.num_processes)
        if not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        preflight(model.trainer, model, getattr(model.trainer, "datamodule", None))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        environment = _ready(self.cluster_environment, "the Trainer")
        if not environment.creates_processes_externally and self.local_rank > 0:
            die_with_parent()
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(device)
        _init_dist_connection(
            environment, backend, timeout=self._timeout, device_id=device if device.type == "cuda" else None
        )
        self._topology = groups.initialize(self.parallel, self._timeout)
        self._runtime = Runtime(device)
        self._runtime.seed(seed_of_run(), self._topology.pp_rank)

    def set_world_ranks(self) -> None:
        """Tell the environment, and Lightning's rank-zero functions, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    # ---- Lightning: setup -----------------------------------------------------------------------------------------

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.engine():
            yield

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Megatron places and types its own parameters; Lightning's context would do it a second time.
        yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        _ready(self.accelerator, "the Trainer").setup(trainer)
        check_trainer(trainer)
        module = _ready(self.lightning_module, "connect")
        if not isinstance(getattr(module, "model_chunks", None), torch.nn.ModuleList):
            raise ConfigError(
                f"{type(module).__name__} has no model_chunks after configure_model; subclass MegatronModule, or build "
                "an nn.ModuleList of Megatron chunks there"
            )
        self._schedule = None
        self._train_rows = None
        fitting = trainer.state.fn == TrainerFn.FITTING
        with self.engine():
            self.model_to_device()
            module.model_chunks = to_16bit(module.model_chunks, self.settings.dtypes)  # type: ignore[arg-type, assignment]
            if fitting:
                module.model_chunks = to_ddp(module.model_chunks, self.reduction)  # type: ignore[arg-type, assignment]
                self._reset_optimizers_and_schedulers()
                self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.barrier()

    @override
    def model_to_device(self) -> None:
        _ready(self.model, "connect").to(self.root_device)

    def build_optimizer(self, options: OptimizerOptions, lr: float) -> MegatronOptimizer:
        """Megatron's optimizer over the module's chunks, for ``configure_optimizers``. Every rank must call.

        Raises:
            ConfigError: If there is no model to train yet, or an option is impossible.
        """
        module = _ready(self.lightning_module, "connect")
        clip = module.trainer.gradient_clip_val
        context = OptimizerContext(
            dtypes=self.settings.dtypes,
            distributed_optimizer=self.distributed_optimizer,
            overlap_param_gather=self.reduction.overlap and self.distributed_optimizer,
            clip_grad=None if clip is None else float(clip),
            engine=self.engine,
        )
        with self.engine():
            return build_optimizer(self._chunks, options, lr, context)

    @property
    def _chunks(self) -> list[Any]:
        return list(_ready(self.lightning_module, "connect").model_chunks)  # type: ignore[arg-type]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not is_map_style(dataloader):
            return dataloader
        trainer = _ready(self.lightning_module, "connect").trainer
        if trainer.state.stage in _EVALUATING:
            return EvaluationLoader(dataloader)  # type: ignore[arg-type]
        return ResumableLoader(dataloader, self.topology.dp)  # type: ignore[arg-type]

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with torch.inference_mode(False):
            return broadcast_batch(batch, self.topology, device or self.root_device)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, train_step: TrainStep) -> StepOutput:
        """Fill the gradients from one local batch, through all pipeline stages. Every rank must call.

        Args:
            batch: As the DataLoader yields it; rows must be a multiple of ``num_microbatches``, except in a last batch.
            train_step: The objective.

        Returns:
            The losses, the same on every rank, without a graph.
        """
        optimizer = next((o for o in self.optimizers if isinstance(o, MegatronOptimizer)), None)
        if optimizer is None:
            raise ConfigError(
                "configure_optimizers returned no Megatron optimizer; make one with strategy.build_optimizer(...)"
            )
        with self.engine():
            schedule = self._schedule_for(train_step)
            connect_schedule(self._chunks, schedule.finalize_gradients, optimizer.scale_loss)
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            optimizer.clear_gradients()
            prepared = self._whole_microbatches(train_step.prepare_batch(batch), train_step, is_training=True)
            output = schedule.run(prepared, forward_only=False)
        self._step_shape = output.shape
        return output

    def forward_only(self, batch: Batch, train_step: TrainStep) -> StepOutput:
        """The losses of one local batch without gradients. Every rank must call; ragged batches are filled up."""
        # Megatron caches tensors (rotary angles) for later training steps: they must not be inference tensors.
        with self.engine(), torch.inference_mode(False), torch.no_grad():
            prepared = self._whole_microbatches(train_step.prepare_batch(batch), train_step, is_training=False)
            output = self._schedule_for(train_step).run(prepared, forward_only=True)
        self._step_shape = self._step_shape or output.shape
        return output

    def _schedule_for(self, train_step: TrainStep) -> Schedule:
        if self._schedule is None or self._train_step is not train_step:
            self._schedule = Schedule(self._chunks, train_step, self.topology)
            self._train_step = train_step
        return self._schedule

    def _whole_microbatches(self, batch: Batch, train_step: TrainStep, *, is_training: bool) -> Batch:
        """The batch with rows that carry no loss added until ``num_microbatches`` divides them."""
        rows = next(iter(batch.values())).shape[0]
        whole = -(-rows // self.num_microbatches) * self.num_microbatches
        if is_training and self._train_rows is None:
            self._train_rows = rows
        if rows == whole:
            return batch
        if is_training and rows == self._train_rows:
            raise ConfigError(
                f"a batch of {rows} rows cannot be cut into num_microbatches={self.num_microbatches} equal parts; use a "
                f"batch_size of {whole} (= micro_batch_size x num_microbatches)"
            )
        return train_step.pad_rows(batch, whole)

    @override
    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Nothing: Megatron's schedule has run the backward pass of every microbatch."""
        return closure_loss

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
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    def _run_state(self, *, with_optimizer: bool) -> checkpoint.RunState:
        module = _ready(self.lightning_module, "connect")
        optimizer = next((o for o in self.optimizers if isinstance(o, MegatronOptimizer)), None)
        return checkpoint.RunState(
            chunks=self._chunks,
            optimizer=optimizer if with_optimizer else None,
            rng=_ready(_ready(self._runtime, "setup_environment").rng, "setup_environment"),
            topology=self.topology,
            model_description=getattr(module, "model_description", {}),
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whatever the module holds besides Megatron's chunks (metrics, extra heads): equal on all ranks."""
        state = _ready(self.lightning_module, "connect").state_dict()
        return {name: value for name, value in state.items() if not name.startswith("model_chunks.")}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        _ready(self.lightning_module, "connect").load_state_dict(checkpoint["state_dict"], strict=False)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: its presence in Lightning's dict says that the sharded optimizer state belongs into the checkpoint."""
        return {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: ``load_checkpoint`` has done it."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(str(filepath)))
        run = self._run_state(with_optimizer="optimizer_states" in checkpoint)
        with self.engine():
            save_lightning_checkpoint(run, checkpoint, path)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        fitting = _ready(self.lightning_module, "connect").trainer.state.fn == TrainerFn.FITTING
        run = self._run_state(with_optimizer=fitting and not self.load_weights_only)
        with self.engine():
            loaded = load_lightning_checkpoint(run, path)
            if fitting and self.load_weights_only:
                for optimizer in self.optimizers:
                    optimizer.inner.reload_model_params()  # type: ignore[attr-defined]
        return only_weights(loaded) if fitting and self.load_weights_only else loaded

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))

    # ---- end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        # Not super().teardown(): it would move the module and the optimizer to the CPU, out of Megatron's buffers.
        # The process groups stay for the next fit or validate.
        _ready(self.cluster_environment, "the Trainer").teardown()
        self.precision_plugin.teardown()
        _ready(self.accelerator, "the Trainer").teardown()


T = TypeVar("T")


def _ready(value: T | None, hook: str) -> T:
    """``value``, which Lightning sets in ``hook``.

    Raises:
        RuntimeError: If it is asked for too early.
    """
    if value is None:
        raise RuntimeError(f"this is only known after {hook}; use it from within Trainer.fit, validate or test")
    return value
