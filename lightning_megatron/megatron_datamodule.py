"""Base class of data modules: samples are read on one rank of each model copy, and resumed exactly at any layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.loader import BatchRampup, BatchShape, PassLoader, PassOrder, Shuffling, TrainLoader
from lightning_megatron.data.samples import SPLIT_NAMES, Samples, SplitName
from lightning_megatron.engine.collectives import call_on_all_ranks
from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy

_NEEDED: dict[str, SplitName] = {"fit": "train", "validate": "valid", "test": "test", "predict": "test"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a data module must know of strategy, Trainer and model."""

    shape: BatchShape
    """How a step is dealt; the rank in it does not matter."""
    model: ModelConfig | None = None
    """The model; None if the module has no ``model_config``."""
    train_step: object = None
    """Its objective, likewise."""
    splits: tuple[SplitName, ...] = SPLIT_NAMES
    """Those that are about to be read; others may be empty."""


class MegatronDataModule(LightningDataModule, ABC):
    """Serves samples to the ranks that read: one for each copy of the model, which sends its batches to the others.

    A batch is one optimizer step of one data-parallel rank: ``micro_batch_size * num_microbatches`` rows. Batches of
    validation, test and prediction have a ``sample_mask`` too, 0 for the rows that fill the last one up.

    Length of training: with ``max_steps`` and no ``max_epochs`` the whole run is one Lightning epoch of ``max_steps``
    steps, which goes over the samples as often as it takes. With ``max_epochs`` a Lightning epoch is one pass over the
    training samples without the last incomplete global batch.

    A checkpoint holds the number of samples consumed, so a run goes on with the next one at any tp, pp, dp,
    ``num_microbatches`` and ``num_workers``: none is repeated or skipped within a pass.
    """

    shuffling: Shuffling = "every pass"
    """Which passes over the training samples take them in another order than their own."""
    lays_out_whole_run: ClassVar[bool] = False
    """Whether samples depend on how many a run of ``max_steps`` takes."""

    def __init__(
        self, *, micro_batch_size: int, num_workers: int, seed: int, rampup_batch_size: Sequence[int] | None = None
    ) -> None:
        """Check and keep what every data module has.

        Args:
            micro_batch_size: Samples in one microbatch of one data-parallel rank.
            num_workers: Processes that read ahead, on each rank that reads at all.
            seed: Of the order of samples.
            rampup_batch_size: First global batch, increment, and samples until the batch has its full size.

        Raises:
            ConfigError: If a value is out of range.
        """
        super().__init__()
        require_number("micro_batch_size", micro_batch_size, at_least=1)
        require_number("num_workers", num_workers)
        require_number("seed", seed)
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.seed = seed
        if rampup_batch_size is not None and len(rampup_batch_size) != 3:
            raise ConfigError(f"rampup_batch_size={list(rampup_batch_size)}: expected [start, increment, samples]")
        self.rampup = None if rampup_batch_size is None else BatchRampup(*rampup_batch_size)
        self._sources: dict[SplitName, Any] = {}
        self._train_loader: TrainLoader | None = None
        self._restored: dict[str, Any] = {}

    # ---- what a kind of source provides -----------------------------------------------------------------------------

    def has_split(self, name: SplitName) -> bool:
        """Whether there is a split of this name."""
        return name in self._sources

    def check(self, run: Run) -> None:
        """Check source and settings together, in one process and before any other exists.

        Raises:
            ConfigError: If settings do not fit together.
            DataError: If the source is missing, damaged or too small, or does not fit the model.
        """
        for name in SPLIT_NAMES:
            if self.has_split(name):
                self.open(name, None)

    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        """Every length of a row for ``model`` that is known in advance, by the option that sets it."""
        given = {name: getattr(self, name, None) for name in ("seq_length", "pad_to_multiple_of")}
        return {name: length for name, length in given.items() if length is not None}

    @abstractmethod
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        """The samples of a split; called on the ranks that read.

        Args:
            name: The split.
            num_samples: Samples of the whole run if they depend on that, None for one pass.
        """

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        """Check on rank 0, alike for all ranks; every rank must call.

        Raises:
            ConfigError: If strategy, Trainer settings or source do not allow what is asked.
        """
        strategy = self._strategy()
        self._check_trainer(stage)
        if stage == "fit":
            # Not in teardown(): a checkpoint may be saved after the run.
            self._train_loader = None
            self._restored = {}
        run, is_first = self.run(), strategy.global_rank == 0
        call_on_all_ranks(lambda: self.check(run) if is_first else None)

    @override
    def train_dataloader(self) -> TrainLoader:
        """Batches of the training split, from the restored position on; every rank must call."""
        trainer, shape = self._trainer(), self._shape()
        # ``max_epochs`` is -1 if only ``max_steps`` was given.
        counts_epochs = trainer.max_steps < 0 or (trainer.max_epochs is not None and trainer.max_epochs >= 0)
        num_samples = None
        if self.lays_out_whole_run and not counts_epochs:
            num_samples = max(1, shape.position_after(0, trainer.max_steps))
        is_reloaded = self._train_loader is not None  # reload_dataloaders_every_n_epochs
        restored, self._restored = self._restored or self.state_dict(), {}
        # Another number of samples may be another order: the run goes on in the one that it began with.
        order, samples = self._open("train", restored.get("num_samples", num_samples))
        loader = TrainLoader(samples, order, shape, None if counts_epochs else trainer.max_steps, self.num_workers)
        self._train_loader, loader.state_dict = loader, self.state_dict
        if is_reloaded:
            loader.seek(restored["train"])
            loader.set_epoch(trainer.current_epoch)
        elif restored:
            self._go_to(loader, restored)
        self._check_lengths_of_epochs(loader)
        self._check_validation_interval(len(loader))
        return loader

    @override
    def val_dataloader(self) -> PassLoader | list[PassLoader]:
        """One pass over the validation split; no loader if there is none. Every rank must call."""
        return self._pass_loader("valid")

    @override
    def test_dataloader(self) -> PassLoader | list[PassLoader]:
        """One pass over the test split. Every rank must call."""
        return self._pass_loader("test")

    predict_dataloader = test_dataloader

    @override
    def state_dict(self) -> dict[str, Any]:
        """Position in the training samples, and which samples those are."""
        if (loader := self._train_loader) is None:
            return {}
        position, order = vars(loader.position).copy(), loader.order
        return {"train": position, "train_order": order.fingerprint, "num_samples": order.requested}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, if this is a training run; every rank must call."""
        if "train" not in state_dict or self._trainer().state.fn != TrainerFn.FITTING:
            return
        if (loader := self._train_loader) is None:
            self._restored = state_dict
            return
        num_samples = state_dict.get("num_samples", loader.order.requested)
        if num_samples != loader.order.requested:
            loader.order, loader.samples = self._open("train", num_samples)
        self._go_to(loader, state_dict)
        self._check_lengths_of_epochs(loader)

    # ---- for the Trainer's side -------------------------------------------------------------------------------------

    def run(self) -> Run:
        """What this data module's Trainer is about to do, known before any process is started."""
        trainer = self._trainer()
        stage = trainer.state.fn or TrainerFn.FITTING  # a command checks before the Trainer begins
        validates = stage == TrainerFn.FITTING and trainer.limit_val_batches > 0
        return Run(
            shape=self._shape(data_parallel_rank=0),
            model=self.model(),
            train_step=getattr(trainer.lightning_module, "train_step", None),
            splits=(_NEEDED[stage.value], *(("valid",) if validates else ())),
        )

    def check_run(self, strategy: MegatronStrategy) -> None:
        """Check the samples against model and layout, before any process is started.

        Raises:
            ConfigError: If settings do not fit together, or the data is missing, damaged or too small.
        """
        trainer = self._trainer()
        if trainer.state.fn is not None:
            self._check_trainer(trainer.state.fn.value)
        run, limit = self.run(), None
        for num_microbatches in run.shape.stages:
            replace(strategy.parallel, num_microbatches=num_microbatches)  # checks itself
        # Rotary positions and ALiBi go on where the table of learned ones ends.
        if run.model is not None and run.model.position_embedding_type == "learned_absolute":
            limit = run.model.max_position_embeddings
        for name, length in self.lengths(run.model).items():
            strategy.parallel.check_sequence(length, limit, name=name)
        environment = strategy.cluster_environment
        makes_data = type(self).prepare_data is not LightningDataModule.prepare_data  # which Lightning calls later
        # Where all processes exist already, one looks at the files in setup() and tells the others what it found.
        if not makes_data and (environment is None or not environment.creates_processes_externally):
            self.check(run)

    def model(self) -> ModelConfig | None:
        """The model that the Trainer runs now; None without a Trainer, or if its module has no ``model_config``."""
        return getattr(getattr(self.trainer, "lightning_module", None), "model_config", None)

    def _pass_loader(self, name: SplitName) -> PassLoader | list[PassLoader]:
        if not self.has_split(name):
            return []
        order, samples = self._open(name, None)
        return PassLoader(samples, order.num_samples, self._shape(), self.num_workers)

    def _go_to(self, loader: TrainLoader, restored: dict[str, Any]) -> None:
        loader.seek(restored["train"])
        if restored.get("train_order") != loader.order.fingerprint:
            rank_zero_warn(
                f"The run goes on at sample {loader.position.consumed_samples} of another order than the checkpoint's:"
                " data, split, lengths or seed differ, and samples may come again"
            )

    def _check_lengths_of_epochs(self, loader: TrainLoader) -> None:
        """Lightning asks for the length of an epoch once, and would cut longer ones, unless it renews the loader."""
        trainer = self._trainer()
        is_last = 0 <= (trainer.max_epochs or -1) <= loader.position.epoch + 1
        if is_last or trainer.reload_dataloaders_every_n_epochs == 1 or loader.next_epoch_has_same_length():
            return
        raise ConfigError(
            f"epoch {loader.position.epoch} has {len(loader)} steps and later ones have others, and Lightning takes the"
            " first length for all; set Trainer(reload_dataloaders_every_n_epochs=1), or keep the global batch size"
        )

    def _open(self, name: SplitName, num_samples: int | None) -> tuple[PassOrder, Samples | None]:
        """The order of samples on every rank, and these on those that read; every rank must call.

        Rank 0 reads, and is the first to open them: it builds what the others find.
        """
        strategy = self._strategy()

        def opened(is_mine: bool) -> Samples | None:
            return call_on_all_ranks(lambda: self.open(name, num_samples) if is_mine else None)

        samples = opened(strategy.global_rank == 0)
        size, fingerprint = strategy.broadcast(None if samples is None else (len(samples), samples.fingerprint))
        others = opened(strategy.is_data_source and strategy.global_rank != 0)
        order = PassOrder(size, self.seed, self.shuffling, fingerprint, num_samples)
        return order, others if samples is None else samples

    def _check_trainer(self, stage: str) -> None:
        trainer = self._trainer()
        if stage in _NEEDED and not self.has_split(_NEEDED[stage]):
            split, call = _NEEDED[stage], TrainerFn(stage).value
            raise ConfigError(
                f"{type(self).__name__} has no {split} split for trainer.{call}; give it data or a weight"
            )
        if trainer.overfit_batches:
            raise ConfigError(
                f"overfit_batches={trainer.overfit_batches} cannot repeat batches of {type(self).__name__}; set it to 0"
            )

    def _check_validation_interval(self, num_steps: int) -> None:
        """Lightning's own refusal is an error like any other, which ends a run with a traceback."""
        trainer = self._trainer()
        interval, limit = trainer.val_check_interval, trainer.limit_train_batches
        num_steps = min(num_steps, limit) if isinstance(limit, int) else int(num_steps * limit)
        counts_one_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
        if counts_one_epoch and isinstance(interval, int) and interval > num_steps > 0:
            raise ConfigError(
                f"val_check_interval={interval} is more than the {num_steps} training steps of a Lightning epoch; lower"
                " it, set check_val_every_n_epoch=None to count steps over epochs, or limit_val_batches=0"
            )

    def _shape(self, data_parallel_rank: int | None = None) -> BatchShape:
        """How a step is dealt to a rank, this one unless one is named."""
        strategy = self._strategy()
        return BatchShape(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=strategy.num_microbatches,
            data_parallel_size=strategy.data_parallel_size,
            data_parallel_rank=strategy.data_parallel_rank if data_parallel_rank is None else data_parallel_rank,
            rampup=self.rampup,
        )

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise RuntimeError(f"{type(self).__name__} has no Trainer yet; pass it to trainer.fit(datamodule=...)")
        return self.trainer

    def _strategy(self) -> Any:
        strategy: Any = self._trainer().strategy
        if "is_data_source" not in dir(strategy):  # its value is not known before the run
            raise ConfigError(f"{type(self).__name__} needs MegatronStrategy, got {type(strategy).__name__}; use it")
        return strategy
