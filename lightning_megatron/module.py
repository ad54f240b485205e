"""``MegatronModule``: a LightningModule of a Hugging Face model, an objective and an optimizer, without user code."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy, deepcopy
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron.callbacks.memory_estimate import MemoryEstimate
from lightning_megatron.callbacks.model_summary import whole_summaries
from lightning_megatron.checkpoint.load import LoadFrom
from lightning_megatron.checkpoint.meta import load_meta
from lightning_megatron.convert import ExpertFormat
from lightning_megatron.convert.companions import generation_config
from lightning_megatron.convert.frozen_model import FrozenWeights
from lightning_megatron.convert.hugging_face import (
    check_num_layers,
    load_hugging_face,
    resolve_tied_output,
)
from lightning_megatron.convert.hugging_face_saving import save_hugging_face
from lightning_megatron.convert.peft import (
    LoRA,
    adaptation,
    check_expert_format,
    load_adapter,
    save_adapter,
)
from lightning_megatron.convert.registry import (
    config_fields,
    config_object,
    model_config,
    with_labels,
)
from lightning_megatron.convert.weight_files import open_weights
from lightning_megatron.engine.collectives import (
    call_on_all_ranks,
    compute_metrics,
    gather_over_replicas,
)
from lightning_megatron.engine.lr_schedule import (
    LRSchedule,
    MegatronLRScheduler,
    scheduler_settings,
)
from lightning_megatron.engine.optimizer_options import OptimizerOptions, check_loss_scaling
from lightning_megatron.engine.runtime import run_seed, unchanged_environment
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    as_options,
    require_number,
    type_of,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.generate.inputs import inputs_from_batch
from lightning_megatron.generate.live_model import GenerationOutput, LiveModel
from lightning_megatron.generate.log_likelihoods import LogLikelihoods
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.special_tokens import (
    SpecialTokens,
    special_token_ids,
    with_own_ends,
)
from lightning_megatron.models.adapter_names import is_trained_with_lora
from lightning_megatron.models.build import build_chunks, initialize_weights
from lightning_megatron.models.checks import check_model, size_warning
from lightning_megatron.models.config import (
    CLASSIFICATION,
    AttentionHeads,
    ModelConfig,
    Positions,
    ProblemType,
    with_variant,
)
from lightning_megatron.models.lora import freeze_base, merged
from lightning_megatron.models.matrices import check_matrices
from lightning_megatron.planning.host import check_host_state
from lightning_megatron.planning.run import make_run
from lightning_megatron.planning.startup import check_host_memory, startup_lines
from lightning_megatron.steps import train_step_named
from lightning_megatron.steps.base import TrainStep
from lightning_megatron.steps.distillation import DistillationTrainStep
from lightning_megatron.storage.hub import Needed, first_line, local_folder, named_folder
from lightning_megatron.strategy import MegatronStrategy

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings
    from lightning_megatron.engine.step import StepOutput


@checks_options
class MegatronModule(pl.LightningModule):
    """Trains a Hugging Face model under ``MegatronStrategy``, from its weights or from random ones.

    Logs ``train_loss`` (and each of its terms as ``train_<term>``), ``val_loss``, ``test_loss``, ``lr`` and
    ``grad_norm``, and the objective's metrics (``val_perplexity``, ``val_accuracy``, ...), with the same values on all
    ranks. Subclass it and override any of Lightning's hooks as usual.

    Args:
        model: A Hugging Face config object, a dict of one (with ``model_type``), a path to a ``config.json``, a path to
            a model directory, or the name of a model on the Hugging Face hub, ``org/name`` or ``org/name@revision``.
        train_step: Training objective: ``gpt`` and ``bert`` (that of the ``task``), ``t5``, ``last_word`` (a GPT's
            accuracy on the last word of each text), ``reward`` (a GPT's pairwise loss of rewards), ``dpo`` (direct
            preference optimization with its defaults), or your own ``TrainStep``; None for the default of the
            architecture.
        pretrained: Start from the weights in the directory ``model``; each rank reads only its own shards.
        task: Head of the model, e.g. ``sequence_classification``; None for the one that its config names.
        num_labels: Outputs of a classification head, classes or values; 1 for a reward. None: as in its config.
        problem_type: Kind of the labels of ``sequence_classification``: ``regression``,
            ``single_label_classification`` or ``multi_label_classification``. None: as in its config, or as the
            first batch tells.
        position_embedding_type: For a GPT from scratch: ``absolute``, ``rotary`` or ``alibi``; None: as in its config.
        attention_head_type: For a GPT from scratch: ``multihead`` or ``multiquery``; None: as in its config.
        model_provider: Function that builds the model chunks in place of this package: called with the model config and
            the engine settings, returns an ``nn.ModuleList`` with one Megatron model per virtual stage.
        lr: Peak learning rate.
        optimizer: The optimizer and its hyperparameters.
        lr_schedule: Schedules of learning rate and weight decay.
        generation: Options with which ``Trainer.predict`` generates from the prompts of its batches.
        return_logits: Have ``Trainer.predict`` return the logits of its batches instead (see ``logits``): True on every
            rank of a data-parallel replica, ``last_stage`` on ranks of the last pipeline stage, None elsewhere.
        make_vocab_size_divisible_by: Pad the vocabulary to a multiple of this times tp.
        lora: Train low-rank adapters and freeze the model's weights, except for a classification head; or the
            directory of a ``peft`` adapter to continue from. A weights-only checkpoint then holds the trained weights
            alone if ``pretrained`` names the base weights.

    Raises:
        ConfigError: If the model is unknown, a field of its config is not supported, or it is neither a local path nor
            available from the hub.
    """

    def __init__(  # noqa: D107 (described on the class)
        self,
        model: str | dict[str, Any] | Any,
        train_step: Literal["gpt", "bert", "t5", "last_word", "reward", "dpo"]
        | TrainStep
        | None = None,
        pretrained: bool = False,
        task: str | None = None,
        position_embedding_type: Positions | None = None,
        attention_head_type: AttentionHeads | None = None,
        model_provider: Callable[..., torch.nn.ModuleList] | None = None,
        lr: float = 3e-4,
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 (frozen)
        lr_schedule: LRSchedule = LRSchedule(),  # noqa: B008 (frozen)
        generation: GenerationOptions = GenerationOptions(),  # noqa: B008 (frozen)
        return_logits: bool | Literal["last_stage"] = False,
        make_vocab_size_divisible_by: int = 128,
        lora: LoRA | str | None = None,
        num_labels: int | None = None,
        problem_type: ProblemType | None = None,
    ) -> None:
        super().__init__()
        base = str(model) if pretrained else None
        if isinstance(model, str):
            model = str(local_folder(model, "model" if pretrained else "config"))
        require_number("make_vocab_size_divisible_by", make_vocab_size_divisible_by, at_least=1)
        self._labelled_model = with_labels(model, task, num_labels, problem_type)
        config = replace(
            model_config(self._labelled_model, task),
            make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        )
        self.pretrained_path: Path | None = None
        if pretrained:
            self.pretrained_path = _weights_directory(model)
            config = _compared_with_weights(config, self.pretrained_path)
        self.model_config: ModelConfig = with_variant(
            config,
            position_embedding_type,
            attention_head_type,
        )
        self.is_variant = self.model_config != config
        if pretrained and self.is_variant:
            raise ConfigError(
                "pretrained=True keeps positions and heads; leave out position_embedding_type and attention_head_type"
            )
        self.adaptation = adaptation(lora, base, self.model_config)
        """Low-rank adapters, trained instead of the model's own weights; None without ``lora``."""
        if self.adaptation is not None:
            self.model_config = self.adaptation.apply_to(self.model_config, model_provider)
        self.model_provider = model_provider
        self._set_train_step(train_step)
        require_number("lr", lr)
        self.lr = lr
        self.optimizer_options = as_options(OptimizerOptions, optimizer, "optimizer")
        self.lr_schedule = as_options(LRSchedule, lr_schedule, "lr_schedule")
        self.generation = as_options(GenerationOptions, generation, "generation")
        _check_return_logits(return_logits)
        self.return_logits = return_logits
        self.model_chunks: torch.nn.ModuleList | None = None
        self.built_for: EngineSettings | None = None
        self._frozen_at_build = False
        self._metrics: dict[tuple[str, int], dict[str, Metric]] = {}
        self._step_lr = 0.0
        self._model = model
        fields = with_own_ends(config_fields(self._labelled_model), model)
        self.hugging_face_config: dict[str, Any] | None = None
        """Fields of the model's ``config.json``, with which a checkpoint can be exported to a Hugging Face directory;
        None with a ``model_provider``, which may build any model."""
        self.load_from: LoadFrom | None = None
        """The checkpoint of ``load_from_checkpoint``, which holds the initial weights; None for other modules."""
        if model_provider is None:
            self.hugging_face_config = fields
        given = {
            "model": fields,
            "train_step": train_step,
            "position_embedding_type": position_embedding_type,
            "attention_head_type": attention_head_type,
            "num_labels": num_labels,
            "problem_type": problem_type,
        }
        self.save_hyperparameters(self._plain_arguments(given))

    def _set_train_step(self, given: str | TrainStep | None) -> None:
        """Set the training objective, and the teacher of one that has a teacher.

        Raises:
            ConfigError: If one does not fit the model.
        """
        self.train_step = _train_step(given, self.model_config)
        self.train_step.bind(self.model_config)
        self.teacher = _teacher(self.train_step, self.model_config)
        """The teacher of a ``DistillationTrainStep``, which is built beside the model; None without one."""
        self._teacher_built_for: EngineSettings | None = None

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **hyper_parameters: Any) -> Self:  # type: ignore[override]
        """Create the module of a ``*.ckpt`` directory with its weights; executes no code from the checkpoint.

        The weights are read when a Trainer builds the model, in any layout and by each rank its own shards; or, without
        a Trainer, when ``generate``, ``logits`` or ``forward`` is first called, in one process.

        Args:
            checkpoint_path: A checkpoint of ``MegatronStrategy``, or a directory of checkpoints, whose newest is taken.
            hyper_parameters: Arguments that override the checkpoint's, such as ``lr``; and those that no checkpoint
                stores: your own ``train_step`` or ``model_provider``.

        Raises:
            CheckpointError: If there is no checkpoint, or it is not complete.
            ConfigError: If an argument is unknown or missing, or the checkpoint names a model or tokenizer that is
                neither a directory nor in the hub's cache.
        """
        source = LoadFrom(path=str(checkpoint_path))
        path = source.resolve()
        meta = load_meta(path)
        saved = meta["lightning"].get("hyper_parameters", {})
        if not isinstance(saved, Mapping) or "model" not in saved:
            raise CheckpointError(
                f"checkpoint {path} has no arguments of a MegatronModule; use load_from=PATH"
            )
        arguments = _accepted_arguments(cls, saved)
        # The checkpoint has the weights, and the original model directory may be gone; only adapters need it.
        arguments.pop("pretrained", None)
        if meta.get("part") == "adapters":
            arguments |= {"model": meta["base"], "pretrained": True}
        _check_names(arguments, hyper_parameters)
        arguments |= hyper_parameters
        for name in ("train_step", "model_provider"):
            if name not in hyper_parameters and "." in str(arguments.get(name)):
                raise ConfigError(
                    f"{name}={arguments[name]} of {path} is only a name; use load_from_checkpoint(PATH, {name}=...)"
                )
        module = cls(**arguments)
        # In a run with pretrained=True only the weight files told whether embeddings are tied.
        tied = meta["model_description"]["share_embeddings_and_output_weights"]
        module.model_config = replace(module.model_config, share_embeddings_and_output_weights=tied)
        module.load_from = source
        return module

    def _plain_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """This module's arguments as plain data: ``arguments``, and the checked ones from its attributes."""
        return {
            **arguments,
            "train_step": _object_name(arguments["train_step"] or self.model_config.architecture),
            "pretrained": str(self.pretrained_path or "") or False,
            "task": self.model_config.task,
            "model_provider": _object_name(self.model_provider),
            "lr": self.lr,
            "optimizer": asdict(self.optimizer_options),
            "lr_schedule": asdict(self.lr_schedule),
            "generation": {
                **vars(self.generation),
                "tokenizer": _object_name(self.generation.tokenizer),
            },
            "return_logits": self.return_logits,
            "make_vocab_size_divisible_by": self.model_config.make_vocab_size_divisible_by,
            "lora": self.adaptation and asdict(self.adaptation.lora),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As torch's, before the model is built.

        Raises:
            ConfigError: If it is built.
        """
        if self.model_chunks is not None:
            raise ConfigError(
                f"copy.deepcopy of a {type(self).__name__}: expected one without a model yet, got one whose layers "
                "belong to process groups; copy it before its first run, or copy the weights: state_dict()"
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return copied

    @property
    def model_description(self) -> dict[str, Any]:
        """Model config as plain data, stored in checkpoints and compared when one is loaded."""
        return self.model_config.to_dict()

    def check_run(self, strategy: MegatronStrategy) -> None:
        """Raise if this module cannot be trained on ``strategy``, before anything is built.

        Raises:
            ConfigError: If the model cannot be split this way, its weights alone exceed the host's memory (a GPU raises
                an error by itself, but Linux kills the process), or the schedule does not fit the Trainer.
        """
        if strategy.root_device.type == "cpu":
            check_host_memory(self.model_config, strategy.settings, strategy.num_processes)
        check_model(self.model_config, strategy.settings, self.trainer.state.fn or "fit")
        if isinstance(self.train_step, DistillationTrainStep) and self.model_provider is not None:
            raise ConfigError(
                "DistillationTrainStep: expected this package's GPT, whose logits it reads, got a model_provider; "
                "leave one of them out"
            )
        if self.teacher is not None:
            self._check_teacher(self.teacher, strategy)
        # The steps of epochs are known once there is data: configure_optimizers checks them.
        if self.trainer.state.fn not in (None, "fit"):
            return
        check_loss_scaling(self.optimizer_options, strategy.settings)
        if self.optimizer_options.name == "muon":
            check_matrices(self.model_config)
        if strategy.offload_optimizer:
            self._check_offload(strategy)
        if self.trainer.max_steps > 0:
            self._schedule_settings()
        if self.adaptation:
            has_weights = self.pretrained_path or strategy.checkpointing.initial_weights
            if not has_weights:
                rank_zero_warn(
                    "lora: expected weights to adapt, got random ones; set pretrained=True, or load_from"
                )
        if strategy.fp8 is not None:
            warning = size_warning(self.model_config)
            if warning is not None:
                rank_zero_warn(warning)

    def _check_offload(self, strategy: MegatronStrategy) -> None:
        """Raise if the optimizer's state does not fit into the memory of the hosts; warn if others use that memory.

        Raises:
            ConfigError: If it does not.
        """
        if self.model_provider is not None:
            return
        ranks = strategy.num_processes
        run = make_run(
            self.model_config,
            strategy.settings,
            rows=0,
            lengths=(1, 1),
            world_size=strategy.num_nodes * ranks,
            uses_muon=self.optimizer_options.name == "muon",
        )
        if self.optimizer_options.name == "sgd":
            run = replace(run, num_moments=1)
        copies_state = strategy.checkpointing.is_asynchronous
        warning = check_host_state(run, ranks, copies_state=copies_state)
        if warning is not None:
            rank_zero_warn(warning)

    def _check_teacher(self, teacher: FrozenWeights, strategy: MegatronStrategy) -> None:
        """Raise if the teacher cannot be built beside the model.

        Raises:
            ConfigError: If the layout does not fit it, or CUDA graphs would replay the student alone.
        """
        teacher.check(strategy.settings, "teacher")
        if strategy.root_device.type == "cpu":
            check_host_memory(teacher.model, strategy.settings, strategy.num_processes)
        if strategy.cuda_graphs:
            raise ConfigError(
                "cuda_graphs=True: expected a train step without a frozen model, got DistillationTrainStep with a "
                "teacher; leave cuda_graphs out, or give the teacher's top-k logits in the batches"
            )

    def _schedule_settings(self) -> Mapping[str, Any]:
        """Arguments of ``MegatronLRScheduler``, checked."""
        return scheduler_settings(
            self.lr_schedule,
            self.lr,
            self.optimizer_options.used_weight_decay,
            self._total_steps,
        )

    @property
    def _total_steps(self) -> int | None:
        """The Trainer's ``max_steps``, or the steps of its epochs; None if training has no end."""
        steps: float = self.trainer.max_steps
        if steps < 0 and self.lr_schedule.follows_run:
            # This creates the loader, and is infinite for a dataset without a length.
            steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            return None
        return int(steps)

    @property
    def megatron(self) -> MegatronStrategy:
        """The strategy that runs this module.

        Raises:
            ConfigError: If the Trainer has another strategy.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigError(
                f"{type(self).__name__} runs on {type(strategy).__name__}; use MegatronStrategy(...)"
            )
        return strategy

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As torch's; also applies to model chunks that are built later."""
        self._frozen_at_build = not requires_grad
        super().requires_grad_(requires_grad)
        if requires_grad and self.adaptation is not None:
            for chunk in self.model_chunks or ():
                freeze_base(chunk)
        return self

    def freeze(self) -> Self:
        """As Lightning's; also applies to model chunks that are built later."""
        super().freeze()
        return self.requires_grad_(False)

    def unfreeze(self) -> Self:
        """As Lightning's; also applies to model chunks that are built later."""
        super().unfreeze()
        return self.requires_grad_(True)

    def prepare_logging(self, trainer: pl.Trainer) -> None:
        """Have ``trainer`` log this module's metrics, after all callbacks but those that save checkpoints.

        Lightning puts these last: what they monitor and name files by is of the same step. Each of the Trainer's
        functions calls this. Metrics of torchmetrics that a subclass holds count each data-parallel replica once.
        """
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if not isinstance(callback, LoggedValues)]
        are_savers = [isinstance(callback, pl.callbacks.Checkpoint) for callback in others]
        first_saver = (*are_savers, True).index(True)
        callbacks[:] = [*others[:first_saver], LoggedValues(), *others[first_saver:]]
        for part in self.modules():
            if isinstance(part, Metric) and part.dist_sync_fn is None:
                part.dist_sync_fn = gather_over_replicas

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """Show the whole model in the Trainer's summary instead of this rank's shards, and log the expected memory.

        A later ``fit`` of the same Trainer has them already: Lightning would announce that they override themselves.
        """
        attached: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        own = whole_summaries(attached)
        if not any(isinstance(callback, MemoryEstimate) for callback in attached):
            own.insert(0, MemoryEstimate())
        return own

    def configure_model(self) -> None:
        """Build this rank's model chunks, again only if the engine settings (layout, precision, ...) have changed."""
        settings = self.megatron.settings
        self._build_teacher(settings)
        if self.model_chunks is not None and self.built_for == settings:
            return
        build = self.model_provider or build_chunks
        with unchanged_environment():
            self.model_chunks = build(self.model_config, settings)
        self._fill_weights(self.model_chunks)
        if self._frozen_at_build:
            self.model_chunks.requires_grad_(False).train(self.training)
        self.built_for = settings
        for line in startup_lines(self.model_config, settings):
            rank_zero_info(line)

    def _build_teacher(self, settings: EngineSettings) -> None:
        """Build this rank's chunks of the teacher, again only if the engine settings have changed."""
        step = self.train_step
        if self.teacher is None or self._teacher_built_for == settings:
            return
        assert isinstance(step, DistillationTrainStep)
        # They belong to the step: as a part of the module they would be saved and counted with the student.
        step.attach_teacher(list(self.teacher.build(settings, self.megatron.topology)))
        self._teacher_built_for = settings

    def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
        """Load weights from the model directory, and initialize those that it lacks (a new head, or all) at random."""
        missing = None
        if self.pretrained_path is not None:
            missing = load_hugging_face(chunks, self.model_config, self.pretrained_path)
            if self.adaptation is not None and not all(map(is_trained_with_lora, missing)):
                rank_zero_warn(
                    "lora: expected the weights of the head, which LoRA leaves as they are, got random ones; train the "
                    "head first, without lora"
                )
        initialize_weights(chunks, self.model_config, run_seed(), only=missing)
        if self.adaptation is not None and self.adaptation.source is not None:
            load_adapter(chunks, self.model_config, self.adaptation.source)

    def training_step(
        self,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
    ) -> torch.Tensor:
        """Compute the gradients of one optimizer step; returns the loss, the same on every rank."""
        self._step_lr = self._current_lr()  # Lightning steps the schedule before on_train_batch_end
        output = self.megatron.forward_backward(batch, self.train_step)
        self._log_losses("train", output, on_step=True)
        return output.loss

    def validation_step(
        self,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> torch.Tensor:
        """Compute the loss of one batch; ``val_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("val", batch, dataloader_idx)

    def test_step(
        self,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> torch.Tensor:
        """Compute the loss of one batch; ``test_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("test", batch, dataloader_idx)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build Megatron's optimizer and the learning-rate schedule, stepped after every optimizer step."""
        if self.megatron.offload_optimizer and self.megatron.root_device.type == "cpu":
            rank_zero_info(
                "offload_optimizer: on a CPU the optimizer's state is in host memory anyway; it passes buffers as on a "
                "GPU, to the same results, and saves no memory"
            )
        optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
        scheduler = MegatronLRScheduler(optimizer, **self._schedule_settings())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step the schedule as Lightning does, unless the optimizer step was skipped (see ``OptimizerReport``)."""
        optimizer = self.megatron.megatron_optimizer
        if metric is None and optimizer is not None and optimizer.has_skipped:
            return
        if isinstance(scheduler, MegatronLRScheduler):
            # LearningRateFinder sets self.lr after the schedule was created.
            scheduler.max_lr = self.lr
        super().lr_scheduler_step(scheduler, metric)

    def _current_lr(self) -> float:
        """The highest learning rate of the optimizer's groups, which the next update uses."""
        rates = [group["lr"] for group in self.optimizers().param_groups]  # type: ignore[union-attr]
        return float(max(rates))

    # ---- logging --------------------------------------------------------------------------------------------------

    def log_update(self) -> None:
        """Log the optimizer's metrics of a step, the same on every rank, without waiting for the device."""
        self.log("lr", _cpu_scalar(self._step_lr), batch_size=1)
        optimizer = self.megatron.megatron_optimizer
        if optimizer is None or optimizer.grad_norm is None:
            return
        if not optimizer.has_skipped:
            self.log("grad_norm", optimizer.grad_norm, batch_size=1)
        if self.megatron.settings.params_dtype is torch.float16:
            self.log("loss_scale", optimizer.inner.get_loss_scale(), batch_size=1)
        if self.megatron.on_nan == "skip":
            self.log("skipped_steps", _cpu_scalar(float(optimizer.skipped_steps)), batch_size=1)

    def log_metrics(self, stage: Literal["val", "test"]) -> None:
        """Log the objective's metrics of each validation or test set; every rank must call.

        A set that a step of your own has evaluated without this class's has none: they would be NaN.
        """
        num_batches = {"val": self.trainer.num_val_batches, "test": self.trainer.num_test_batches}
        num_loaders = len(num_batches[stage])
        for index in range(num_loaders):
            metrics = self._metrics.pop((stage, index), None)
            if metrics is None:
                continue
            # As Lightning appends it to the names of losses.
            suffix = f"/dataloader_idx_{index}" if num_loaders > 1 else ""
            self._log_metrics_of_set(stage, metrics, suffix)

    def forget_metrics(self, stage: Literal["val", "test"]) -> None:
        """Forget what an evaluation that did not end has counted."""
        for key in [key for key in self._metrics if key[0] == stage]:
            for metric in self._metrics.pop(key).values():
                metric.reset()

    def _evaluate(
        self, stage: str, batch: dict[str, torch.Tensor], dataloader_idx: int
    ) -> torch.Tensor:
        def observe(microbatch: dict[str, torch.Tensor], output: Any) -> None:
            metrics = self._metrics_of(stage, dataloader_idx)
            self.train_step.update_metrics(metrics, microbatch, output)

        output = self.megatron.forward_only(batch, self.train_step, observe)
        # Ranks of other stages than the last one observe nothing, and compute metrics with it.
        self._metrics_of(stage, dataloader_idx)
        self._log_losses(stage, output, on_step=False)
        return output.loss

    def _metrics_of(
        self,
        stage: str,
        dataloader_idx: int,
    ) -> dict[str, Metric]:
        """Metrics of the current epoch; created on first use, when the objective has seen a batch."""
        key = stage, dataloader_idx
        if key not in self._metrics:
            metrics = self.train_step.metrics()
            self._metrics[key] = {
                name: metric.to(self.megatron.root_device) for name, metric in metrics.items()
            }
        return self._metrics[key]

    def _log_metrics_of_set(
        self,
        stage: str,
        metrics: dict[str, Metric],
        suffix: str,
    ) -> None:
        device = self.megatron.root_device
        # On GPUs Lightning evaluates in inference mode, whose tensors the next epoch could not update.
        with torch.inference_mode(False), torch.no_grad():
            values = compute_metrics(metrics, self.megatron.topology, device)
            for name, value in values.items():
                self.log(
                    f"{stage}_{name}{suffix}",
                    # Lightning would round a plain number to fp32, and NCCL cannot reduce CPU tensors.
                    torch.tensor(value, dtype=torch.float64, device=device),
                    on_step=False,
                    on_epoch=True,
                    sync_dist=True,
                    add_dataloader_idx=False,
                    batch_size=1,
                )
            for metric in metrics.values():
                metric.reset()

    def _log_losses(
        self,
        stage: str,
        output: StepOutput,
        *,
        on_step: bool,
    ) -> None:
        """Log the loss and each of its terms; epoch means weight every batch by its number of targets."""
        weight: Any = 1
        if not on_step:
            # Lightning wants a plain number; in training, without means, none is read from the GPU.
            weight = output.num_targets[self.train_step.loss_terms[0]].item()
            if weight == int(weight):
                # Integers are summed exactly; fractions, from partially counted targets, stay.
                weight = int(weight)
        # Lightning reads values for the progress bar from the GPU at every step, even without a bar.
        has_bar = self.trainer.progress_bar_callback is not None
        values = {
            "loss": output.loss,
            **output.terms,
            **output.logged,
            **output.expert_metrics,
        }
        for name, value in values.items():
            if not on_step:
                # Sums over an epoch of millions of targets need a higher precision than those of one batch.
                value = value.double()
            self.log(
                f"{stage}_{name}",
                value,
                prog_bar=has_bar and name == "loss",
                on_step=on_step,
                on_epoch=not on_step,
                # The ranks agree already; syncing once per epoch only avoids Lightning's recommendation to do so.
                sync_dist=not on_step,
                batch_size=weight,
            )

    # ---- generation and logits ----------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        on_tokens: Callable[[torch.Tensor], None] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Continue prompts on any layout, as Hugging Face's ``generate``; every rank must call with the same inputs.

        A T5's encoder reads the prompts; its decoder starts from ``decoder_start_token_id``, or continues
        ``decoder_input_ids``.

        May be called during training (from a callback, say), which it does not affect. Prompts are sharded over the
        data-parallel replicas.

        Args:
            input_ids: [b, s], the prompts, the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding, on either side. None: tokens equal to the padding
                token are padding, unless it is an end-of-sequence token.
            decoder_input_ids: [b, s_dec], tokens that a T5's decoder continues; the start token is prepended if no row
                begins with it. None for the start token alone.
            decoder_attention_mask: [b, s_dec], 1 for tokens and 0 for padding, which is removed; None for no padding.
            on_tokens: Called, on ranks that pass it, with each new token of this rank's rows as soon as it is chosen:
                [b], -1 for finished rows. Reading the tokens on the host makes generation wait.
            options: Fields of ``GenerationOptions``: ``max_new_tokens``, ``temperature``, ``stop_strings`` with
                ``tokenizer``, ``seed``, ...

        Returns:
            [b, s + new] on every rank: ``input_ids`` and the new tokens, with padding after rows that finished early.
            For a T5 the decoder's input and new tokens: [b, s_dec + new].

        Raises:
            ConfigError: On all ranks, before anything runs: if there is no model yet, a prompt cannot be continued, or
                an option is unknown, out of range or contradicts another.
        """
        return self.generate_with_scores(
            input_ids,
            attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            on_tokens=on_tokens,
            **options,
        ).sequences

    def generate_with_scores(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        on_tokens: Callable[[torch.Tensor], None] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """As ``generate``, with the log-probability of each new token and the score of each sequence."""
        model = self._live_model(generates=True)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "decoder_attention_mask": decoder_attention_mask,
        }
        with self.megatron.engine():
            return model.generate(inputs, options, self._special_tokens, on_tokens)

    def predict_step(
        self,
        batch: dict[str, torch.Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> torch.Tensor | None:
        """Continue the prompts of one batch with the options ``generation``; each replica has its own batches.

        With ``return_logits`` return logits instead, from the model inputs in the batch: a batch of ``test`` works,
        too. ``gather_predictions`` gathers the predictions of all replicas in dataset order.

        Rows of different batches or replicas may differ in length. To stack them::

            rows = [row for batch in trainer.predict(module, loader) for row in batch]
            sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)

        Args:
            batch: Inputs of ``generate`` by name: ``input_ids`` [b, s] and, if rows are padded, ``attention_mask``. For
                a T5 also Megatron's ``text_enc`` and ``enc_mask``; decoder inputs are ignored in a batch with
                ``labels``.
            batch_idx: Added to the seed, so that each batch samples differently.
            dataloader_idx: Not used.

        Returns:
            [b, s + new] or, for a T5, [b, s_dec + new], on all ranks of the replica, without the padding rows of the
            last batch. Logits: as ``logits``; with ``return_logits="last_stage"`` None before the last stage.

        Raises:
            ConfigError: If the batch has no prompts, or one that cannot be continued (or read).
        """
        rows = inputs_from_batch(batch, self.model_config, for_generation=not self.return_logits)
        with self.megatron.engine():
            if self.return_logits:
                last_stage_only = self.return_logits == "last_stage"
                return self._live_model().logits(
                    rows, is_shared=False, last_stage_only=last_stage_only
                )
            if len(rows["input_ids"]) == 0:
                return rows["input_ids"].long()
            # torch maps negative seeds in the same way.
            options = dict(vars(self.generation))
            options["seed"] = (self.generation.seed + batch_idx) % 2**64
            model = self._live_model(generates=True)
            return model.generate(rows, options, self._special_tokens, is_shared=False).sequences

    def forward(self, batch: dict[str, torch.Tensor] | torch.Tensor) -> torch.Tensor | None:
        """``logits`` of a batch (without its targets) or ``input_ids``; every rank must call with the same inputs."""
        if isinstance(batch, torch.Tensor):
            return self.logits(batch)
        model = self._live_model()
        with self.megatron.engine():
            return model.logits(inputs_from_batch(batch, self.model_config, for_generation=False))

    def logits(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        *,
        token_type_ids: torch.Tensor | None = None,
        last_stage_only: bool = False,
    ) -> torch.Tensor | None:
        """Compute the logits at every token, as Hugging Face's model; every rank must call with the same inputs.

        Rows are sharded over the data-parallel replicas. May be called during training; runs without dropout. The
        result is gathered over tp and dp, without the vocabulary padding. It takes b * s * vocab_size * 4 bytes on
        every rank that keeps it: 1 GiB for 8 rows of 1,024 tokens and a vocabulary of 32,768.

        Args:
            input_ids: [b, s], the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
            decoder_input_ids: [b, s_dec], input of a T5's decoder; None for other models.
            token_type_ids: [b, s], for a BERT; None for 0 everywhere.
            last_stage_only: Keep the result only on ranks of the last pipeline stage, where it is computed; other ranks
                get None.

        Returns:
            [b, s, vocab_size] fp32, in the order of the rows; for a T5 [b, s_dec, vocab_size]. For other tasks than
            language modeling: [b, num_labels] for ``sequence_classification``, else [b, s, num_labels] (the logits of
            the sentence order, which a BERT's ``pretraining`` also learns, are left out).

        Raises:
            ConfigError: On all ranks, before anything runs: if there is no model yet, or it cannot read a row.
        """
        model = self._live_model()
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": decoder_input_ids,
            "token_type_ids": token_type_ids,
        }
        with self.megatron.engine():
            return model.logits(inputs, last_stage_only=last_stage_only)

    def log_likelihoods(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        batch_size: int = 8,
        on_batch: Callable[[int], None] | None = None,
    ) -> LogLikelihoods:
        """Compute the log-likelihood of continuations of contexts; every rank must call with the same pairs.

        For GPTs. May be called during training; runs without dropout. Batches of rows of similar length are shared by
        the data-parallel replicas. The output layer computes only what is scored, and no rank holds logits over the
        whole vocabulary.

        Args:
            pairs: For each continuation the tokens of its context and its own tokens, at least one of each.
            batch_size: Largest number of rows in a forward pass. Continuations that differ in their last token only
                share a row.
            on_batch: Called, on ranks that pass it, after each batch of this replica with its number of continuations.

        Returns:
            ``values`` and ``is_greedy``, in the order of the pairs, on every rank.

        Raises:
            ConfigError: On all ranks, before anything runs: if there is no model yet, or it cannot read a pair.
        """
        model = self._live_model()
        with self.megatron.engine():
            return model.log_likelihoods(pairs, batch_size, on_batch)

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return special_token_ids(self._model)

    def _live_model(self, *, generates: bool = False) -> LiveModel:
        """The model on this rank; with ``generates`` it must be a language model, a GPT or T5.

        Raises:
            ConfigError: If there is no model yet, or a BERT or a classifier is to generate.
        """
        model = self.model_config
        if generates and model.architecture == "bert":
            raise ConfigError(f"generate is for GPTs and T5s, and {model.family} is a BERT")
        if generates and model.task in CLASSIFICATION:
            raise ConfigError(
                f"generate is for language models, and this {model.family} has a head for task={model.task!r}; "
                "Trainer.predict returns its logits with return_logits=True"
            )
        return LiveModel(
            chunks=self._built_chunks(),
            config=self.model_config,
            topology=self.megatron.topology,
            device=self.megatron.root_device,
            is_own=self.model_provider is None,
        )

    def _built_chunks(self) -> list[torch.nn.Module]:
        """This rank's model chunks; without a Trainer they are first built from the weights, in one process.

        Raises:
            ConfigError: If there are no chunks yet, and no weights.
        """
        has_weights = self.load_from or self.pretrained_path
        if self.model_chunks is None and self._trainer is None and has_weights:
            self._build_alone()
        if self.model_chunks is None:
            raise ConfigError(
                "there is no model before Trainer.fit (or validate) has built it; call this afterwards"
            )
        return list(self.model_chunks)

    def _build_alone(self) -> None:
        """Build the model in one process, by a Trainer that predicts nothing."""
        trainer = pl.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=1,
            strategy=MegatronStrategy(),
            limit_predict_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.predict(self, [])

    # ---- export ----------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        save_directory: str | Path,
        max_shard_size: str | int = "5GB",
        merge: bool = False,
        expert_format: ExpertFormat = "fused",
    ) -> None:
        """Write the model as a Hugging Face directory, which ``AutoModelFor*.from_pretrained`` loads.

        With ``lora`` and without ``merge``, write only the adapter, which ``peft.PeftModel.from_pretrained`` loads.

        Every rank must call, within or after ``fit``. The weights have the dtype that the model computes with (bf16
        under ``bf16-mixed``); no rank holds more than the weights of one file at a time.

        Args:
            save_directory: Directory to write; created if it does not exist. Only rank 0 writes.
            max_shard_size: Largest weight file, e.g. ``200MB``, or bytes.
            merge: With ``lora``: write the whole model, with the adapters merged into its weights.
            expert_format: Form of adapters of routed experts: ``fused`` for parameters of all experts of a layer, as in
                transformers 5; ``per_expert`` for modules of each, as in transformers 4.

        Raises:
            ConfigError: If there is no model yet, no Hugging Face class computes it, or there is nothing to merge.
            CheckpointError: On all ranks, if the directory cannot be written.
        """
        if merge and self.adaptation is None:
            raise ConfigError(
                "merge=True: expected a module with lora, got one without; leave merge out"
            )
        check_expert_format(
            replace(self.model_config, lora=None) if merge else self.model_config, expert_format
        )
        if self.model_chunks is None:
            raise ConfigError(
                "there is no model to save before Trainer.fit (or validate) has built it; save it then"
            )
        if self.is_variant or self.model_provider is not None:
            raise ConfigError(
                f"no Hugging Face {self.model_config.family} model computes this; use trainer.save_checkpoint"
            )
        chunks = list(self.model_chunks)
        experts = self.model_config.experts
        has_bias_in_files = experts is not None and experts.has_selection_bias
        if unwrap(chunks[0]).config.moe_router_enable_expert_bias and not has_bias_in_files:
            raise ConfigError(
                f"no Hugging Face {self.model_config.family} model has biases of experts "
                "(moe_router_enable_expert_bias); save a checkpoint with trainer.save_checkpoint"
            )
        directory = Path(self.megatron.broadcast(str(save_directory)))
        with self.megatron.engine():
            finish_parameter_gathers(chunks)
            if self.adaptation is not None and not merge:
                save_adapter(
                    chunks, self.model_config, directory, self.adaptation.base, expert_format
                )
                return
            model = replace(self.model_config, lora=None)
            companions = generation_config(self.pretrained_path)
            with merged(chunks):
                save_hugging_face(
                    chunks,
                    model,
                    config_object(self._labelled_model),
                    directory,
                    max_shard_size,
                    companions,
                )

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: str | int = "5GB",
    ) -> str:
        """Upload the model to the Hugging Face hub, as ``PreTrainedModel.push_to_hub`` does. Every rank must call.

        Args:
            repo_id: ``org/name``, created if it does not exist.
            commit_message: Message of the commit; None for "Upload model".
            private: Whether a newly created repository is private; None for its owner's default.
            token: Access token of the hub; None for that of ``hf auth login`` or ``HF_TOKEN``.
            revision: Branch to commit to, created if it does not exist; None for the main branch.
            create_pr: Open a pull request instead of committing.
            max_shard_size: As for ``save_pretrained``.

        Returns:
            URL of the commit, or of the pull request, on every rank.

        Raises:
            ConfigError: On all ranks: if there is no model yet, no Hugging Face class computes it, or the hub cannot be
                reached or refuses it.
            CheckpointError: If the temporary directory of rank 0 cannot be written.
        """
        from huggingface_hub import HfApi  # its HTTP client costs a second

        def upload() -> str:
            try:
                api = HfApi(token=token)
                api.create_repo(repo_id, private=private, exist_ok=True)
                if revision is not None and not create_pr:
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
                message = commit_message or "Upload model"
                commit = api.upload_folder(
                    repo_id=repo_id,
                    folder_path=folder,
                    commit_message=message,
                    revision=revision,
                    create_pr=create_pr,
                )
            except Exception as error:  # of any kind: huggingface_hub's own, or its HTTP client's
                reason = first_line(error)
                raise ConfigError(
                    f"{repo_id} cannot be written on the Hugging Face hub ({reason}); try `hf auth login`"
                ) from error
            return str(commit.pr_url or commit.commit_url)

        with (
            tempfile.TemporaryDirectory(prefix="lightning_megatron_") as folder,
            ThreadPoolExecutor(1) as pool,
        ):
            self.save_pretrained(folder, max_shard_size)
            running = None
            if self.megatron.global_rank == 0:
                running = pool.submit(upload)
            # The other ranks synchronize with rank 0 every minute: an upload may exceed a collective's timeout.
            is_done = False
            while not is_done:
                if running is not None:
                    is_done = bool(wait([running], timeout=60).done)
                is_done = self.megatron.broadcast(is_done)
            url = call_on_all_ranks(lambda: running.result() if running else "")
            return self.megatron.broadcast(url)


class LoggedValues(pl.Callback):
    """Logs the metrics of a ``MegatronModule`` in the hooks in which Lightning wants them.

    These are not hooks of the module, whose overrides in a subclass would lose the metrics without ``super()``.
    """

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the optimizer's metrics of the step."""
        if isinstance(pl_module, MegatronModule):
            pl_module.log_update()

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the objective's metrics anew, also after a validation that an exception has ended."""
        if isinstance(pl_module, MegatronModule):
            pl_module.forget_metrics("val")

    @override
    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the objective's metrics anew, also after a test that an exception has ended."""
        if isinstance(pl_module, MegatronModule):
            pl_module.forget_metrics("test")

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the objective's metrics of the validation sets."""
        if isinstance(pl_module, MegatronModule):
            pl_module.log_metrics("val")

    @override
    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the objective's metrics of the test sets."""
        if isinstance(pl_module, MegatronModule):
            pl_module.log_metrics("test")


def _cpu_scalar(number: float) -> torch.Tensor:
    """For ``self.log``: lightning 2.6, core/module.py, copies a plain number to the GPU and waits for earlier work."""
    return torch.tensor(number)


def _check_return_logits(given: object) -> None:
    if given not in (True, False, "last_stage"):
        raise ConfigError(
            f"return_logits={given!r} is unknown; choose from True, False and 'last_stage'"
        )


def _weights_directory(model: Any) -> Path:
    """Directory of the weights for ``pretrained=True``.

    Raises:
        ConfigError: If ``model`` is not a directory.
    """
    is_path = isinstance(model, (str, Path))
    if not is_path or not Path(model).is_dir():
        given = repr(model) if is_path else type_of(model)
        raise ConfigError(
            f"pretrained=True needs a model directory with weights, and model is {given}; give its path"
        )
    return Path(model)


def _compared_with_weights(model: ModelConfig, path: Path) -> ModelConfig:
    """``model`` with its output layer tied or not, as the weights in the directory ``path`` say.

    Raises:
        CheckpointError: If they are missing or damaged, or have fewer layers.
    """
    weights = open_weights(path)
    check_num_layers(model, weights)
    return resolve_tied_output(model, weights)


def _train_step(given: str | TrainStep | None, model: ModelConfig) -> TrainStep:
    """The train step of a name and the model's task, the given object, or that of the model's architecture.

    Of an object that a module with another model has already, a copy: what it is bound to decides what it computes.

    Raises:
        ConfigError: If something else is given, or the name is unknown.
    """
    if isinstance(given, TrainStep):
        return given if getattr(given, "model", model) == model else copy(given)
    if not isinstance(given, (str, NoneType)):
        raise ConfigError(
            f"train_step={given!r}: expected the name or an object of a TrainStep, got a "
            f"{type(given).__name__}; give e.g. train_step=MyTrainStep()"
        )
    return train_step_named(given or model.architecture, model.task)


def _teacher(step: TrainStep, model: ModelConfig) -> FrozenWeights | None:
    """The teacher of a train step, whose config the step gets; None if it has none.

    Raises:
        ConfigError: If it is neither a directory nor available from the hub, or does not fit the student.
    """
    if not isinstance(step, DistillationTrainStep) or step.teacher is None:
        return None
    folder = local_folder(step.teacher, "model")
    config = replace(
        model_config(str(folder)),
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
    )
    step.bind_teacher(config)
    return FrozenWeights(model=config, source=folder)


def _accepted_arguments(cls: type[MegatronModule], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved arguments that a class takes: a subclass may have others than the module that was saved."""
    parameters = inspect.signature(cls).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(saved)
    return {name: value for name, value in saved.items() if name in parameters}


def _check_names(saved: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Check that a model and a tokenizer that a checkpoint names are on this host: for a name, no request is sent.

    Args:
        saved: The checkpoint's arguments; the name of a tokenizer that is not there, and not needed, is removed.
        given: The user's, which override them.

    Raises:
        ConfigError: If a name that is needed is an address, or neither a directory nor in the hub's cache.
    """
    if "model" not in given and isinstance(saved.get("model"), str):
        needed: Needed = "model" if saved.get("pretrained") else "config"
        named_folder(saved["model"], needed, "model")
    generation = saved.get("generation")
    if "generation" in given or not isinstance(generation, Mapping):
        return
    tokenizer = generation.get("tokenizer")
    if not isinstance(tokenizer, str):
        return
    try:
        named_folder(tokenizer, "tokenizer", "generation.tokenizer")
    except ConfigError:
        if generation.get("stop_strings"):
            raise
        saved["generation"] = {**generation, "tokenizer": None}


def _object_name(value: Any) -> str | None:
    """Name of an object: a string itself, a tokenizer's ``name_or_path``, else ``module.qualname`` (of its class)."""
    if value is None or isinstance(value, str):
        return value
    if getattr(value, "name_or_path", None):
        return str(value.name_or_path)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
