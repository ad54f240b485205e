"""``MegatronStrategy``: Lightning's hooks on Megatron-Core, in calling order; and the launcher of its ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_megatron.checkpoint.load import LoadFrom, read_weights
from lightning_megatron.checkpoint.save import write_weights
from lightning_megatron.checkpoint.state import EXPERT_BIAS, RunState
from lightning_megatron.data.broadcast import broadcast_batch
from lightning_megatron.data.evaluation_loader import EvaluationLoader
from lightning_megatron.data.loader import TrainLoader
from lightning_megatron.data.resumable import (
    OneShotIterator,
    ResumableLoader,
    is_map_style,
    resize_batches,
)
from lightning_megatron.data.stateful import (
    StatefulLoader,
    divides_among_ranks,
    is_stream,
    reads_everything,
    restarts_workers,
    why_loader_is_not_exact,
)
from lightning_megatron.data.stream_loader import Replicas, StreamLoader
from lightning_megatron.data.workers import let_workers_end
from lightning_megatron.engine import groups
from lightning_megatron.engine.collectives import call_on_all_ranks
from lightning_megatron.engine.finite_check import FiniteCheck
from lightning_megatron.engine.microbatch_graph import MicrobatchGraphs
from lightning_megatron.engine.ops.fp8 import known_recipe
from lightning_megatron.engine.ops.matrix_shards import Matrices
from lightning_megatron.engine.optimizer import (
    Gradients,
    MegatronOptimizer,
    OptimizerContext,
    OptimizerReport,
)
from lightning_megatron.engine.optimizer_options import OptimizerOptions
from lightning_megatron.engine.overrides import Overrides
from lightning_megatron.engine.parallel import CPCommType, ParallelConfig
from lightning_megatron.engine.runtime import Runtime, run_seed
from lightning_megatron.engine.schedule import Schedule
from lightning_megatron.engine.settings import EngineSettings, Recipe, Recompute
from lightning_megatron.engine.shared_weights import freeze_shared_weights
from lightning_megatron.engine.step import StepOutput, StepShape
from lightning_megatron.engine.weight_average import WeightAverage
from lightning_megatron.engine.wrap import finish_parameter_gathers, to_16bit, to_ddp
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    as_options,
    require_choice,
    require_kind,
    require_number,
    type_of,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.matrices import matrices_of
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.predictions import check_predict_size
from lightning_megatron.run.check import check_graph, check_trainer, check_world_size
from lightning_megatron.run.checkpointing import Checkpointing
from lightning_megatron.run.failures import FailureReport
from lightning_megatron.run.heartbeat import Heartbeat, Watch
from lightning_megatron.run.hooks import (
    EngineLoss,
    check_hooks,
    check_returned_loss,
    check_trained,
    has_own_training_step,
    overrides_clipping,
)
from lightning_megatron.run.launch import ScriptLauncher
from lightning_megatron.run.nonfinite import check_weights
from lightning_megatron.run.ranks import die_with_launcher, elastic_layout
from lightning_megatron.run.rendezvous import connect_ranks
from lightning_megatron.storage.paths import as_path

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.engine.objective import Batch
    from lightning_megatron.engine.schedule import Observer
    from lightning_megatron.steps.base import TrainStep

T = TypeVar("T")
_MAX_SKIPS = 20


@checks_options
class MegatronStrategy(DDPStrategy):
    """Trains one model with Megatron-Core's tensor, pipeline, context, expert, sequence and data parallelism.

    One batch of the DataLoader is one optimizer step of one data-parallel rank: ``micro_batch_size x num_microbatches``
    rows. Losses and metrics are the same on every rank. Runs on GPUs (NCCL) and on CPUs (gloo).

    Args:
        tp: Tensor parallel size: ranks that split the attention heads and the MLP of each layer.
        pp: Pipeline parallel size: stages that split the layers.
        vpp: Model chunks per pipeline stage (interleaved schedule); needs ``num_microbatches`` to be a multiple of pp.
        cp: Context parallel size: ranks that split each sequence, whose length must be a multiple of 2 x cp.
        sequence_parallel: Split activations along the sequence over the tp ranks; saves memory at no cost.
        num_microbatches: Microbatches per optimizer step; more of them keep a pipeline busier. If torchrun or a
            scheduler starts fewer nodes than ``num_nodes``, each data-parallel replica takes proportionally more.
        distributed_optimizer: Shard the optimizer state over the data-parallel ranks (ZeRO-1).
        recompute: Recompute activations in the backward pass: ``selective`` (norms and the MLP's activation: a third of
            a layer's memory for 2 % of its time) or ``full`` (whole layers).
        recompute_method: For ``full``: ``uniform`` (all layers) or ``block`` (the first layers of each stage).
        recompute_num_layers: For ``full``: layers per group (uniform) or per stage (block).
        overlap_communication: Reduce gradients and gather parameters while computing; None: on GPUs with dp x cp > 1.
        load_weights_only: Load only the weights of ``ckpt_path``, without which it is refused: training restarts from
            them.
        load_from: A checkpoint, or a directory of checkpoints: initial weights of a run that resumes from none.
        async_save: Continue training while the files of a checkpoint are written from a copy in host memory.
        transformer_config_overrides: Fields of Megatron's ``TransformerConfig`` to set directly. Fields that an option
            of this package sets are refused, also in the other two overrides.
        timeout: How long a collective may wait for other ranks before the run fails: a timedelta, or seconds.
        on_nan: What to do about a step whose loss or gradients are NaN or infinite: ``raise`` ends the run with the
            weights unchanged (on GPUs one step later, since the host does not wait for them); ``skip`` skips the step
            on all ranks, keeps the learning rates as they are, as after an overflow of ``16-mixed`` (to which
            ``on_nan`` does not apply), and logs ``skipped_steps``. Weights that are not finite themselves end the run
            either way.
        fp8: Multiply in fp8 in the layers' linears, with ``bf16-mixed`` for all else, in training, validation and test;
            generation uses bf16, and checkpoints are those of bf16. ``tensorwise``: one scale per tensor from its
            current values. Needs GPUs of compute capability 8.9 or higher; faster for hidden sizes of 2,048 and more.
        cuda_graphs: Replay each training microbatch as one CUDA graph, without Python in between: for models with short
            kernels (T5-large on one H200 takes 336 instead of 612 ms a step), on GPUs with tp=1 and pp=1. Gradients are
            then reduced after the last microbatch.
        num_layers_in_first_pipeline_stage: Layers of the first stage; the other stages share the rest evenly.
        num_layers_in_last_pipeline_stage: Layers of the last stage, which also computes the output layer: a vocabulary
            of V counts as about V / (12 x hidden_size) layers of a GPT-2.
        optimizer_config_overrides: Fields of Megatron's ``OptimizerConfig`` to set directly, such as a constant
            ``loss_scale`` for ``16-mixed``.
        ddp_config_overrides: Fields of Megatron's ``DistributedDataParallelConfig`` to set directly, such as
            ``bucket_size``, or ``grad_reduce_in_fp32=False`` for 16-bit gradients: half the memory and traffic.
        cp_comm_type: What cp ranks exchange in attention: ``a2a`` (heads for tokens; tp x cp must divide the key/value
            heads), ``all_gather`` (keys and values), or ``auto``: the first of these that the model allows.
        heartbeat: After how many seconds without progress on any rank to end a run of several ranks, with a line that
            names the rank that hangs and where, and with the stacks of all ranks in ``default_root_dir/stacks``.
            None: the run is not watched, and a collective that waits for longer than ``timeout`` ends it.
        ep: Expert parallel size: ranks over which the experts of each layer are distributed, none of them split; must
            divide the number of experts, and tp x cp x dp. With tp > 1 it needs ``sequence_parallel``.
        max_skips_in_a_row: How many steps in a row ``on_nan="skip"`` may skip; one more ends the run. Skipped steps
            before a resume count, too, as do overflows of ``16-mixed`` with its smallest loss scale.
        offload_optimizer: Keep fp32 master weights and moments in pinned host memory, 12 bytes a parameter with AdamW;
            a number from 0 to 1 is the share that is there. An update, still on the GPU and bit for bit the same, takes
            as long as they take to pass the bus. On CPUs they pass buffers in the same way, which saves nothing.

    Raises:
        ConfigError: If the sizes do not fit together.
    """

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

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
        load_from: LoadFrom | str | Path | None = None,
        async_save: bool = False,
        transformer_config_overrides: dict[str, Any] | None = None,
        timeout: timedelta | float = timedelta(minutes=30),  # noqa: B008 (immutable)
        on_nan: Literal["raise", "skip"] = "raise",
        fp8: Recipe | None = None,
        cuda_graphs: bool = False,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
        optimizer_config_overrides: dict[str, Any] | None = None,
        ddp_config_overrides: dict[str, Any] | None = None,
        cp_comm_type: CPCommType = "auto",
        heartbeat: Heartbeat | None = Heartbeat(),  # noqa: B008 (frozen)
        ep: int = 1,
        max_skips_in_a_row: int = _MAX_SKIPS,
        offload_optimizer: bool | float = False,
    ) -> None:
        super().__init__()
        die_with_launcher()
        self.parallel = ParallelConfig(
            tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep,
            cp_comm_type=cp_comm_type,
            sequence_parallel=sequence_parallel,
            num_microbatches=num_microbatches,
            num_layers_in_first_pipeline_stage=num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=num_layers_in_last_pipeline_stage,
        )  # fmt: skip
        self._requested = self.parallel
        """Layout on all ``num_nodes`` nodes; fewer may have been started."""
        self._recompute = Recompute(
            granularity=recompute,
            method=recompute_method,
            num_layers=recompute_num_layers,
        )
        self.distributed_optimizer = distributed_optimizer
        self._overlap_communication = overlap_communication
        self._overrides = Overrides.of(
            transformer_config_overrides,
            optimizer_config_overrides,
            ddp_config_overrides,
        )
        _check_buckets(self._overrides, overlap_communication, cuda_graphs)
        limits = None
        if heartbeat is not None:
            limits = as_options(Heartbeat, heartbeat, "heartbeat")
        self._watch = Watch(limits, timeout)
        self._failures: FailureReport | None = None
        self._topology: groups.Topology | None = None
        self._runtime: Runtime | None = None
        self._schedule: Schedule | None = None
        self.step_shape: StepShape | None = None
        """Rows and tokens of the last step; None before the first."""
        self.weight_average: WeightAverage | None = None
        """Moving average of the weights of the last fit, for the callback ``EMA``; None without that callback."""
        self._weights_to_reshard: Path | None = None
        self._has_warned_of_clipping = False
        self._engine_losses: list[EngineLoss] = []
        """Of the forward and backward passes within one ``training_step``."""
        self._common_batches = math.inf
        """Remaining prediction batches that every rank has; not counted in other stages."""
        self._loader_marks_steps = False
        """Whether the loader of training data calls ``at_step_boundary``."""
        self.load_weights_only = load_weights_only
        self.checkpointing = Checkpointing(self, load_from=load_from, async_save=async_save)
        _check_skipping(on_nan, max_skips_in_a_row)
        self.max_skips_in_a_row = max_skips_in_a_row
        self.on_nan = on_nan
        self.cuda_graphs = cuda_graphs
        self.fp8 = known_recipe(fp8)
        self.offload_optimizer = _share(offload_optimizer)
        """Share of the optimizer's state in host memory, from 0 to 1."""

    # ---- sizes, ranks and settings -----------------------------------------------------------------------------------

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
        """Model chunks per pipeline stage; None for one that is not interleaved."""
        return self.parallel.vpp

    @property
    def cp(self) -> int:
        """Context parallel size."""
        return self.parallel.cp

    @property
    def ep(self) -> int:
        """Expert parallel size."""
        return self.parallel.ep

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence over the tp ranks."""
        return self.parallel.sequence_parallel

    @property
    def num_microbatches(self) -> int:
        """Microbatches per optimizer step, after the launch those of the nodes that were started."""
        return self.parallel.num_microbatches

    @property
    def topology(self) -> groups.Topology:
        """Process groups, and this rank's position on every parallel axis.

        Raises:
            RuntimeError: Before ``setup_environment``.
        """
        return ready(self._topology, "setup_environment")

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.parallel.data_parallel_size(self.num_nodes * self.num_processes)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the data-parallel replica that this rank is part of."""
        return self.topology.dp_rank

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks with the same shard, one per replica; batch metrics are reduced over it."""
        return self.topology.dp_group

    @property
    def is_data_source(self) -> bool:
        """Whether this rank reads data: the first rank of its replica, which broadcasts each batch to the others."""
        return self.topology.is_data_source

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage, which computes the loss."""
        return self.topology.is_last_stage

    @property
    def global_batch_size(self) -> int:
        """Rows per optimizer step over all ranks.

        Raises:
            RuntimeError: Before the first batch, which determines the micro batch size.
        """
        return ready(self.step_shape, "the first batch").global_batch_size

    @property
    def optimizer_report(self) -> OptimizerReport | None:
        """Gradient norm, overflow and loss scale of the last step, for which it may wait; None before the first."""
        optimizer = self.megatron_optimizer
        return None if optimizer is None else optimizer.report

    @property
    def megatron_optimizer(self) -> MegatronOptimizer | None:
        """The engine's optimizer; None before ``configure_optimizers``."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, MegatronOptimizer):
                return optimizer
        return None

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Process group of all ranks, over gloo."""
        return groups.host_group(self._watch.collective_timeout)

    @property
    def _module(self) -> pl.LightningModule:
        return ready(self.lightning_module, "connect")

    @property
    def chunks(self) -> list[Any]:
        """This rank's model chunks."""
        return list(self._module.model_chunks)  # type: ignore[arg-type]

    @property
    def settings(self) -> EngineSettings:
        """Everything that Megatron's config depends on besides the model."""
        overlap = self._overlap_communication
        if overlap is None:
            dp_cp = self.data_parallel_size * self.parallel.cp
            overlap = self.root_device.type == "cuda" and dp_cp > 1 and not self.cuda_graphs
        return EngineSettings(
            parallel=self.parallel,
            params_dtype=MegatronPrecision.adopt(self._precision_plugin).params_dtype,
            device=self.root_device,
            distributed_optimizer=self.distributed_optimizer,
            overlap_communication=overlap,
            recompute=self._recompute,
            overrides=self._overrides,
            fp8=self.fp8,
            cuda_graphs=self.cuda_graphs,
            offload_optimizer=self.offload_optimizer,
        )

    def engine(self) -> AbstractContextManager[None]:
        """Context for calls of Megatron's modules: the engine's ops, random streams and CPU emulation are active."""
        return ready(self._runtime, "setup_environment").active()

    @DDPStrategy.precision_plugin.setter  # type: ignore[attr-defined, untyped-decorator]
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Convert Lightning's plugin, which only selects the engine's dtypes."""
        # None stays None: Lightning would take a plugin for the user's, and ignore the Trainer's precision.
        self._precision_plugin = None if plugin is None else MegatronPrecision.adopt(plugin)

    @DDPStrategy.checkpoint_io.setter  # type: ignore[attr-defined, untyped-decorator]
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        """Refuse a plugin of the user, which would never be called."""
        raise ConfigError(
            f"checkpoint plugin {type(plugin).__name__}: expected none, since ranks write their own shards; leave it "
            "out (MegatronStrategy(async_save=True) saves in the background)"
        )

    # ---- Lightning: construction and launch -----------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.dp, "rank": self.topology.dp_rank}

    @override
    def _configure_launcher(self) -> None:
        environment = ready(self.cluster_environment, "the Trainer")
        # Here the world size is known for the first time, and no process is started yet.
        self.parallel, self.num_nodes = elastic_layout(
            self._requested, environment, self.num_processes, self.num_nodes
        )
        check_world_size(environment, self.num_processes, self.num_nodes)
        self.parallel.data_parallel_size(self.num_nodes * self.num_processes)
        if self.root_device.type == "cuda" and self.tp > 1:
            # Communication then starts in the order in which it was queued relative to computation, with which
            # Megatron's tensor parallelism overlaps it. CUDA reads the variable once, for its first context.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        environment = ready(self.cluster_environment, "the Trainer")
        if environment.creates_processes_externally:  # otherwise the launcher has checked the run
            trainer = model.trainer
            self.check_run(trainer, model, getattr(trainer, "datamodule", None))

    def check_run(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None,
    ) -> None:
        """Check Trainer, module and data module, before a process group or a file exists. Does not communicate.

        Raises:
            ConfigError: For the first problem found.
        """
        parallel = self.parallel
        is_replica_of_several = parallel.tp * parallel.pp * parallel.cp > 1
        check_trainer(trainer, is_replica_of_several=is_replica_of_several)
        check_graph(trainer, model)
        if trainer.state.fn in (None, TrainerFn.FITTING):
            self._check_skips()
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm=True: expected False, since no statistics of layers are shared by ranks; leave it out"
            )
        check_hooks(
            model, datamodule, trainer.state.fn, is_replica_of_several=is_replica_of_several
        )
        for part in (model, datamodule):
            check = getattr(part, "check_run", None)
            if check is not None:
                check(self)

    def _check_skips(self) -> None:
        limit = self.max_skips_in_a_row
        skips = self.on_nan == "skip" or self.settings.params_dtype is torch.float16
        if limit != _MAX_SKIPS and not skips:
            raise ConfigError(
                f"max_skips_in_a_row={limit}: expected on_nan='skip', or the overflows of precision='16-mixed', got "
                f"on_nan={self.on_nan!r}, with which no step is skipped; leave it out"
            )

    @override
    def setup_distributed(self) -> None:
        environment = ready(self.cluster_environment, "the Trainer")
        device = self.root_device
        watch = self._watch
        reset_seed()
        self.set_world_ranks()
        watch.prepare(self._module.trainer.default_root_dir, device)
        connect_ranks(
            environment,
            self.num_nodes,
            device,
            watch.timeout,
            watch.collective_timeout,
        )
        self._failures = FailureReport()
        watch.start()
        if self._runtime is not None:
            self._runtime.unpatch()  # of an earlier run that ended without teardown
        self._runtime = Runtime(device)
        self._weights_to_reshard = self._save_to_reshard()
        topology = groups.initialize(self.parallel, watch.collective_timeout)
        self._topology = topology
        self._runtime.patch()
        self._runtime.seed(run_seed(), topology.pp_rank, topology.cp_rank)
        self._common_batches = math.inf
        self.checkpointing.begin(self._module.trainer, environment, self.host_group)

    def _save_to_reshard(self) -> Path | None:
        """Save the weights of a module that was built for another layout, while its process groups still exist."""
        module = self._module
        built_for = getattr(module, "built_for", None)
        if built_for is None or built_for == self.settings:
            return None
        with self.engine():
            return write_weights(self.chunks, as_path(module.trainer.default_root_dir))

    # ---- Lightning: setup -----------------------------------------------------------------------------------------

    @override
    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.engine()

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # Megatron sets device and dtype of its parameters itself

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        ready(self.accelerator, "the Trainer").setup(trainer)
        module = self._module
        if not isinstance(getattr(module, "model_chunks", None), torch.nn.ModuleList):
            raise ConfigError(
                f"{type(module).__name__}.configure_model made no model_chunks; subclass MegatronModule"
            )
        prepare_logging = getattr(module, "prepare_logging", None)
        if prepare_logging is not None:
            prepare_logging(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        settings = self.settings
        with self.engine():
            graphs = MicrobatchGraphs() if self.cuda_graphs else None
            self.model_to_device()
            if self._weights_to_reshard is not None:
                read_weights(self.chunks, self._weights_to_reshard)
                self._weights_to_reshard = None
            module.model_chunks = to_16bit(module.model_chunks, settings.params_dtype, self.fp8)  # type: ignore[arg-type]
            if fitting:
                freeze_shared_weights(self.chunks, self.host_group)
                module.model_chunks = to_ddp(module.model_chunks, settings, graphs)
            self._schedule = Schedule(self.chunks, self.topology, graphs)
            average = self.weight_average
            # Those of a checkpoint are other weights than the average's.
            has_weights_of_fit = not fitting and self.checkpointing.start_checkpoint is None
            is_averaged = average is not None and average.is_of(self.chunks)
            if not (has_weights_of_fit and is_averaged):
                self.weight_average = None
            if fitting:
                if self.megatron_optimizer is not None:
                    self.megatron_optimizer.release_host_memory()  # of an earlier fit
                self._reset_optimizers_and_schedulers()
                self.setup_optimizers(trainer)
                check_trained(module, self.megatron_optimizer)
            self.checkpointing.setup(self._run_state(), fitting=fitting)
        self.barrier()

    def build_optimizer(self, options: OptimizerOptions, lr: float) -> MegatronOptimizer:
        """Build Megatron's optimizer over the module's chunks, for ``configure_optimizers``. Every rank must call.

        Raises:
            ConfigError: If there is no model to train yet, or an option is invalid.
        """
        matrices: dict[torch.nn.Parameter, Matrices] = {}
        if options.name == "muon":
            matrices = matrices_of(self.chunks)
        context = OptimizerContext(
            settings=self.settings,
            engine=self.engine,
            may_skip=self.on_nan == "skip",
            max_skips_in_a_row=self.max_skips_in_a_row,
            matrices=matrices,
        )
        with self.engine():
            return MegatronOptimizer(self.chunks, options, lr, context)

    def average_weights(self, device: torch.device | None) -> None:
        """Keep a moving average of the trained weights, ``weight_average``, in this run and its checkpoints.

        For a callback's ``on_fit_start``: the optimizer exists then, and no checkpoint is loaded yet.

        Args:
            device: Where the average is kept; None: where the weights are.
        """
        optimizer = ready(self.megatron_optimizer, "setup")
        self.weight_average = WeightAverage(self.chunks, optimizer.parts, device)
        self.checkpointing.keep_average(self.weight_average)

    def swap_average_in(self) -> None:
        """Put ``weight_average`` in place of the weights, if there is one; every rank must call.

        It stays there until the end of the evaluation that runs, or until its ``swap_out``.
        """
        if self.weight_average is not None:
            with self.engine():
                self.weight_average.swap_in()

    def _swap_average_out(self) -> None:
        if self.weight_average is not None:
            self.weight_average.swap_out()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._module.trainer
        let_workers_end(dataloader)
        if not trainer.training:
            check_predict_size(dataloader)
            return EvaluationLoader(dataloader) if is_map_style(dataloader) else dataloader
        if isinstance(dataloader, Iterator):
            dataloader = OneShotIterator(dataloader)
        loader = resize_batches(dataloader, self._requested.num_microbatches, self.num_microbatches)
        if is_map_style(loader):
            limit = partial(getattr, trainer, "num_training_batches")
            loader = ResumableLoader(
                loader, self.topology.dp, limit, first_epoch=trainer.current_epoch
            )
            state = self.checkpointing.take_loader_state()
            if state is not None:
                loader.load_state_dict(state)
        elif is_stream(loader) and not isinstance(loader, (StreamLoader, TrainLoader)):
            loader = self._stateful_loader(loader)
        self._loader_marks_steps = False
        if isinstance(loader, (ResumableLoader, StreamLoader, TrainLoader)):
            loader.before_batch = self.checkpointing.at_step_boundary
            self._loader_marks_steps = True
        return loader

    def _stateful_loader(self, loader: Any) -> StatefulLoader:
        """Wrap a loader of a stream, and warn if a resumed run could not go on exactly."""
        reason = why_loader_is_not_exact(loader)
        if reason is not None:
            rank_zero_warn(
                "train_dataloaders: this run cannot resume exactly, and a resumed one repeats or leaves out rows of a"
                f" {reason}"
            )
        if restarts_workers(loader):
            rank_zero_warn(
                "train_dataloaders: expected persistent_workers=False, got True; workers are started anew in each"
                " epoch, each with a copy of the dataset as it is in the main process"
            )
        dp = self.topology.dp
        if dp > 1 and reads_everything(loader):
            rank_zero_warn(
                f"train_dataloaders: each of the {dp} data-parallel replicas reads the whole stream; split it in "
                "train_dataloader: datasets.distributed.split_dataset_by_node(dataset, data_parallel_rank, "
                "data_parallel_size)"
            )
        if dp < self.world_size and divides_among_ranks(loader):
            rank_zero_warn(
                f"train_dataloaders: {type_of(loader)} divides its rows among {self.world_size} ranks, and"
                f" one rank of each of the {dp} data-parallel replicas reads: the parts of the others are left out; use"
                " a layout without model parallelism, or a stream divided by data_parallel_rank"
            )
        replicas = Replicas(
            group=self.host_group,
            is_data_source=self.is_data_source,
            rank=self.topology.dp_rank,
        )
        stateful = StatefulLoader(loader, replicas, self.topology.dp)
        state = self.checkpointing.take_loader_state()
        if state is not None:
            stateful.load_state_dict(state)
        return stateful

    @override
    def batch_to_device(
        self,
        batch: Any,
        device: torch.device | None = None,
        dataloader_idx: int = 0,
    ) -> Any:
        stage = self._module.trainer.state.stage
        check = None
        if stage == RunningStage.PREDICTING:
            self._common_batches -= 1
        else:
            # Prompts are not training batches (a T5's have no labels): predict_step checks them itself.
            train_step = getattr(self._module, "train_step", None)
            check = getattr(train_step, "check_batch", None)
        is_marked = stage == RunningStage.TRAINING and self._loader_marks_steps
        if not is_marked and self._common_batches >= 0:
            self.checkpointing.at_step_boundary()
        with torch.inference_mode(False):
            return broadcast_batch(batch, self.topology, device or self.root_device, check)

    @override
    def reduce(
        self,
        tensor: Any,
        group: dist.ProcessGroup | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> Any:
        """As DDP's, but a ``"sum"`` over all ranks, as ``self.log`` asks for, counts each replica once.

        The ranks of a replica have the same batch: tp=2 would double a number of rows.
        """
        reduced = super().reduce(tensor, group, reduce_op)
        ranks_of_replica = self.world_size // self.data_parallel_size
        if group is None and reduce_op == "sum" and ranks_of_replica > 1:
            return reduced / ranks_of_replica
        return reduced

    @override
    def on_predict_start(self) -> None:
        """Agree on how many batches every rank has: a replica with fewer samples does not repeat any."""
        num_batches = torch.tensor(float(sum(self._module.trainer.num_predict_batches)))
        self._common_batches = float(self.reduce(num_batches, self.host_group, "min"))

    # Lightning calls these after the hooks of all callbacks and of the module, which see the averaged weights.

    @override
    def on_validation_end(self) -> None:
        self._swap_average_out()

    @override
    def on_test_end(self) -> None:
        self._swap_average_out()

    @override
    def on_predict_end(self) -> None:
        self._swap_average_out()

    @override
    def on_train_start(self) -> None:
        self.checkpointing.on_train_start()
        call_on_all_ranks(ready(self._schedule, "setup").check_start)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        changes = ready(self.megatron_optimizer, "setup").weight_changes
        if changes.is_check_due:
            call_on_all_ranks(changes.check)

    # ---- steps ----------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step, and check that the engine's gradients are those of the loss it returns."""
        module = self._module
        self._engine_losses.clear()
        try:
            returned = super().training_step(*args, **kwargs)
        except AttributeError:
            # Of a weight that torch.nn.utils computes since a callback of an earlier step: it has no buffer.
            ready(self._schedule, "setup").check_start()
            raise
        check = partial(check_returned_loss, module, returned, self._engine_losses)
        if has_own_training_step(module):
            self._check_on_all_ranks(check)
        else:
            check()
        return returned

    def _check_on_all_ranks(self, check: Callable[[], None]) -> None:
        """Raise the ConfigError of any rank's ``check`` on all ranks; without an error it costs one small reduction.

        A rank whose engine has not run raises at once: the others may be waiting for it in a collective.
        """
        error: ConfigError | None = None
        try:
            check()
        except ConfigError as caught:
            error = caught
        if error is not None and not self._engine_losses:
            raise error
        has_failed = torch.tensor(float(error is not None))
        dist.all_reduce(has_failed, dist.ReduceOp.MAX, group=self.host_group)
        if has_failed:
            call_on_all_ranks(check)

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run closure and update; warn once of a clipping hook that clips nothing, as torch's functions would."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        module = self._module
        is_unclipped = isinstance(optimizer, MegatronOptimizer) and not optimizer.clip_grad
        if is_unclipped and not self._has_warned_of_clipping and overrides_clipping(module):
            self._has_warned_of_clipping = True
            rank_zero_warn(
                f"{type(module).__name__}.configure_gradient_clipping: expected a call of self.clip_gradients(...), "
                "got none in this step, whose gradients are not clipped; torch's own functions find none, since "
                "parameters have no .grad here"
            )
        return result

    def forward_backward(self, batch: Batch, train_step: TrainStep) -> StepOutput:
        """Run forward and backward of one local batch through all pipeline stages. Every rank must call.

        Args:
            batch: As the DataLoader yields it; rows must be a multiple of ``num_microbatches``, except in a last batch.
            train_step: The objective.

        Returns:
            The losses, the same on every rank, detached.
        """
        optimizer = ready(self.megatron_optimizer, "setup")
        schedule = ready(self._schedule, "setup")
        trainer = self._module.trainer
        data: Any = getattr(trainer, "datamodule", None)
        fixed_rows = None
        if getattr(data, "rampup", None) is not None:
            fixed_rows = data.micro_batch_size
        with self.engine():
            output = schedule.train(batch, train_step, optimizer, fixed_rows)
        self._engine_losses.append(EngineLoss.of(output.loss))
        self.step_shape = output.shape
        limit = self.max_skips_in_a_row if self.on_nan == "skip" else 0
        check_finite = FiniteCheck(
            output=output,
            objective=type(train_step).__name__,
            step=trainer.global_step,
            max_skips=limit,
            skips_in_a_row=optimizer.skips_in_a_row,
            dp_rank=self.data_parallel_rank,
            group=self.host_group,
            check_weights=partial(self._check_weights, optimizer, trainer.global_step),
        )
        optimizer.accept(Gradients(output.loss, check_finite))
        return output

    def _check_weights(self, optimizer: MegatronOptimizer, step: int) -> None:
        """Raise on all ranks if weights are not finite. Every rank must call.

        Raises:
            NonFiniteError: If so.
        """
        origin = None if optimizer.has_updated else self.checkpointing.weight_origin
        model = getattr(self._module, "model_config", None)
        check_weights(self.chunks, step=step, origin=origin, model=model, group=self.host_group)

    def forward_only(
        self, batch: Batch, train_step: TrainStep, observe: Observer | None = None
    ) -> StepOutput:
        """Compute the losses of one local batch without gradients. Every rank must call; ragged batches are padded.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            observe: Called on the last stage with each prepared microbatch and the model's output for it.
        """
        # Megatron caches tensors (rotary angles) for later training steps: they must not be inference tensors.
        with self.engine(), torch.inference_mode(False), torch.no_grad():
            output = ready(self._schedule, "setup").evaluate(batch, train_step, observe)
        self.step_shape = self.step_shape or output.shape
        return output

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _run_state(self) -> RunState:
        module = self._module
        has_bias = self._overrides.transformer.get("moe_router_enable_expert_bias")
        description = dict(getattr(module, "model_description", {}))
        if has_bias:
            description[EXPERT_BIAS] = True
        adaptation = getattr(module, "adaptation", None)
        return RunState(
            chunks=self.chunks,
            optimizer=self.megatron_optimizer,
            runtime=ready(self._runtime, "setup_environment"),
            topology=self.topology,
            model_description=description,
            hugging_face_config=getattr(module, "hugging_face_config", None),
            base=getattr(adaptation, "base", None),
            average=self.weight_average,
        )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State dict of the module without Megatron's chunks (metrics, extra heads); the same on all ranks."""
        state = self._module.state_dict()
        return {
            name: value for name, value in state.items() if not name.startswith("model_chunks.")
        }

    @override
    def load_model_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
    ) -> None:
        """Load what ``lightning_module_state_dict`` returned; the chunks are loaded by each rank from its shards."""
        keys = self._module.load_state_dict(checkpoint["state_dict"], strict=False)
        missing = [name for name in keys.missing_keys if not name.startswith("model_chunks.")]
        if strict and (missing or keys.unexpected_keys):
            raise CheckpointError(
                f"state of {type(self._module).__name__} in the checkpoint: expected the module's own names, got "
                f"{keys.unexpected_keys} and not {missing}; set strict_loading = False on the module to pass over them"
            )

    @override
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        self.checkpointing.save(checkpoint, filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpointing.load(checkpoint_path)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.checkpointing.remove(as_path(filepath))

    # ---- end ------------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        with self.engine():
            finish_parameter_gathers(self.chunks)
        self.checkpointing.on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._failures is not None:
            self._failures.announce(exception)
        self.checkpointing.on_exception(exception)

    @override
    def teardown(self) -> None:
        # Not super().teardown(): it would move the module and the optimizer to the CPU, out of Megatron's buffers.
        # The process groups stay for the next fit or validate.
        self.checkpointing.end()
        if self.checkpointing.is_preempted:
            self.barrier()  # after a rank that exits earlier, Lightning's launcher would kill the others (code 137)
        self._watch.stop()
        if self._runtime is not None:
            self._runtime.unpatch()
        ready(self.cluster_environment, "the Trainer").teardown()
        self.precision_plugin.teardown()
        ready(self.accelerator, "the Trainer").teardown()


def _check_skipping(on_nan: str, max_skips_in_a_row: int) -> None:
    require_choice("on_nan", on_nan, ("raise", "skip"))
    require_kind("max_skips_in_a_row", max_skips_in_a_row, "int")
    require_number("max_skips_in_a_row", max_skips_in_a_row, at_least=1)


def _check_buckets(overrides: Overrides, overlap: bool | None, cuda_graphs: bool) -> None:
    """Refuse sizes of messages that would not be cut. Where there is nothing to overlap, they are no mistake.

    megatron-core 0.16.1, distributed/distributed_data_parallel.py: all gradients are one bucket then.
    """
    size = overrides.ddp.get("bucket_size")
    if size is None or (overlap is not False and not cuda_graphs):
        return
    got = "cuda_graphs=True" if cuda_graphs else "overlap_communication=False"
    raise ConfigError(
        f"ddp_config_overrides: bucket_size={size}: expected gradients that are reduced in the backward pass, by "
        f"messages of this size, got {got}; leave one of them out"
    )


def _share(offload_optimizer: bool | float) -> float:
    if isinstance(offload_optimizer, bool):
        return float(offload_optimizer)
    require_number("offload_optimizer", offload_optimizer, at_most=1)
    return float(offload_optimizer)


def ready(value: T | None, hook: str) -> T:
    """Return ``value``, which ``hook`` of Lightning sets.

    Raises:
        RuntimeError: If it is still None.
    """
    if value is None:
        raise RuntimeError(
            f"this is only known after {hook}; use it from within Trainer.fit, validate or test"
        )
    return value
