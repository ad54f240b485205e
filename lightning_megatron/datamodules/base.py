"""``MegatronDataModule``: one rank per replica reads samples, and runs resume exactly at any layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Never

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.batch_shape import BatchRampup, BatchShape
from lightning_megatron.data.contents import is_same
from lightning_megatron.data.loader import (
    PassLoader,
    PassOrder,
    Position,
    Shuffling,
    TrainLoader,
)
from lightning_megatron.data.samples import Samples
from lightning_megatron.data.splits import SPLIT_NAMES, SplitName
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.errors import (
    LARGEST_BATCH,
    LARGEST_SEED,
    MOST_PROCESSES,
    ConfigError,
    require_kind,
    require_number,
)
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy


_SPLIT_OF_STAGE: dict[str, SplitName] = {
    "fit": "train",
    "validate": "valid",
    "test": "test",
    "predict": "test",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of strategy, Trainer and model that a data module is checked against."""

    shape: BatchShape
    """Batch sizes of a step; the data-parallel rank in it is not used."""
    model: ModelConfig | None = None
    """Model config; None if the module has no ``model_config``."""
    train_step: object = None
    """The module's train step; None if it has none."""
    splits: tuple[SplitName, ...] = SPLIT_NAMES
    """Splits that will be read; others may be empty."""


