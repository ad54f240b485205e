"""``MegatronModule``: a Hugging Face model, an objective and an optimizer as a LightningModule, without code."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.accounting import check_host_memory
from lightning_megatron.checkpoint.files import load_meta
from lightning_megatron.checkpoint.load import LoadFrom
from lightning_megatron.convert.hugging_face import load_hugging_face, open_weights, resolve_tied_output
from lightning_megatron.convert.peft import LoRA, adaptation, load_adapter, save_adapter
from lightning_megatron.convert.registry import config_fields, config_object, model_config
from lightning_megatron.engine.collectives import call_on_all_ranks, compute_metrics
from lightning_megatron.engine.fillers.fp8 import size_warning
from lightning_megatron.engine.lr_schedule import LRSchedule, MegatronLRScheduler, scheduler_settings
from lightning_megatron.engine.optimizer import OptimizerOptions
from lightning_megatron.engine.runtime import run_seed, unchanged_environment
from lightning_megatron.engine.schedule import TrainStep
from lightning_megatron.errors import CheckpointError, ConfigError, as_options, require_number
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.generate.inputs import SpecialTokens, inputs_from_batch, special_tokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.hub import first_line, local_folder
from lightning_megatron.models.config import AttentionHeads, Positions, with_variant
from lightning_megatron.steps import train_step_named

if TYPE_CHECKING:
    from torchmetrics import Metric

    from lightning_megatron.engine.schedule import StepOutput
    from lightning_megatron.generate.decode import GenerationOutput, LiveModel
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.models.transformer_config import EngineSettings
    from lightning_megatron.strategy import MegatronStrategy


@explains_options
class MegatronModule(pl.LightningModule):
    """Trains a Hugging Face model under ``MegatronStrategy``, from its weights or from random ones.

    Logs ``train_loss`` (and each of its terms as ``train_<term>``), ``val_loss``, ``test_loss``, ``lr`` and
    ``grad_norm``, and the objective's metrics (``val_perplexity``, ``val_accuracy``, ...), with the same values on all
    ranks. Subclass it and override any of Lightning's hooks as usual.

    Args:
        model: A Hugging Face config object, a dict of one (with ``model_type``), a path to a ``config.json``, a path to
            a model directory, or the name of a model on the Hugging Face hub, ``org/name`` or ``org/name@revision``.
        train_step: The objective: ``gpt``, ``bert``, ``t5``, ``last_word`` (a GPT's accuracy at the ends of texts), or
            an object of your own; None for the architecture's.
        pretrained: Start from the weights in the directory ``model``, each rank reading only its own part.
        task: Which head the model has, e.g. ``sequence_classification``; None for the one that its config names.
        position_embedding_type: For a GPT from scratch: ``absolute``, ``rotary`` or ``alibi``; None keeps its own.
        attention_head_type: For a GPT from scratch: ``multihead`` or ``multiquery``; None keeps its own.
        model_provider: Builds the chunks in place of this package: called with the model's description and the engine's
            settings, returns an ``nn.ModuleList`` with one Megatron model per virtual stage.
        lr: Peak learning rate.
        optimizer: Which optimizer, and its numbers.
        lr_schedule: How the learning rate and the weight decay move.
        generation: How ``Trainer.predict`` continues the prompts of its batches.
        return_logits: ``Trainer.predict`` gives the logits of its batches instead (see ``logits``): True on
            every rank of a copy of the model, ``last_stage`` on those of the last pipeline stage, None elsewhere.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times tp.
        lora: Train low-rank adapters and leave the weights as they are; or the folder of a ``peft`` adapter to go on
            with. A checkpoint of weights alone then holds the adapters, if ``pretrained`` says where the others are.

    Raises:
        ConfigError: If the model is unknown, a field of it cannot be honoured, or it is neither here nor to be had from
            the hub.
    """

    def __init__(  # noqa: D107 (described on the class)
        self,
        model: str | dict[str, Any] | Any,
        train_step: Literal["gpt", "bert", "t5", "last_word"] | TrainStep | None = None,
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
    ) -> None:
        super().__init__()
        self.adaptation = adaptation(lora, str(model) if pretrained else None)
        """Adapters, which are trained instead of the model; None without ``lora``."""
        if isinstance(model, str):
            model = str(local_folder(model, "model" if pretrained else "config"))
        require_number("make_vocab_size_divisible_by", make_vocab_size_divisible_by, at_least=1)
        described = replace(model_config(model, task), make_vocab_size_divisible_by=make_vocab_size_divisible_by)
        self.pretrained_path: Path | None = _weights_directory(model) if pretrained else None
        if self.pretrained_path is not None:
            described = resolve_tied_output(described, open_weights(self.pretrained_path))
        self.model_config: ModelConfig = with_variant(described, position_embedding_type, attention_head_type)
        self.is_variant = self.model_config != described
        if pretrained and self.is_variant:
            raise ConfigError(
                "pretrained=True keeps positions and heads; leave out position_embedding_type and attention_head_type"
            )
        if self.adaptation is not None:
            self.model_config = self.adaptation.apply_to(self.model_config, model_provider)
        self.model_provider = model_provider
        named = train_step if isinstance(train_step, str) else self.model_config.architecture
        self.train_step = train_step if isinstance(train_step, TrainStep) else train_step_named(named)
        self.train_step.bind(self.model_config)
        require_number("lr", lr)
        self.lr = lr
        self.optimizer_options = as_options(OptimizerOptions, optimizer, "optimizer")
        self.lr_schedule = as_options(LRSchedule, lr_schedule, "lr_schedule")
        self.generation = as_options(GenerationOptions, generation, "generation")
        if return_logits not in (True, False, "last_stage"):
            raise ConfigError(f"return_logits={return_logits!r} is unknown; choose from True, False and 'last_stage'")
        self.return_logits = return_logits
        self.model_chunks: torch.nn.ModuleList | None = None
        self.built_for: EngineSettings | None = None
        self._begins_frozen = False
        self._metrics: dict[tuple[str, int], dict[str, Metric]] = {}
        self._model = model
        fields = config_fields(model)
        self.hugging_face_config = fields if model_provider is None else None
        """The fields of the model's ``config.json``, by which a checkpoint becomes a Hugging Face directory again;
        None where nobody knows what a ``model_provider`` computes."""
        self.load_from: LoadFrom | None = None
        """The checkpoint of ``load_from_checkpoint``, whose weights a run begins with."""
        variant = {"position_embedding_type": position_embedding_type, "attention_head_type": attention_head_type}
        self.save_hyperparameters(self._arguments({"model": fields, "train_step": train_step, **variant}))

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: str | Path, **hyper_parameters: Any) -> Self:  # type: ignore[override]
        """The module of a ``*.ckpt`` directory and its weights; nothing in it is run as code.

        The weights are read when a Trainer builds the model, at any layout and by each rank its own part; or, without a
        Trainer, when ``generate``, ``logits`` or ``forward`` is first called, on one process.

        Args:
            checkpoint_path: A checkpoint of ``MegatronStrategy``, or a folder of some, of which the newest counts.
            hyper_parameters: Arguments that shall differ from the checkpoint's, as ``lr``; and what no checkpoint
                holds: a ``train_step`` or ``model_provider`` of your own.

        Raises:
            CheckpointError: If there is none, or it is not complete.
            ConfigError: If an argument is unknown or missing.
        """
        source = LoadFrom(path=str(checkpoint_path))
        path = source.resolve()
        meta = load_meta(path)
        saved = meta["lightning"].get("hyper_parameters", {})
        if not isinstance(saved, Mapping) or "model" not in saved:
            raise CheckpointError(f"checkpoint {path} has no arguments of a MegatronModule; use load_from=PATH")
        known = inspect.signature(cls).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        # The checkpoint has the weights; the directory that the run began with may be gone. Of adapters it is needed.
        arguments = {k: v for k, v in saved.items() if (takes_any or k in known) and k != "pretrained"}
        if meta.get("part") == "adapters":
            arguments |= {"model": meta["base"], "pretrained": True}
        arguments |= hyper_parameters
        for name in ("train_step", "model_provider"):
            if name not in hyper_parameters and "." in str(arguments.get(name)):
                raise ConfigError(
                    f"{name}={arguments[name]} of {path} is a name; give load_from_checkpoint(PATH, {name}=...)"
                )
        module = cls(**arguments)
        # What only the weight files have told, of a run that began with pretrained=True.
        tied = meta["model_description"]["share_embeddings_and_output_weights"]
        module.model_config = replace(module.model_config, share_embeddings_and_output_weights=tied)
        module.load_from = source
        return module

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of this module as plain data: ``given``, and those that its attributes have, checked."""
        return {
            **given,
            "train_step": _described_object(given["train_step"] or self.model_config.architecture),
            "pretrained": str(self.pretrained_path or "") or False,
            "task": self.model_config.task,
            "model_provider": _described_object(self.model_provider),
            "lr": self.lr,
            "optimizer": asdict(self.optimizer_options),
            "lr_schedule": asdict(self.lr_schedule),
            "generation": {**vars(self.generation), "tokenizer": _described_object(self.generation.tokenizer)},
            "return_logits": self.return_logits,
            "make_vocab_size_divisible_by": self.model_config.make_vocab_size_divisible_by,
            "lora": self.adaptation and asdict(self.adaptation.lora),
        }

    @property
    def model_description(self) -> dict[str, Any]:
        """The model as plain data, by which a checkpoint is recognised."""
        return self.model_config.to_dict()

    def check_run(self, strategy: MegatronStrategy) -> None:
        """Raise if this module cannot be trained on ``strategy``, before anything is built.

        Raises:
            ConfigError: If the model cannot be split so, the weights alone are more than the host can hold (a GPU
                refuses by itself, Linux kills whoever asks for too much), or the schedule does not fit the Trainer.
        """
        if strategy.root_device.type == "cpu":
            check_host_memory(self.model_config, strategy.settings, strategy.num_processes)
        strategy.settings.check_model(self.model_config, self.trainer.state.fn or "fit")
        # Epochs are counted when there is data: configure_optimizers checks those.
        is_fit = self.trainer.state.fn in (None, "fit")
        if is_fit and self.trainer.max_steps > 0:
            scheduler_settings(self.lr_schedule, self.lr, self.optimizer_options.weight_decay, self._total_steps)
        if is_fit and self.adaptation and not (self.pretrained_path or strategy.checkpointing.initial_weights):
            rank_zero_warn("lora: expected weights to adapt, got random ones; set pretrained=True, or load_from")
        if is_fit and strategy.fp8 is not None and (text := size_warning(self.model_config)) is not None:
            rank_zero_warn(text)

    @property
    def _total_steps(self) -> int | None:
        """The Trainer's ``max_steps``, or the steps of its epochs; None if training has no end."""
        trainer, follows_epochs = self.trainer, self.trainer.max_steps < 0 and self.lr_schedule.follows_run
        # Asking Lightning makes the loader; a dataset without a length has no end.
        steps = trainer.estimated_stepping_batches if follows_epochs else trainer.max_steps
        return int(steps) if math.isfinite(steps) else None

    @property
    def megatron(self) -> MegatronStrategy:
        """The strategy that runs this module.

        Raises:
            ConfigError: If it is another one.
        """
        from lightning_megatron.strategy import MegatronStrategy

        strategy = self.trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ConfigError(f"{type(self).__name__} runs on {type(strategy).__name__}; use MegatronStrategy(...)")
        return strategy

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Torch's; also holds for the chunks if they are not built yet."""
        self._begins_frozen = not requires_grad
        super().requires_grad_(requires_grad)
        if requires_grad and self.adaptation is not None:
            from lightning_megatron.models.lora import freeze_base

            for chunk in self.model_chunks or ():
                freeze_base(chunk)
        return self

    def freeze(self) -> Self:
        """Lightning's; also holds for the chunks if they are not built yet."""
        super().freeze()
        return self.requires_grad_(False)

    def unfreeze(self) -> Self:
        """Lightning's; also holds for the chunks if they are not built yet."""
        super().unfreeze()
        return self.requires_grad_(True)

    # ---- Lightning's hooks ----------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[pl.Callback]:
        """Let the Trainer's summary show the whole model, not this rank's share, and tell the expected memory."""
        from lightning_megatron.model_summary import MemoryEstimate, whole_summaries

        return [MemoryEstimate(), *whole_summaries(self.trainer.callbacks)]  # type: ignore[attr-defined]

    def configure_model(self) -> None:
        """Build this rank's chunks; again if the layout or the precision is another than last time."""
        from lightning_megatron.accounting import startup_lines
        from lightning_megatron.models.build import build_chunks

        settings = self.megatron.settings
        if self.model_chunks is not None and self.built_for == settings:
            return
        with unchanged_environment():
            self.model_chunks = (self.model_provider or build_chunks)(self.model_config, settings)
        self._fill_weights(self.model_chunks)
        if self._begins_frozen:
            self.model_chunks.requires_grad_(False).train(self.training)
        self.built_for = settings
        for line in startup_lines(self.model_config, settings):
            rank_zero_info(line)

    def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
        """From the model directory, and what it does not have (a new head, or everything) at random."""
        from lightning_megatron.models.build import initialize_weights

        without_file = None
        if self.pretrained_path is not None:
            without_file = load_hugging_face(chunks, self.model_config, self.pretrained_path)
        initialize_weights(chunks, self.model_config, run_seed(), only=without_file)
        if self.adaptation is not None and self.adaptation.source is not None:
            load_adapter(chunks, self.model_config, self.adaptation.source)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One optimizer step's gradients; returns the loss, the same on every rank."""
        output = self.megatron.forward_backward(batch, self.train_step)
        self._log_losses("train", output, on_step=True)
        return output.loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """The loss of one batch; ``val_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("val", batch, dataloader_idx)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """The loss of one batch; ``test_loss`` is the mean over all targets of the epoch."""
        return self._evaluate("test", batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log the objective's metrics of each validation set."""
        self._log_metrics("val", len(self.trainer.num_val_batches))

    def on_test_epoch_end(self) -> None:
        """Log the objective's metrics of each test set."""
        self._log_metrics("test", len(self.trainer.num_test_batches))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Megatron's optimizer and the schedule, stepped after every optimizer step."""
        optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
        decay = self.optimizer_options.weight_decay
        settings = scheduler_settings(self.lr_schedule, self.lr, decay, self._total_steps)
        scheduler = MegatronLRScheduler(optimizer, **settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Lightning's, except that a step which was skipped (see ``OptimizerReport``) does not move the schedule."""
        optimizer = self.megatron.megatron_optimizer
        if metric is None and optimizer is not None and optimizer.has_skipped:
            return
        if isinstance(scheduler, MegatronLRScheduler):
            scheduler.max_lr = self.lr  # which LearningRateFinder sets when the schedule is made already
        super().lr_scheduler_step(scheduler, metric)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what the optimizer did, the same on every rank; nothing here waits for the device."""
        rates = [group["lr"] for group in self.optimizers().param_groups]  # type: ignore[union-attr]
        self.log("lr", _on_host(max(rates)), batch_size=1)
        optimizer = self.megatron.megatron_optimizer
        if optimizer is None or optimizer.grad_norm is None:
            return
        if not optimizer.has_skipped:
            self.log("grad_norm", optimizer.grad_norm, batch_size=1)
        if self.megatron.settings.params_dtype is torch.float16:
            self.log("loss_scale", optimizer.inner.get_loss_scale(), batch_size=1)
        if self.megatron.on_nan == "skip":
            self.log("skipped_steps", _on_host(float(optimizer.skipped_steps)), batch_size=1)

    # ---- logging --------------------------------------------------------------------------------------------------

    def _evaluate(self, stage: str, batch: dict[str, torch.Tensor], dataloader_idx: int) -> torch.Tensor:
        def observe(microbatch: dict[str, torch.Tensor], output: Any) -> None:
            self.train_step.update_metrics(self._metrics_of(stage, dataloader_idx), microbatch, output)

        output = self.megatron.forward_only(batch, self.train_step, observe)
        self._log_losses(stage, output, on_step=False)
        return output.loss

    def _metrics_of(self, stage: str, dataloader_idx: int) -> dict[str, Metric]:
        """The metrics of the epoch that runs; made when first asked for, when the objective has seen a batch."""
        key = stage, dataloader_idx
        if key not in self._metrics:
            made = self.train_step.metrics()
            self._metrics[key] = {name: metric.to(self.megatron.root_device) for name, metric in made.items()}
        return self._metrics[key]

    def _log_metrics(self, stage: str, num_loaders: int) -> None:
        for index in range(num_loaders):
            metrics = self._metrics_of(stage, index)
            # What Lightning adds to the names of losses.
            suffix = f"/dataloader_idx_{index}" if num_loaders > 1 else ""
            # On GPUs Lightning evaluates in inference mode, whose tensors the next epoch could not add to.
            with torch.inference_mode(False), torch.no_grad():
                values = compute_metrics(metrics, self.megatron.topology, self.megatron.root_device)
                log = partial(self.log, on_step=False, on_epoch=True, sync_dist=True, add_dataloader_idx=False)
                for name, value in values.items():
                    # Lightning would round a plain number to fp32, and NCCL reduces nothing on the host.
                    exact = torch.tensor(value, dtype=torch.float64, device=self.megatron.root_device)
                    log(f"{stage}_{name}{suffix}", exact, batch_size=1)
                for metric in metrics.values():
                    metric.reset()

    def _log_losses(self, stage: str, output: StepOutput, *, on_step: bool) -> None:
        """Log the sum and each term; epoch means weigh every batch by its number of targets."""
        # Lightning weighs with a plain number; in training nothing is averaged, so none is read from the GPU.
        weight: Any = 1 if on_step else output.num_targets[self.train_step.loss_terms[0]].item()
        if weight == int(weight):  # whole numbers are summed up exactly; fractions, of targets that count in part, stay
            weight = int(weight)
        # Lightning reads what is meant for a progress bar from the GPU at every step, bar or not.
        has_bar = self.trainer.progress_bar_callback is not None
        # The ranks agree already; to sync once an epoch only spares users Lightning's advice to do it.
        log = partial(self.log, on_step=on_step, on_epoch=not on_step, sync_dist=not on_step, batch_size=weight)
        # Sums over an epoch of millions of targets need more digits than those of one batch.
        values = {"loss": output.loss, **output.terms, **output.expert_metrics}
        values = values if on_step else {name: value.double() for name, value in values.items()}
        for name, value in values.items():
            log(f"{stage}_{name}", value, prog_bar=has_bar and name == "loss")

    # ---- texts and logits ---------------------------------------------------------------------------------------

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
        """Continue prompts, as Hugging Face's ``generate`` does, on any layout; every rank must call alike.

        A T5's encoder reads the prompts, and its decoder writes from ``decoder_start_token_id`` on, or continues rows
        of its own.

        Works in training too (from a callback, say), which goes on as if nothing had happened. The copies of the model
        share the prompts' rows.

        Args:
            input_ids: [b, s], the prompts, the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding, on whichever side. None: padding is what equals the
                padding token, unless that ends texts.
            decoder_input_ids: [b, s_dec], what a T5's decoder continues; the start token is put before them if no row
                begins with it. None for that token alone.
            decoder_attention_mask: [b, s_dec], 1 for tokens and 0 for padding, which is taken out; None for no padding.
            on_tokens: Called with each new token of this rank's rows as soon as it is chosen, [b] with -1 for rows that
                have ended, where it is given; reading them on the host makes generation wait.
            options: Fields of ``GenerationOptions``: ``max_new_tokens``, ``temperature``, ``stop_strings`` with
                ``tokenizer``, ``seed``, ...

        Returns:
            [b, s + new] on every rank: ``input_ids`` and what follows; padding behind rows that ended before others. Of
            a T5, what the decoder reads and writes: [b, s_dec + new].

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, a prompt cannot be
                continued, or an option is unknown, out of range or contradicts another.
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
        """As ``generate``, with the log-probability of each new token and the score of each text."""
        model, given = self._live_model(writes=True), {"input_ids": input_ids, "attention_mask": attention_mask}
        given |= {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
        with self.megatron.engine():
            return model.generate(given, options, self._ends, on_tokens)

    def predict_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> torch.Tensor | None:
        """Continue the prompts of one batch as ``generation`` says; each copy of the model has batches of its own.

        With ``return_logits`` give the logits of the batch instead, of whatever the model reads of it: a batch of
        ``test`` will do, too. ``gather_predictions`` puts what all copies have predicted into the dataset's order.

        Rows of two batches, or of two copies, may be of different length. To put all of them together::

            rows = [row for texts in trainer.predict(module, loader) for row in texts]
            texts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)

        Args:
            batch: What ``generate`` takes, by the same names: ``input_ids`` [b, s] and, if rows are padded,
                ``attention_mask``. Of a T5 also Megatron's ``text_enc`` and ``enc_mask``; what its decoder shall
                continue counts only in a batch without ``labels``.
            batch_idx: Makes each batch draw other numbers.
            dataloader_idx: Not used.

        Returns:
            [b, s + new] or, of a T5, [b, s_dec + new], on all ranks of the copy; rows that fill up the last batch are
            left out. Logits: as ``logits``; None before the last stage if ``return_logits`` says so.

        Raises:
            ConfigError: If the batch has no prompts, or one that cannot be continued (or read).
        """
        rows = inputs_from_batch(batch, self.model_config, for_generation=not self.return_logits)
        with self.megatron.engine():
            if self.return_logits:
                last_stage_only = self.return_logits == "last_stage"
                return self._live_model().logits(rows, is_shared=False, last_stage_only=last_stage_only)
            if len(rows["input_ids"]) == 0:
                return rows["input_ids"].long()
            # What torch makes of a negative seed, too.
            options = {**vars(self.generation), "seed": (self.generation.seed + batch_idx) % 2**64}
            return self._live_model(writes=True).generate(rows, options, self._ends, is_shared=False).sequences

    def forward(self, batch: dict[str, torch.Tensor] | torch.Tensor) -> torch.Tensor | None:
        """What ``logits`` gives, of a batch (but for its targets) or of ``input_ids``; every rank must call alike."""
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
        """What the model predicts at every token, as its Hugging Face model does; every rank must call alike.

        The copies of the model share the rows. Works in training too, without dropout. The result is whole: gathered
        over tp and dp, padding of the vocabulary removed. It takes b * s * vocab_size * 4 bytes on every rank that
        keeps it: 1 GiB for 8 rows of 1,024 tokens and a vocabulary of 32,768.

        Args:
            input_ids: [b, s], the same on every rank.
            attention_mask: [b, s], 1 for tokens and 0 for padding; None for no padding.
            decoder_input_ids: [b, s_dec], what the decoder of a T5 reads; None for other models.
            token_type_ids: [b, s], of a BERT; None for 0 everywhere.
            last_stage_only: Keep the result on the ranks of the last pipeline stage, where it is computed; the others
                get None.

        Returns:
            [b, s, vocab_size] fp32, in the order of the rows; of a T5 [b, s_dec, vocab_size]; of a BERT as its task
            says: [b, s, vocab_size], [b, num_labels] for ``sequence_classification``, else [b, s, num_labels] (the
            order of sentences, which ``pretraining`` also learns, is left out).

        Raises:
            ConfigError: On all ranks alike, before anything runs: if there is no model yet, or it cannot read a row.
        """
        model, given = self._live_model(), {"input_ids": input_ids, "attention_mask": attention_mask}
        given |= {"decoder_input_ids": decoder_input_ids, "token_type_ids": token_type_ids}
        with self.megatron.engine():
            return model.logits(given, last_stage_only=last_stage_only)

    @cached_property
    def _ends(self) -> SpecialTokens:
        return special_tokens(self._model)

    def _live_model(self, *, writes: bool = False) -> LiveModel:
        """The model on this rank, which must be a GPT or T5 if it ``writes``.

        Raises:
            ConfigError: If there is none yet, or it is a BERT that shall write.
        """
        from lightning_megatron.generate.decode import LiveModel

        if writes and self.model_config.architecture == "bert":
            raise ConfigError(f"generate is for GPTs and T5s, and {self.model_config.family} is a BERT")
        return LiveModel(
            chunks=self._chunks_to_ask(),
            config=self.model_config,
            topology=self.megatron.topology,
            device=self.megatron.root_device,
            is_own=self.model_provider is None,
        )

    def _chunks_to_ask(self) -> list[torch.nn.Module]:
        """This rank's chunks, built first on one process if there are weights for them and no Trainer yet.

        Raises:
            ConfigError: If there are none yet, and no weights.
        """
        if self.model_chunks is None and self._trainer is None and (self.load_from or self.pretrained_path):
            from lightning_megatron.strategy import MegatronStrategy

            pl.Trainer(
                accelerator="gpu" if torch.cuda.is_available() else "cpu",
                devices=1,
                strategy=MegatronStrategy(),
                limit_predict_batches=0,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).predict(self, [])
        if self.model_chunks is None:
            raise ConfigError("there is no model to ask before Trainer.fit (or validate) has built it; call this then")
        return list(self.model_chunks)

    # ---- the weights -----------------------------------------------------------------------------------------------

    def save_pretrained(
        self, save_directory: str | Path, max_shard_size: str | int = "5GB", merge: bool = False
    ) -> None:
        """Write the model as a Hugging Face directory, which ``AutoModelFor*.from_pretrained`` loads.

        With ``lora`` write the adapter alone, which ``peft.PeftModel.from_pretrained`` loads, unless it is to be
        merged.

        Every rank must call, within or after ``fit``. The weights are those that the model computes with (bf16 under
        ``bf16-mixed``); no rank holds more than one file's part of them at a time.

        Args:
            save_directory: Where to; made if it does not exist. Only rank 0 writes.
            max_shard_size: Largest weight file, e.g. ``200MB``, or bytes.
            merge: With ``lora``: write the whole model, adapters added to its weights.

        Raises:
            ConfigError: If there is no model yet, no Hugging Face class computes it, or there is nothing to merge.
            CheckpointError: If the directory cannot be written, on all ranks alike.
        """
        from lightning_megatron.convert.hugging_face import generation_config, save_hugging_face
        from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
        from lightning_megatron.models.lora import merged

        if merge and self.adaptation is None:
            raise ConfigError("merge=True: expected a module with lora, got one without; leave merge out")
        if self.model_chunks is None:
            raise ConfigError("there is no model to save before Trainer.fit (or validate) has built it; call it then")
        if self.is_variant or self.model_provider is not None:
            raise ConfigError(
                f"no Hugging Face {self.model_config.family} model computes this; use trainer.save_checkpoint"
            )
        chunks = list(self.model_chunks)
        if unwrap(chunks[0]).config.moe_router_enable_expert_bias:
            raise ConfigError(
                f"no Hugging Face {self.model_config.family} model has biases of experts "
                "(moe_router_enable_expert_bias); save a checkpoint with trainer.save_checkpoint"
            )
        directory = Path(self.megatron.broadcast(str(save_directory)))
        with self.megatron.engine():
            finish_parameter_gathers(chunks)
            if self.adaptation is not None and not merge:
                save_adapter(chunks, self.model_config, directory, self.adaptation.base)
                return
            model, companions = replace(self.model_config, lora=None), generation_config(self.pretrained_path)
            with merged(chunks):
                save_hugging_face(chunks, model, config_object(self._model), directory, max_shard_size, companions)

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
            commit_message: Of the commit; None for "Upload model".
            private: Whether a repository that is created is private; None for its owner's default.
            token: Of the hub; None for that of ``hf auth login`` or ``HF_TOKEN``.
            revision: Branch to commit to, created if it does not exist; None for the main one.
            create_pr: Open a pull request instead of committing.
            max_shard_size: As for ``save_pretrained``.

        Returns:
            The address of the commit, or of the pull request, on every rank.

        Raises:
            ConfigError: On all ranks alike: if there is no model yet, no Hugging Face class computes it, or the hub
                cannot be reached or refuses it.
            CheckpointError: If the temporary folder of rank 0 cannot be written.
        """
        from huggingface_hub import HfApi

        def upload() -> str:
            try:
                api = HfApi(token=token)
                api.create_repo(repo_id, private=private, exist_ok=True)
                if revision is not None and not create_pr:
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
                message = commit_message or "Upload model"
                done = api.upload_folder(
                    repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision, create_pr=create_pr
                )
            except Exception as error:  # of any kind: huggingface_hub's own, or its HTTP client's
                reason = first_line(error)
                raise ConfigError(
                    f"{repo_id} cannot be written on the Hugging Face hub ({reason}); try `hf auth login`"
                ) from error
            return str(done.pr_url or done.commit_url)

        with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as folder, ThreadPoolExecutor(1) as pool:
            self.save_pretrained(folder, max_shard_size)
            running = pool.submit(upload) if self.megatron.global_rank == 0 else None
            # The others meet rank 0 every minute: an upload may take longer than a collective waits.
            while not self.megatron.broadcast(running is not None and bool(wait([running], timeout=60).done)):
                pass
            return self.megatron.broadcast(call_on_all_ranks(lambda: running.result() if running else ""))


def _on_host(number: float) -> torch.Tensor:
    """For ``self.log``: lightning 2.6, core/module.py, copies a plain number to the GPU and waits for all before it."""
    return torch.tensor(number)


def _weights_directory(model: Any) -> Path:
    """The directory that ``pretrained=True`` reads.

    Raises:
        ConfigError: If ``model`` is no directory.
    """
    if not isinstance(model, (str, Path)) or not Path(model).is_dir():
        given = repr(model) if isinstance(model, (str, Path)) else f"a {type(model).__name__}"
        raise ConfigError(f"pretrained=True needs a model directory with weights, and model is {given}; give its path")
    return Path(model)


def _described_object(value: Any) -> str | None:
    """A name as it is; of an object where it comes from: a tokenizer's folder, or its class or function with module."""
    if value is None or isinstance(value, str):
        return value
    if getattr(value, "name_or_path", None):
        return str(value.name_or_path)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
