"""How does Lightning's Trainer drive Megatron-Core? ``MegatronStrategy``: Lightning's hooks in calling order."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device, _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_megatron.checkpointing import Checkpointing
from lightning_megatron.data.broadcast import broadcast_batch
from lightning_megatron.data.loader import EvaluationLoader, ResumableLoader, TrainLoader, is_map_style
from lightning_megatron.engine import groups
from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.launch import allow_overlap, die_with_launcher, seed_of_run
from lightning_megatron.engine.optimizer import (
    MegatronOptimizer,
    OptimizerContext,
    OptimizerOptions,
    build_optimizer,
)
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.relayout import read_weights, write_weights
from lightning_megatron.engine.replicas import freeze_alike
from lightning_megatron.engine.runtime import Runtime
from lightning_megatron.engine.schedule import StepOutput, StepShape, culprit
from lightning_megatron.engine.signals import DeferredSignals
from lightning_megatron.engine.stepper import Stepper
from lightning_megatron.engine.wrap import to_16bit, to_ddp
from lightning_megatron.errors import ConfigError, NonFiniteError
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.launcher import ScriptLauncher, check_world_size, meeting
from lightning_megatron.load_from import LoadFrom, as_load_from
from lightning_megatron.models.transformer_config import Recompute
from lightning_megatron.preflight import check_trainer, preflight
from lightning_megatron.rows_for_copies import check_rows_for_copies
from lightning_megatron.saves import Saves
from lightning_megatron.strategy_state import ready

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_megatron.engine.schedule import Observer
    from lightning_megatron.steps.base import Batch, TrainStep

__all__ = ["MegatronStrategy", "preflight"]

_EVALUATING = (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING, RunningStage.TESTING, RunningStage.PREDICTING)


@explains_options
class MegatronStrategy(Checkpointing):
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
        load_from: A checkpoint, or folder of some, that gives a run its weights if ``ckpt_path`` gives it nothing.
        async_save: Train on while the files of a checkpoint are written, from a copy in the host's memory.
        transformer_config_overrides: Fields of Megatron's ``TransformerConfig`` to set by hand.
        timeout: How long a collective may wait for other ranks before the run is given up.
        on_nan: What a step does whose loss or gradients are NaN or infinite: ``raise`` ends the run before the weights
            change, ``skip`` leaves the step out on all ranks, and learning rates stay where they are, as after an
            overflow of ``16-mixed`` (which is none of these); ``skipped_steps`` is logged.

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
        load_from: LoadFrom | str | Path | None = None,
        async_save: bool = False,
        transformer_config_overrides: dict[str, Any] | None = None,
        timeout: timedelta = timedelta(minutes=30),  # noqa: B008 (immutable)
        on_nan: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__()
        die_with_launcher()
        self.parallel = ParallelConfig(
            tp=tp, pp=pp, vpp=vpp, cp=cp, sequence_parallel=sequence_parallel, num_microbatches=num_microbatches
        )
        self._recompute = Recompute(granularity=recompute, method=recompute_method, num_layers=recompute_num_layers)
        self.distributed_optimizer = distributed_optimizer
        self.load_weights_only = load_weights_only
        self._overlap_communication = overlap_communication
        self._overrides = dict(transformer_config_overrides or {})
        self._timeout = timeout
        self._topology: Topology | None = None
        self._runtime: Runtime | None = None
        self._stepper: Stepper | None = None
        self._step_shape: StepShape | None = None
        self._microbatch_losses = torch.zeros(0)
        self._weights_of_other_layout: Path | None = None
        self._loader_state: dict[str, Any] | None = None
        self._signals: DeferredSignals | None = None
        self._load_from, self._beginning = as_load_from(load_from), None
        self._is_delivering_signals = False
        self._is_trained = self._is_preempted = False
        self._first_step: int | None = None
        self._loader_tells_steps = False
        self._shared_batches: float = math.inf
        self._saves = Saves(asynchronous=async_save)
        if on_nan not in ("raise", "skip"):
            raise ConfigError(f"on_nan={on_nan!r} is unknown; choose 'raise' or 'skip'")
        self.on_nan = on_nan
        self.num_nodes = 1

    # ---- Lightning: construction and launch -----------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.topology.dp, "rank": self.topology.dp_rank}

    @override
    def _configure_launcher(self) -> None:
        environment = ready(self.cluster_environment, "the Trainer")
        # The first moment at which the world size is known, before any process is started.
        check_world_size(environment, self.num_processes, self.num_nodes)
        self.parallel.data_parallel_size(self.num_nodes * self.num_processes)
        if self.root_device.type == "cuda" and self.tp > 1:
            allow_overlap()
        self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        preflight(model.trainer, model, getattr(model.trainer, "datamodule", None))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        environment = ready(self.cluster_environment, "the Trainer")
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        backend = _get_default_process_group_backend_for_device(device)
        with meeting(environment, self.num_nodes, self._timeout):
            _init_dist_connection(
                environment, backend, timeout=self._timeout, device_id=device if device.type == "cuda" else None
            )
        self._runtime = Runtime(device)
        self._weights_of_other_layout = self._keep_weights()
        self._topology = groups.initialize(self.parallel, self._timeout)
        self._runtime.seed(seed_of_run(), self._topology.pp_rank)
        self._signals = DeferredSignals(self._signums, groups.host_group(self._timeout))
        self._is_trained, self._first_step = False, None
        self._shared_batches = math.inf
        self._saves.begin()

    def _keep_weights(self) -> Path | None:
        """Weights of a module that another Trainer has built for another layout, before its groups are gone."""
        module = ready(self.lightning_module, "connect")
        built_for = getattr(module, "built_for", None)
        if built_for is None or built_for == self.settings:
            return None
        with self.engine():
            return write_weights(self._chunks, Path(module.trainer.default_root_dir))

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
        ready(self.accelerator, "the Trainer").setup(trainer)
        check_trainer(trainer)
        module = ready(self.lightning_module, "connect")
        if not isinstance(getattr(module, "model_chunks", None), torch.nn.ModuleList):
            raise ConfigError(
                f"{type(module).__name__} has no model_chunks after configure_model; subclass MegatronModule, or build "
                "an nn.ModuleList of Megatron chunks there"
            )
        fitting = trainer.state.fn == TrainerFn.FITTING
        with self.engine():
            self.model_to_device()
            if self._weights_of_other_layout is not None:
                read_weights(self._chunks, self._weights_of_other_layout)
                self._weights_of_other_layout = None
            module.model_chunks = to_16bit(module.model_chunks, self.settings.dtypes)  # type: ignore[arg-type]
            if fitting:
                freeze_alike(self._chunks, groups.host_group(self._timeout))
                module.model_chunks = to_ddp(module.model_chunks, self.reduction)
            self._stepper = Stepper(self._chunks, self.topology)
            if fitting:
                self._reset_optimizers_and_schedulers()
                self.setup_optimizers(trainer)
            self._load_new_runs_weights(fitting=fitting)
        self.setup_precision_plugin()
        self.barrier()

    @override
    def model_to_device(self) -> None:
        ready(self.model, "connect").to(self.root_device)

    def build_optimizer(self, options: OptimizerOptions, lr: float) -> MegatronOptimizer:
        """Megatron's optimizer over the module's chunks, for ``configure_optimizers``. Every rank must call.

        Raises:
            ConfigError: If there is no model to train yet, or an option is impossible.
        """
        module = ready(self.lightning_module, "connect")
        clip = module.trainer.gradient_clip_val
        context = OptimizerContext(
            dtypes=self.settings.dtypes,
            distributed_optimizer=self.distributed_optimizer,
            overlap_param_gather=self.reduction.overlap and self.distributed_optimizer,
            clip_grad=None if clip is None else float(clip),
            engine=self.engine,
            refuse_step=self._refuse_step,
        )
        with self.engine():
            return build_optimizer(self._chunks, options, lr, context)

    @property
    def _steps(self) -> Stepper:
        return ready(self._stepper, "setup")

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = ready(self.lightning_module, "connect").trainer
        if trainer.state.stage in _EVALUATING:
            check_rows_for_copies(dataloader)
            return EvaluationLoader(dataloader) if is_map_style(dataloader) else dataloader
        loader = self._resumable(dataloader) if is_map_style(dataloader) else dataloader
        self._loader_tells_steps = isinstance(loader, (ResumableLoader, TrainLoader))
        if isinstance(loader, (ResumableLoader, TrainLoader)):
            loader.before_batch = self._at_step_boundary
        return loader

    def _resumable(self, dataloader: DataLoader[Any]) -> ResumableLoader:
        trainer = ready(self.lightning_module, "connect").trainer
        limit = lambda: trainer.num_training_batches  # noqa: E731
        loader = ResumableLoader(dataloader, self.topology.dp, limit, first_epoch=trainer.current_epoch)
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
            self._loader_state = None
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        stage = ready(self.lightning_module, "connect").trainer.state.stage
        if stage == RunningStage.PREDICTING:
            self._shared_batches -= 1
        if (stage in _EVALUATING or not self._loader_tells_steps) and self._shared_batches >= 0:
            self._at_step_boundary()
        check = getattr(self.lightning_module, "check_batch", None)
        with torch.inference_mode(False):
            return broadcast_batch(batch, self.topology, device or self.root_device, check)

    @override
    def on_predict_start(self) -> None:
        """Find out before how many batches all ranks can meet: no sample is repeated for a copy that has fewer."""
        numbers = ready(self.lightning_module, "connect").trainer.num_predict_batches
        fewest = torch.tensor(float(sum(numbers)))
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=groups.host_group(self._timeout))
        self._shared_batches = float(fewest)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        on_all_ranks_alike(self._steps.check_frozen)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, train_step: TrainStep) -> StepOutput:
        """Fill the gradients from one local batch, through all pipeline stages. Every rank must call.

        Args:
            batch: As the DataLoader yields it; rows must be a multiple of ``num_microbatches``, except in a last batch.
            train_step: The objective.

        Returns:
            The losses, the same on every rank, without a graph.
        """
        if (optimizer := self._megatron_optimizer) is None:
            raise ConfigError(
                "configure_optimizers returned no Megatron optimizer; make one with strategy.build_optimizer(...)"
            )
        with self.engine():
            output = self._steps.train(batch, train_step, optimizer, self._ramped_micro_batch_size)
        optimizer.loss, self._microbatch_losses = output.loss, output.microbatch_losses
        self._step_shape = output.shape
        return output

    def _refuse_step(self) -> None:
        """Say which rank has made this step's loss or gradients NaN or infinite; every rank must call.

        Raises:
            NonFiniteError: Unless such steps are skipped.
        """
        trainer = ready(self.lightning_module, "connect").trainer
        group = groups.host_group(self._timeout)
        what = f"step {trainer.global_step}: {culprit(self._microbatch_losses, self.topology, group)}"
        if self.on_nan == "raise":
            raise NonFiniteError(
                f"{what}; expected finite numbers. The weights are as before the step: look at that batch and the "
                'learning rate, or leave such steps out with MegatronStrategy(on_nan="skip")'
            )
        rank_zero_warn(f"{what}; the step is skipped")

    def forward_only(self, batch: Batch, train_step: TrainStep, observe: Observer | None = None) -> StepOutput:
        """The losses of one local batch without gradients. Every rank must call; ragged batches are filled up.

        Args:
            batch: As the DataLoader yields it.
            train_step: The objective.
            observe: Called on the last stage with each prepared microbatch and what the model returned for it.
        """
        # Megatron caches tensors (rotary angles) for later training steps: they must not be inference tensors.
        with self.engine(), torch.inference_mode(False), torch.no_grad():
            output = self._steps.evaluate(batch, train_step, observe)
        self._step_shape = self._step_shape or output.shape
        return output

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Nothing: Megatron's schedule has run the backward pass of every microbatch."""
        return closure_loss

    # ---- end ------------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        # Not super().teardown(): it would move the module and the optimizer to the CPU, out of Megatron's buffers.
        # The process groups stay for the next fit or validate.
        self._saves.end()
        if self._is_preempted:
            self.barrier()  # a rank that ends earlier would have Lightning's launcher kill the others (code 137)
        ready(self.cluster_environment, "the Trainer").teardown()
        self.precision_plugin.teardown()
        ready(self.accelerator, "the Trainer").teardown()
