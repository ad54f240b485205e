"""How does the Trainer get the samples of an indexed dataset?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.formats.mmap import check_dataset, largest_token_at_the_ends
from lightning_megatron.data.samples.gpt import (
    IndexedSamples,
    IndexRequest,
    SampleOrder,
    build_index,
    cache_folder,
    open_samples,
)
from lightning_megatron.data.samples.split import SPLIT_NAMES, SplitName, parse_split, split_sizes
from lightning_megatron.data.serving.sampler import BatchShape, TrainSampler
from lightning_megatron.data.serving.served_loader import IndexedEvaluationLoader, IndexedTrainLoader
from lightning_megatron.errors import ConfigError, DataError, require_divides

_T = TypeVar("_T")


class IndexedDataModule(LightningDataModule):
    """Training, validation and test samples of GPT from one Megatron dataset, ``PREFIX.bin`` and ``PREFIX.idx``.

    A batch is one optimizer step of one data-parallel rank: ``text`` [micro_batch_size * num_microbatches,
    seq_length + 1]; validation and test add ``sample_mask``. The order of training samples equals Megatron's.

    Length of training: with ``max_steps`` and no ``max_epochs`` the whole run is one Lightning epoch of ``max_steps``
    steps, whose samples go through the corpus as often as it takes, reshuffled each time. With ``max_epochs`` a
    Lightning epoch is one pass over the training documents without the last incomplete global batch.
    Validation and test are one pass over their split; ``limit_val_batches`` shortens it.

    Args:
        data_path: Prefix of the dataset, as ``preprocess`` prints it.
        split: Weights of training, validation and test documents, e.g. ``949,50,1``. A weight of 0 leaves a split out.
        seq_length: Tokens that a sample predicts.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        num_workers: Processes that read ahead, on each rank that reads at all.
        seed: Of the order of samples.
        index_cache: Folder for the order of samples, shared by all machines; next to the dataset if not given.
    """

    def __init__(
        self,
        data_path: str,
        split: str = "949,50,1",
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        num_workers: int = 0,
        seed: int = 1234,
        index_cache: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_length", seq_length, 1),
            ("micro_batch_size", micro_batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} must be at least {least}; correct it")
        weights = parse_split(split)
        self.data_path = data_path
        self.split = split
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.index_cache = index_cache
        self._weights: dict[SplitName, float] = dict(zip(SPLIT_NAMES, weights, strict=True))
        self._train_sampler: TrainSampler | None = None
        self._train_order = ""
        self._restored_position: dict[str, Any] | None = None
        self._restored_order: str | None = None

    def check(
        self,
        *,
        num_microbatches: int,
        data_parallel_size: int,
        sequence_parallel: bool,
        tp: int,
        whole_epochs: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """Check dataset and settings together, in one process and before any other exists.

        Args:
            num_microbatches: Microbatches of a step.
            data_parallel_size: Data-parallel ranks.
            sequence_parallel: Whether activations are split along the sequence over tp.
            tp: Tensor-parallel ranks.
            whole_epochs: Whether a Lightning epoch is a pass over the corpus, which must then hold at least one step.
            vocab_size: The model's, to be compared with the first and last tokens of the dataset.

        Raises:
            ConfigError: If ``sequence_parallel`` cannot split ``seq_length``.
            DataError: If the files are missing, damaged, foreign, of another vocabulary, or too small for a split.
        """
        if sequence_parallel:
            require_divides("tp", tp, "seq_length", self.seq_length)
        header = check_dataset(self.data_path)
        sizes = split_sizes(header, self.split, self.seq_length)
        if whole_epochs and "train" in sizes:
            shape = BatchShape(
                micro_batch_size=self.micro_batch_size,
                num_microbatches=num_microbatches,
                data_parallel_size=data_parallel_size,
                data_parallel_rank=0,
            )
            num_samples = sizes["train"].num_samples(self.seq_length)
            TrainSampler(num_indexed=num_samples, shape=shape, seed=self.seed, max_steps=None)
        if vocab_size is not None and (largest := largest_token_at_the_ends(header)) >= vocab_size:
            raise DataError(
                f"{self.data_path}.bin holds token {largest}, the model's vocab_size={vocab_size} ends at"
                f" {vocab_size - 1}: it was tokenized for another model; preprocess with the model's tokenizer"
            )

    @override
    def setup(self, stage: str) -> None:
        """Check the dataset on rank 0, alike for all ranks; every rank must call.

        Raises:
            ConfigError: If strategy, Trainer settings or dataset do not allow what is asked.
        """
        strategy = self._strategy()
        self._check_trainer(stage)
        if stage == "fit":
            # Not in teardown(): a checkpoint may be saved after the run.
            self._train_sampler = None
            self._restored_position = None
        self._on_first_rank(
            lambda: self.check(
                num_microbatches=strategy.num_microbatches,
                data_parallel_size=strategy.data_parallel_size,
                sequence_parallel=strategy.sequence_parallel,
                tp=strategy.tp,
                whole_epochs=stage == "fit" and self._trains_whole_epochs(),
                vocab_size=self._vocab_size(),
            )
        )

    @override
    def train_dataloader(self) -> IndexedTrainLoader:
        """Batches of the training split, from the restored position on; every rank must call."""
        shape = self._shape()
        max_steps = None if self._trains_whole_epochs() else self._trainer().max_steps
        position, self._restored_position = self._restored_position, None
        num_samples = None if max_steps is None else _samples_of_run(max_steps, shape, position)
        order, samples = self._open("train", num_samples)
        self._train_order = order.fingerprint
        self._train_sampler = TrainSampler(
            num_indexed=order.num_samples, shape=shape, seed=self.seed, max_steps=max_steps
        )
        if position is not None:
            self._go_to(self._train_sampler, position)
        return IndexedTrainLoader(samples, self._train_sampler, shape, self.num_workers)

    @override
    def val_dataloader(self) -> IndexedEvaluationLoader | list[IndexedEvaluationLoader]:
        """One pass over the validation split; no loader if its weight is 0. Every rank must call."""
        return self._evaluation_loader("valid")

    @override
    def test_dataloader(self) -> IndexedEvaluationLoader | list[IndexedEvaluationLoader]:
        """One pass over the test split. Every rank must call."""
        return self._evaluation_loader("test")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Position in the training samples.

        Lightning's fit loop saves the loader's own state too, but restores it only if no one asked for the loader
        before, e.g. for ``trainer.estimated_stepping_batches`` (lightning 2.6.6, loops/fit_loop.py:setup_data).
        """
        if self._train_sampler is None:
            return {}
        return {"train": self._train_sampler.state_dict(), "train_order": self._train_order}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, if this is a training run."""
        if "train" not in state_dict or self._trainer().state.fn != TrainerFn.FITTING:
            return
        self._restored_order = state_dict.get("train_order")
        if self._train_sampler is not None:
            self._go_to(self._train_sampler, state_dict["train"])
        else:
            self._restored_position = state_dict["train"]

    def _evaluation_loader(self, name: SplitName) -> IndexedEvaluationLoader | list[IndexedEvaluationLoader]:
        if self._weights[name] == 0:
            return []
        order, samples = self._open(name, None)
        return IndexedEvaluationLoader(samples, order.num_samples, self._shape(), self.num_workers)

    def _go_to(self, sampler: TrainSampler, position: dict[str, Any]) -> None:
        sampler.load_state_dict(position)
        if self._restored_order != self._train_order:
            rank_zero_warn(
                f"The run goes on at sample {sampler.consumed_samples} of another order than the checkpoint's, so"
                " samples may come again: dataset, split, seq_length or seed differ, or the number of passes over the"
                " corpus does, as all of them are shuffled together. Resume with the same settings and the same"
                " max_steps to take each sample once."
            )

    def _open(self, name: SplitName, num_samples: int | None) -> tuple[SampleOrder, IndexedSamples | None]:
        """The order of samples on every rank, and the open samples on those that read; every rank must call."""
        request = IndexRequest(
            prefix=self.data_path,
            split=self.split,
            name=name,
            seq_length=self.seq_length,
            seed=self.seed,
            num_samples=num_samples,
        )

        def build() -> tuple[SampleOrder, str]:
            folder = cache_folder(request, self.index_cache)
            return build_index(request, folder), folder

        order, folder = self._on_first_rank(build)
        return order, self._on_sources(lambda: open_samples(request, folder))

    def _on_first_rank(self, work: Callable[[], _T]) -> _T:
        """The result of ``work`` on rank 0, or its error, on every rank: none is left waiting for another."""
        strategy = self._strategy()
        outcome: tuple[_T | None, ConfigError | None] = (None, None)
        if strategy.global_rank == 0:
            try:
                outcome = (work(), None)
            except ConfigError as error:
                outcome = (None, error)
        result, failure = strategy.broadcast(outcome, src=0)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def _on_sources(self, work: Callable[[], _T]) -> _T | None:
        """The result of ``work`` on ranks that read data, None on others; an error on one is an error on all."""
        strategy = self._strategy()
        result: _T | None = None
        failure: ConfigError | None = None
        if strategy.is_data_source:
            try:
                result = work()
            except ConfigError as error:
                failure = error
        if not strategy.reduce_boolean_decision(failure is None, all=True):
            raise failure or DataError(
                f"data_path={self.data_path} cannot be opened on another rank, see its message; make it visible there"
            )
        return result

    def _check_trainer(self, stage: str) -> None:
        trainer = self._trainer()
        needed: dict[str, SplitName] = {"fit": "train", "validate": "valid", "test": "test"}
        if stage in needed and self._weights[needed[stage]] == 0:
            raise ConfigError(
                f"split={self.split!r} has weight 0 for {needed[stage]}, which trainer.{TrainerFn(stage).value} needs;"
                " give it a weight"
            )
        if trainer.overfit_batches:
            raise ConfigError(
                f"overfit_batches={trainer.overfit_batches} cannot repeat batches of IndexedDataModule; set it to 0"
                " and preprocess a corpus of that size"
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs} would begin the samples"
                " anew; set it to 0"
            )

    def _trains_whole_epochs(self) -> bool:
        """Whether the Trainer counts epochs; ``max_epochs`` is -1 if only ``max_steps`` was given."""
        trainer = self._trainer()
        return bool(trainer.max_steps < 0 or (trainer.max_epochs is not None and trainer.max_epochs >= 0))

    def _vocab_size(self) -> int | None:
        """The model's, if it is one that tells: a token outside of it would end the run inside a CUDA kernel."""
        config = getattr(self._trainer().lightning_module, "model_config", None)
        return getattr(config, "vocab_size", None)

    def _shape(self) -> BatchShape:
        strategy = self._strategy()
        return BatchShape(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=strategy.num_microbatches,
            data_parallel_size=strategy.data_parallel_size,
            data_parallel_rank=strategy.data_parallel_rank,
        )

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise RuntimeError("IndexedDataModule has no Trainer yet; pass it to trainer.fit(datamodule=...) first")
        return self.trainer

    def _strategy(self) -> Any:
        strategy: Any = self._trainer().strategy
        if not hasattr(strategy, "is_data_source"):
            raise ConfigError(
                f"strategy {type(strategy).__name__} does not know which ranks read data; IndexedDataModule needs"
                " Trainer(strategy=MegatronStrategy(...))"
            )
        return strategy


def _samples_of_run(max_steps: int, shape: BatchShape, position: dict[str, Any] | None) -> int:
    """Samples that the run takes in all, at least one: those consumed before it was resumed, and the steps left."""
    done = position or {"steps": 0, "consumed_samples": 0}
    left = max(0, max_steps - int(done["steps"]))
    return max(1, int(done["consumed_samples"]) + left * shape.global_batch_size)
