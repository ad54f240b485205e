"""``StreamingTextDataModule``: texts that are tokenized while they are trained on."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, TypeAlias

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.blends import parse_blend
from lightning_megatron.data.contents import is_same, with_contents
from lightning_megatron.data.corpus import Corpus, FileCorpus, HuggingFaceCorpus
from lightning_megatron.data.document_tokenizer import DocumentTokenizer
from lightning_megatron.data.splits import SplitName
from lightning_megatron.data.stateful import why_not_exact
from lightning_megatron.data.stream_loader import Replicas, StreamLoader
from lightning_megatron.data.text_stream import (
    PackedTexts,
    StreamOptions,
    TextBatches,
    distribute,
    saved_readers,
)
from lightning_megatron.data.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    tokenizer_fingerprint,
    warn_of_missing_beginning,
)
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.datamodules.sources import check_gpt
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.errors import LARGEST_BATCH, ConfigError, require_number, type_of
from lightning_megatron.foreign_names import checks_options

DataPath: TypeAlias = str | list[str | float]
"""A path; a list of paths, read as one corpus; or weights and paths in turn."""
_NEW_RUN = "MegatronStrategy(load_weights_only=True)"


@checks_options
class StreamingTextDataModule(MegatronDataModule):
    """Texts for a GPT, tokenized and packed into rows while they are trained on; nothing is written beforehand.

    Files are .jsonl (one text per line), .parquet (one per row) or any text file (one per file), also .gz and .zst. A
    batch has ``text`` [rows, seq_length + 1]: documents one after the other, each ended by the tokenizer's eos token.

    One rank of each replica reads its own documents. A checkpoint has a few numbers for each replica, and a run goes on
    with the next row, at any tp and pp, any ``num_workers`` and (for files) any dp: no row is repeated or left out
    within a pass. At the same dp, rows come in the same order as without the interruption.

    With ``max_epochs`` an epoch is one pass over the texts; its last rows are padded, until every replica has ended.
    With ``max_steps`` alone, passes follow one another.

    Args:
        data_path: A file, a directory or a glob pattern; a list of them, read as one corpus; or weights and paths in
            turn, e.g. ``[0.7, books, 0.3, web]``, where weights are shares of the rows.
        tokenizer: Directory of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        seq_length: Tokens of a row that the model reads.
        micro_batch_size: Rows in one microbatch of one data-parallel rank.
        dataset: A ``datasets.IterableDataset`` of texts instead of ``data_path``; Python only.
        json_key: Key or column of the text.
        shuffle_buffer: Documents that are shuffled at a time, and whether files are read in random order; 0 keeps the
            order of the texts.
        append_eod: Append the tokenizer's eos token to each document.
        separate_documents: Tokens attend to their own document alone, positions restart in each, and the first token of
            a document is no target.
        valid_data_path: Files of validation texts, whose rows are held in memory.
        test_data_path: The same for test.
        num_workers: Worker processes that tokenize, on each rank that reads data; 0: between the steps.
        seed: Seed of the order.
    """

    def __init__(
        self,
        data_path: DataPath | None = None,
        tokenizer: str | None = None,
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        dataset: Any = None,
        json_key: str = "text",
        shuffle_buffer: int = 10_000,
        append_eod: bool = True,
        separate_documents: bool = False,
        valid_data_path: DataPath | None = None,
        test_data_path: DataPath | None = None,
        num_workers: int = 1,
        seed: int = 1234,
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, num_workers=num_workers, seed=seed)
        require_number("seq_length", seq_length, at_least=2)
        require_number("shuffle_buffer", shuffle_buffer, at_most=LARGEST_BATCH)
        if tokenizer is None:
            raise ConfigError("tokenizer=None: expected the directory of the model's tokenizer")
        if dataset is not None and data_path is not None:
            raise ConfigError(
                f"data_path={data_path} and dataset: expected one source of training texts, got two; leave one out"
            )
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.json_key = json_key
        self.shuffle_buffer = shuffle_buffer
        self.append_eod = append_eod
        self.separate_documents = separate_documents
        self.dataset = dataset
        paths: dict[SplitName, DataPath | None] = {
            "train": data_path,
            "valid": valid_data_path,
            "test": test_data_path,
        }
        for name, path in paths.items():
            if path is not None:
                self._sources[name] = parse_blend(path)
        if dataset is not None:
            self._sources["train"] = None
        if not self._sources:
            raise ConfigError(
                "data_path=None and dataset=None leave nothing to read; give data_path, or the path of a split"
            )
        self._evaluations: dict[SplitName, PackedTexts] = {}
        self._stream_loader: StreamLoader | None = None

    @override
    def check(self, run: Run) -> None:
        check_gpt(run.model, f"{type(self).__name__} makes rows for GPTs")
        for name in self._sources:
            self._corpora(name)
        if run.model is not None:
            check_vocabulary(self._loaded_tokenizer, self.tokenizer, run.model.vocab_size)
        self._document_tokenizer()
        warn_of_missing_beginning(self._loaded_tokenizer)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> PackedTexts:
        if name not in self._evaluations:
            options = self._options(name)
            self._evaluations[name] = PackedTexts(options, name)
        return self._evaluations[name]

    @override
    def setup(self, stage: str) -> None:
        """Check on rank 0, and say whether the run can resume exactly. Collective over the world."""
        if stage == "fit":
            self._stream_loader = None
        super().setup(stage)
        reason = None
        if stage == "fit" and self.dataset is not None:
            reason = why_not_exact(self.dataset)
        if reason is not None:
            rank_zero_warn(
                f"dataset: {type_of(self.dataset)} that cannot resume exactly; a resumed run repeats or leaves "
                f"out texts, as {reason}"
            )

    @override
    def train_dataloader(self) -> Any:
        """Loader of the training texts, from the restored position on. Collective over the world."""
        trainer = self._trainer()
        strategy = self._strategy()
        shape = self._shape()
        max_steps = None
        # ``max_epochs`` is -1 if only ``max_steps`` was given.
        if trainer.max_steps >= 0 and (trainer.max_epochs is None or trainer.max_epochs < 0):
            max_steps = trainer.max_steps
        num_rows = shape.micro_batch_size * shape.num_microbatches
        restored = self._restored or self.state_dict()
        self._restored = {}
        stream = None
        with raise_on_all_ranks():
            if strategy.is_data_source:
                stream = TextBatches(
                    self._options("train"),
                    dp=shape.data_parallel_size,
                    rank=shape.data_parallel_rank,
                    num_rows=num_rows,
                    repeats=max_steps is not None,
                )
        replicas = Replicas(
            group=strategy.host_group,
            is_data_source=strategy.is_data_source,
            rank=shape.data_parallel_rank,
        )
        loader = StreamLoader(stream, replicas, max_steps, ends_with_first=False, num_rows=num_rows)
        self._stream_loader = loader
        if restored:
            self._go_on(loader, restored)
        if max_steps is not None:
            self._check_validation_interval(max_steps)
        return loader

    @override
    def state_dict(self) -> dict[str, Any]:
        """Positions of the readers of all replicas. Collective over the world."""
        loader = self._stream_loader
        if loader is None:
            return {}
        order, tokenizer = self._facts()
        return {"train": loader.position(), "train_order": order, "tokenizer": tokenizer}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position, if this is a training run. Collective over the world."""
        if "train" not in state_dict or self._trainer().state.fn != TrainerFn.FITTING:
            return
        if self._stream_loader is None:
            self._restored = state_dict
        else:
            self._go_on(self._stream_loader, state_dict)

    @override
    def restart(self) -> None:
        super().restart()
        if self._stream_loader is not None:
            self._stream_loader.seek({"epoch": 0, "steps": 0, "replicas": None})

    def _go_on(self, loader: StreamLoader, restored: dict[str, Any]) -> None:
        """Continue from a position of any number of replicas. Collective over the world.

        Raises:
            ConfigError: If the position is of other sources, or of another tokenizer, or has too few readers.
        """
        strategy = self._strategy()
        position = restored["train"]
        order, tokenizer = self._facts()
        # A state of an older version does not tell its tokenizer.
        if restored.get("tokenizer", tokenizer) != tokenizer:
            raise ConfigError(
                f"tokenizer={self.tokenizer}: expected the tokenizer of the checkpoint, got one that makes other tokens"
                f" of texts; give the same, or begin a new run with its weights: {_NEW_RUN}"
            )
        with raise_on_all_ranks():
            if strategy.is_data_source and position["replicas"] is not None:
                options = self._options("train")
                readers = saved_readers(position["replicas"])
                num_sources = len({reader.source for reader in readers})
                if num_sources != len(options.corpora):
                    raise ConfigError(
                        f"data_path: expected the {num_sources} weighted sources of the checkpoint, got "
                        f"{len(options.corpora)}; give the same, or begin a new run with its weights: {_NEW_RUN}"
                    )
                distribute(options, readers, strategy.data_parallel_size)
        loader.seek(position)
        if not is_same(restored["train_order"], order):
            rank_zero_warn(
                f"The run goes on at step {loader.steps} of other texts than the checkpoint's: files, seed,"
                " seq_length, shuffle_buffer or tokenizer differ, and texts may repeat"
            )

    def _facts(self) -> tuple[str, str]:
        """Fingerprints of the order of the texts and of the tokenizer. Collective over the world."""
        strategy = self._strategy()
        # Other ranks need not find the files.
        own: tuple[str, str] | None = None
        if strategy.global_rank == 0:
            own = (self._fingerprint, self._tokenizer_fingerprint)
        facts: tuple[str, str] = strategy.broadcast(own)
        return facts

    def _corpora(self, name: SplitName) -> tuple[list[Corpus], list[float]]:
        """Sources of a split, and their shares of the rows."""
        blend = self._sources[name]
        if blend is None:
            return [HuggingFaceCorpus(self.dataset, self.json_key)], [1.0]
        seed = self.seed if self.shuffle_buffer and name == "train" else None
        if blend[0][1] is None:
            paths = [path for path, _ in blend]
            return [FileCorpus(paths, self.json_key, seed)], [1.0]
        corpora: list[Corpus] = [FileCorpus([path], self.json_key, seed) for path, _ in blend]
        total = sum(weight for _, weight in blend)
        return corpora, [weight / total for _, weight in blend]

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer)

    @cached_property
    def _tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self._loaded_tokenizer)

    def _document_tokenizer(self) -> DocumentTokenizer:
        return DocumentTokenizer(self._loaded_tokenizer, self.json_key, self.append_eod)

    def _options(self, name: SplitName) -> StreamOptions:
        corpora, weights = self._corpora(name)
        return StreamOptions(
            corpora=corpora,
            weights=weights,
            tokenize=self._document_tokenizer(),
            seq_length=self.seq_length,
            shuffle_buffer=self.shuffle_buffer if name == "train" else 0,
            separate_documents=self.separate_documents,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    @cached_property
    def _fingerprint(self) -> str:
        """Of the order of the texts; of files known by names, sizes and a few bytes."""
        corpora, weights = self._corpora("train")
        facts = (
            [corpus.fingerprint for corpus in corpora],
            weights,
            self._loaded_tokenizer.vocab_size,
            self.append_eod,
            self.seq_length,
            self.shuffle_buffer,
            self.seed,
        )
        order = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        return with_contents(order, "-".join(filter(None, (each.contents for each in corpora))))