class MegatronDataModule(LightningDataModule, ABC):
    """Base data module: one rank of each replica reads samples, and broadcasts its batches to the other ranks.

    A batch is one optimizer step of one data-parallel rank: ``micro_batch_size * num_microbatches`` rows. Batches of
    validation, test and prediction also have a ``sample_mask``, 0 for the rows that pad the last batch.

    Length of training: with ``max_steps`` and no ``max_epochs`` the whole run is one Lightning epoch of ``max_steps``
    steps, with as many passes over the samples as needed. With ``max_epochs`` a Lightning epoch is one pass over the
    training samples without the last incomplete global batch.

    A checkpoint holds the number of consumed samples, so a run resumes with the next one at any tp, pp, dp,
    ``num_microbatches`` and ``num_workers``: none is repeated or skipped within a pass.
    """

    shuffling: Shuffling = "every pass"
    """Which passes over the training samples are shuffled."""
    lays_out_whole_run: ClassVar[bool] = False
    """Whether the samples depend on their number in a run of ``max_steps``."""

    def __init__(
        self,
        *,
        micro_batch_size: int,
        num_workers: int,
        seed: int,
        rampup_batch_size: Sequence[int] | None = None,
    ) -> None:
        """Check and store the options of every data module.

        Args:
            micro_batch_size: Samples in one microbatch of one data-parallel rank.
            num_workers: Worker processes that prefetch samples, on each rank that reads.
            seed: Seed of the order of samples.
            rampup_batch_size: First global batch size, increment, and samples until the full size is reached.

        Raises:
            ConfigError: If a value is out of range.
        """
        super().__init__()
        require_number("micro_batch_size", micro_batch_size, at_least=1, at_most=LARGEST_BATCH)
        require_number("num_workers", num_workers, at_most=MOST_PROCESSES)
        require_number("seed", seed, at_most=LARGEST_SEED)
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.rampup: BatchRampup | None = None
        if rampup_batch_size is not None:
            self.rampup = _rampup(rampup_batch_size)
        self._sources: dict[SplitName, Any] = {}
        self._train_loader: TrainLoader | None = None
        self._restored: dict[str, Any] = {}

    # ---- to override in a subclass ----------------------------------------------------------------------------------

    def has_split(self, name: SplitName) -> bool:
        """Whether the split exists."""
        return name in self._sources

    def check(self, run: Run) -> None:
        """Check source and settings, in one process and before others are launched.

        Raises:
            ConfigError: If settings are incompatible.
            DataError: If the source is missing, damaged or too small, or does not fit the model.
        """
        for name in SPLIT_NAMES:
            if self.has_split(name):
                self.open(name, None)

    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        """Lengths of a row for ``model`` that are known in advance, by the option that sets them."""
        lengths = {}
        for name in ("seq_length", "pad_to_multiple_of"):
            length = getattr(self, name, None)
            if length is not None:
                lengths[name] = length
        return lengths

    @abstractmethod
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        """Open the samples of a split; called on the ranks that read.

        Args:
            name: The split.
            num_samples: Number of samples of the whole run, if they depend on it; None for one pass.
        """

    # ---- Lightning's hooks ------------------------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        """Check on rank 0, and raise its error on every rank. Collective over the world.

        Raises:
            ConfigError: If strategy, Trainer settings or source are incompatible.
        """
        strategy = self._strategy()
        self._check_trainer(stage)
        if stage == "fit":
            # Not in teardown(): a checkpoint may be saved after the run.
            self._train_loader = None
            self._restored = {}
        run = self.run()
        with raise_on_all_ranks():
            if strategy.global_rank == 0:
                self.check(run)

    @override
    def train_dataloader(self) -> TrainLoader:
        """Loader of the training split, from the restored position on. Collective over the world."""
        trainer = self._trainer()
        shape = self._shape()
        # ``max_epochs`` is -1 if only ``max_steps`` was given.
        counts_epochs = trainer.max_steps < 0 or (
            trainer.max_epochs is not None and trainer.max_epochs >= 0
        )
        num_samples = None
        if self.lays_out_whole_run and not counts_epochs:
            num_samples = max(1, shape.position_after(0, trainer.max_steps))
        is_reloaded = self._train_loader is not None  # reload_dataloaders_every_n_epochs
        restored = self._restored or self.state_dict()
        self._restored = {}
        # The order may depend on the number of samples: a resumed run keeps the order it began with.
        order, samples = self._open("train", restored.get("num_samples", num_samples))
        max_steps = None
        if not counts_epochs:
            max_steps = trainer.max_steps
        loader = TrainLoader(samples, order, shape, max_steps, self.num_workers)
        self._train_loader = loader
        loader.state_dict = self.state_dict
        if is_reloaded:
            loader.seek(restored["train"])
            loader.set_epoch(trainer.current_epoch)
        elif restored:
            self._restore_position(loader, restored)
        self._check_lengths_of_epochs(loader)
        self._check_validation_interval(len(loader))
        return loader

    @override
    def val_dataloader(self) -> PassLoader | list[PassLoader]:
        """Loader of one pass over the validation split; no loader if there is none. Collective over the world."""
        return self._pass_loader("valid")

    @override
    def test_dataloader(self) -> PassLoader | list[PassLoader]:
        """Loader of one pass over the test split. Collective over the world."""
        return self._pass_loader("test")

    predict_dataloader = test_dataloader

    @override
    def state_dict(self) -> dict[str, Any]:
        """Position in the training samples, and the fingerprint of their order."""
        loader = self._train_loader
        if loader is None:
            return {}
        return {
            "train": vars(loader.position).copy(),
            "train_order": loader.order.fingerprint,
            "shuffle": _shuffle_of(loader.order),
            "num_samples": loader.order.requested,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position, if this is a training run. Collective over the world."""
        if "train" not in state_dict or self._trainer().state.fn != TrainerFn.FITTING:
            return
        loader = self._train_loader
        if loader is None:
            self._restored = state_dict
            return
        num_samples = state_dict.get("num_samples", loader.order.requested)
        if num_samples != loader.order.requested:
            loader.order, loader.samples = self._open("train", num_samples)
        self._restore_position(loader, state_dict)
        self._check_lengths_of_epochs(loader)

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: object, *args: object, **settings: object
    ) -> Never:
        """Refuse: no checkpoint has a data module's arguments, and Lightning's reader calls what a file names.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{cls.__name__}.load_from_checkpoint({checkpoint_path}): a checkpoint holds the position in the samples,"
            f" not the arguments; create {cls.__name__}(...), and give the path to trainer.fit(ckpt_path=...)"
        )

    # ---- called by the strategy -------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Train from the first sample on: the run has loaded a checkpoint without a position.

        LearningRateFinder goes back to one that it has saved before the first batch.
        """
        self._restored = {}
        if self._train_loader is not None:
            self._train_loader.seek(vars(Position()))

    def run(self) -> Run:
        """Settings of the Trainer's current function, known before any process is launched."""
        trainer = self._trainer()
        # The command line checks before the Trainer starts.
        stage = trainer.state.fn or TrainerFn.FITTING
        splits = [_SPLIT_OF_STAGE[stage.value]]
        if stage == TrainerFn.FITTING and trainer.limit_val_batches > 0:
            splits.append("valid")
        return Run(
            shape=self._shape(data_parallel_rank=0),
            model=self.model(),
            train_step=getattr(trainer.lightning_module, "train_step", None),
            splits=tuple(splits),
        )

    def check_run(self, strategy: MegatronStrategy) -> None:
        """Check the samples against model and layout, before any process is launched.

        Raises:
            ConfigError: If settings are incompatible, or the data is missing, damaged or too small.
        """
        trainer = self._trainer()
        if trainer.state.fn is not None:
            self._check_trainer(trainer.state.fn.value)
        run = self.run()
        limit = None
        for num_microbatches in run.shape.stages:
            replace(strategy.parallel, num_microbatches=num_microbatches)  # checks itself
        # Rotary embeddings and ALiBi extend to any position; learned ones do not.
        if run.model is not None and run.model.position_embedding_type == "learned_absolute":
            limit = run.model.max_position_embeddings
        for name, length in self.lengths(run.model).items():
            strategy.parallel.check_sequence(length, limit, name=name)
        environment = strategy.cluster_environment
        # Called by Lightning later.
        makes_data = type(self).prepare_data is not LightningDataModule.prepare_data
        # If a launcher has created all processes, setup() checks on rank 0 instead, and broadcasts the error.
        if not makes_data and (environment is None or not environment.creates_processes_externally):
            self.check(run)

    def model(self) -> ModelConfig | None:
        """Config of the Trainer's current model; None without a Trainer, or if its module has no ``model_config``."""
        return getattr(getattr(self.trainer, "lightning_module", None), "model_config", None)

    def _pass_loader(self, name: SplitName) -> PassLoader | list[PassLoader]:
        if not self.has_split(name):
            return []
        order, samples = self._open(name, None)
        return PassLoader(samples, order.num_samples, self._shape(), self.num_workers)

    def _restore_position(
        self,
        loader: TrainLoader,
        restored: dict[str, Any],
    ) -> None:
        loader.seek(restored["train"])
        order = loader.order
        shuffle = _shuffle_of(order)
        is_same_order = is_same(restored.get("train_order"), order.fingerprint)
        # Older checkpoints do not tell.
        if not is_same_order or restored.get("shuffle", shuffle) != shuffle:
            rank_zero_warn(
                f"The run goes on at sample {loader.position.consumed_samples} of another order than the checkpoint's:"
                " data, split, lengths, shuffling or seed differ, and samples may repeat"
            )

    def _check_lengths_of_epochs(self, loader: TrainLoader) -> None:
        """Refuse epochs of different lengths: Lightning reads the length once, unless it reloads the loader."""
        trainer = self._trainer()
        is_last = 0 <= (trainer.max_epochs or -1) <= loader.position.epoch + 1
        if is_last or trainer.reload_dataloaders_every_n_epochs == 1:
            return
        if loader.next_epoch_has_same_length():
            return
        raise ConfigError(
            f"epoch {loader.position.epoch} has {len(loader)} steps and later ones differ, but Lightning uses the first"
            " length for all; set Trainer(reload_dataloaders_every_n_epochs=1), or keep global batch size and samples"
        )

    def _open(
        self,
        name: SplitName,
        num_samples: int | None,
    ) -> tuple[PassOrder, Samples | None]:
        """Order of samples on every rank, and the samples on ranks that read. Collective over the world.

        Rank 0 reads, and opens the samples first: it builds the caches that the others load.
        """
        strategy = self._strategy()
        is_first = strategy.global_rank == 0
        samples: Samples | None = None
        facts: tuple[int, str] | None = None
        with raise_on_all_ranks():
            if is_first:
                samples = self.open(name, num_samples)
                facts = (len(samples), samples.fingerprint)
        size, fingerprint = strategy.broadcast(facts)
        with raise_on_all_ranks():
            if strategy.is_data_source and not is_first:
                samples = self.open(name, num_samples)
        order = PassOrder(size, self.seed, self.shuffling, fingerprint, num_samples)
        return order, samples

    def _check_trainer(self, stage: str) -> None:
        trainer = self._trainer()
        split = _SPLIT_OF_STAGE.get(stage)
        if split is not None and not self.has_split(split):
            call = TrainerFn(stage).value
            raise ConfigError(
                f"{type(self).__name__} has no {split} split for trainer.{call}; give it data or a weight"
            )
        if trainer.overfit_batches:
            raise ConfigError(
                f"overfit_batches={trainer.overfit_batches} cannot repeat batches of {type(self).__name__}; set it to 0"
            )

    def _check_validation_interval(self, num_steps: int) -> None:
        """Raise what Lightning would refuse, as ``ConfigError`` instead of an error with a traceback."""
        trainer = self._trainer()
        limit = trainer.limit_train_batches
        if isinstance(limit, int):
            num_steps = min(num_steps, limit)
        else:
            num_steps = int(num_steps * limit)
        if trainer.check_val_every_n_epoch is None or trainer.limit_val_batches <= 0:
            return
        interval = trainer.val_check_interval
        if isinstance(interval, int) and interval > num_steps > 0:
            raise ConfigError(
                f"val_check_interval={interval} is more than the {num_steps} training steps of a Lightning epoch; lower"
                " it, set check_val_every_n_epoch=None to count steps over epochs, or limit_val_batches=0"
            )

    def _shape(self, data_parallel_rank: int | None = None) -> BatchShape:
        """Batch sizes of a step for a data-parallel rank, by default this one."""
        strategy = self._strategy()
        if data_parallel_rank is None:
            data_parallel_rank = strategy.data_parallel_rank
        return BatchShape(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=strategy.num_microbatches,
            data_parallel_size=strategy.data_parallel_size,
            data_parallel_rank=data_parallel_rank,
            rampup=self.rampup,
        )

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no Trainer yet; pass it to trainer.fit(datamodule=...)"
            )
        return self.trainer

    def _strategy(self) -> Any:
        strategy: Any = self._trainer().strategy
        if "is_data_source" not in dir(strategy):  # its value is unknown before the run
            raise ConfigError(
                f"{type(self).__name__} needs MegatronStrategy, got {type(strategy).__name__}; use it"
            )
        return strategy


def _rampup(numbers: Sequence[int]) -> BatchRampup:
    """The ramp-up ``[start, increment, samples]``, if these are numbers in range."""
    if len(numbers) != 3:
        raise ConfigError(
            f"rampup_batch_size={list(numbers)}: expected [start, increment, samples]"
        )
    rampup = BatchRampup(*numbers)
    for part, value in vars(rampup).items():
        option = f"rampup_batch_size: {part}"
        require_kind(option, value, "int")
        require_number(option, value, at_least=part != "samples", at_most=LARGEST_SEED)
    return rampup


def _shuffle_of(order: PassOrder) -> list[Any]:
    """What determines an order besides its samples, as plain data."""
    seed = order.seed if order.shuffling != "never" else None
    return [order.shuffling, seed]
