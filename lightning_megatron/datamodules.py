"""Lightning data modules: indexed datasets, instruction tuning, any map-style dataset, and text evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_megatron.data.blends import parse_blend
from lightning_megatron.data.documents import read_texts
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.evaluation import (
    EvaluationTask,
    EvaluationTexts,
    tokenize_evaluation_texts,
)
from lightning_megatron.data.gpt_samples import GPTObjective
from lightning_megatron.data.index_cache import open_samples
from lightning_megatron.data.indexed import check_dataset
from lightning_megatron.data.instruction_records import Answers, InstructionOptions
from lightning_megatron.data.instruction_rows import InstructionSamples
from lightning_megatron.data.instructions import (
    Instructions,
    cached_instructions,
    check_instructions,
)
from lightning_megatron.data.loader import check_batch
from lightning_megatron.data.masked import MaskingOptions
from lightning_megatron.data.masked_bert import BertObjective
from lightning_megatron.data.masked_t5 import T5Format, T5Objective
from lightning_megatron.data.samples import Objective, Part, Rows, Samples
from lightning_megatron.data.splits import SPLIT_NAMES, SplitName, parse_split, split_ranges
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_facts import TokenizerFacts
from lightning_megatron.errors import (
    ConfigError,
    DataError,
    as_options,
    require_choice,
    require_divides,
    require_number,
)
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.megatron_datamodule import MegatronDataModule, Run
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.gpt import GPTTrainStep

DataPath: TypeAlias = str | list[str | float]
"""A prefix; a list of prefixes, weighted by their sizes; or weights and prefixes in turn."""
_TOKENS_CHECKED = 1 << 20


@explains_options
class IndexedDataModule(MegatronDataModule):
    """Training, validation and test samples from Megatron's indexed datasets, ``PREFIX.bin`` and ``PREFIX.idx``.

    Datasets of Megatron 1.x and 2.x (``cached``, ``lazy``) are read, too. A split that a run does not read may be
    empty.

    Samples depend on the model: for a GPT ``text`` [rows, seq_length + 1], in Megatron's order; for a BERT masked
    tokens and sentence order; for a T5 spans replaced by sentinel tokens. BERT and T5 read datasets written by
    ``preprocess --split-sentences``, and their batches have the keys of their Hugging Face models.

    With ``max_steps`` the samples of the whole run are laid out at once, so each pass cuts the documents at other
    positions; a run resumed beyond ``max_steps`` repeats the same samples in another order.

    Args:
        data_path: Prefix of a dataset, as ``preprocess`` prints it; or a list: prefixes, weighted by their sizes, or
            weights and prefixes in turn, e.g. ``[0.7, books, 0.3, web]``.
        split: Weights of training, validation and test documents, e.g. ``949,50,1``. A weight of 0 leaves a split out.
        seq_length: Tokens per row that a GPT, a BERT or a T5's encoder reads.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        objective: ``gpt``, ``bert`` or ``t5``; None for that of the model's architecture.
        tokenizer: Directory of the tokenizer, or its name on the Hugging Face hub (``org/name``); a BERT or T5 needs it
            for special tokens and word boundaries.
        seq_length_decoder: Tokens per row that a T5's decoder reads.
        masking: How tokens of a BERT or T5 are masked.
        t5_format: End of a T5's rows: ``hugging_face``, as its released models were trained (the text with eos, the
            labels with one more sentinel and eos), or ``megatron`` (the labels with eos).
        sentence_order: Whether a BERT learns the order of sentences; None: if the model's task is ``pretraining``.
        train_data_path: Datasets for training alone; with this or one of the next two, ``split`` and ``data_path`` are
            not used.
        valid_data_path: Datasets for validation alone.
        test_data_path: Datasets for test alone.
        drop_last_partial_validation_sequence: Drop the tokens after the last full row of the validation documents, as
            Megatron does; otherwise a GPT's last row is padded.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        seed: Seed of the sample order and of the masking.
        index_cache: Directory for the sample order, shared by all nodes; None: next to the dataset.
        rampup_batch_size: First global batch size, increment, and samples until the full size is reached.
    """

    shuffling = "later passes"
    lays_out_whole_run = True

    def __init__(
        self,
        data_path: DataPath | None = None,
        split: str = "949,50,1",
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        objective: Literal["gpt", "bert", "t5"] | None = None,
        tokenizer: str | None = None,
        seq_length_decoder: int = 128,
        masking: MaskingOptions = MaskingOptions(),  # noqa: B008 (frozen)
        t5_format: T5Format = "hugging_face",
        sentence_order: bool | None = None,
        train_data_path: DataPath | None = None,
        valid_data_path: DataPath | None = None,
        test_data_path: DataPath | None = None,
        drop_last_partial_validation_sequence: bool = True,
        num_workers: int = 0,
        seed: int = 1234,
        index_cache: str | None = None,
        rampup_batch_size: list[int] | None = None,
    ) -> None:
        super().__init__(
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            seed=seed,
            rampup_batch_size=rampup_batch_size,
        )
        require_number("seq_length", seq_length, at_least=1)
        require_number("seq_length_decoder", seq_length_decoder, at_least=1)
        if seed >= 2**32:
            raise ConfigError(
                f"seed={seed} must be less than {2**32}, as NumPy's shuffles need it; correct seed"
            )
        self.seq_length = seq_length
        self.seq_length_decoder = seq_length_decoder
        self.objective_name = objective
        self.tokenizer = tokenizer
        self.masking = as_options(MaskingOptions, masking, "masking")
        self.t5_format = t5_format
        self.sentence_order = sentence_order
        self.drop_last_partial_validation_sequence = drop_last_partial_validation_sequence
        self.index_cache = index_cache
        paths = _split_sources(
            data_path, split, train=train_data_path, valid=valid_data_path, test=test_data_path
        )
        self._sources = {
            name: (parse_blend(path), weights) for name, (path, weights) in paths.items()
        }

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        decoder = (
            {"seq_length_decoder": self.seq_length_decoder}
            if self._objective_name(model) == "t5"
            else {}
        )
        return {"seq_length": self.seq_length, **decoder}

    @override
    def check(self, run: Run) -> None:
        name = self._objective_name(run.model)
        if run.model is not None and run.model.architecture != name:
            raise ConfigError(
                f"objective={name!r}: expected {run.model.architecture!r} for a {run.model.family}"
            )
        objective = self._objective(run.model)
        parts = [part for split in self._sources for part in self._parts(split, None)]
        for prefix in dict.fromkeys(part.prefix for part in parts):
            tokens = check_dataset(prefix).tokens  # only both ends are read: all may be terabytes
            ends = (tokens[:_TOKENS_CHECKED], tokens[-_TOKENS_CHECKED:])
            _check_token(max(int(end.max()) for end in ends), run.model, prefix)
        for part in parts:
            if part.name in run.splits:
                objective.count(part)
        if name != "gpt":
            _check_token(self._tokenizer_facts.size - 1, run.model, f"tokenizer={self.tokenizer}")

    @override
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        return open_samples(
            self._objective(self.model()), self._parts(name, num_samples), self.index_cache
        )

    def _parts(self, name: SplitName, num_samples: int | None) -> list[Part]:
        blend, split = self._sources[name]
        common = {"split": split, "name": name, "seed": self.seed, "num_samples": num_samples}
        return [Part(prefix=prefix, weight=weight, **common) for prefix, weight in blend]

    def _objective_name(self, model: ModelConfig | None) -> str:
        return self.objective_name or ("gpt" if model is None else model.architecture)

    @cached_property
    def _tokenizer_facts(self) -> TokenizerFacts:
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer=None: expected the directory of the dataset's tokenizer for a BERT or T5"
            )
        return TokenizerFacts.of(load_tokenizer(self.tokenizer), self.tokenizer)

    def _objective(self, model: ModelConfig | None) -> Objective:
        """Objective that makes the model's samples."""
        name, length = self._objective_name(model), self.seq_length
        if name == "gpt":
            drop_last = self.drop_last_partial_validation_sequence
            return GPTObjective(seq_length=length, drop_last_partial_validation_sequence=drop_last)
        common: Any = {
            "seq_length": length,
            "tokenizer": self._tokenizer_facts,
            "masking": self.masking,
        }
        if name == "t5":
            return T5Objective(
                seq_length_decoder=self.seq_length_decoder, format=self.t5_format, **common
            )
        in_order = self.sentence_order
        if in_order is None:
            in_order = model is None or model.task == "pretraining"
        return BertObjective(sentence_order=in_order, **common)


@explains_options
class InstructionDataModule(MegatronDataModule):
    """Instruction tuning of a GPT: prompts and answers from JSON lines, with the loss on the answers alone.

    A line has ``prompt`` and ``completion``, or ``messages`` for the tokenizer's chat template. A batch has
    ``input_ids``, ``labels``, ``attention_mask`` and ``position_ids``, [rows, seq_length] each; samples that share a
    row do not attend to each other.

    Args:
        data_path: A .jsonl file, a directory of them, or a glob pattern, to be split.
        tokenizer: Directory of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        split: Weights of training, validation and test samples, e.g. ``95,5,0``, in the order of the lines.
        seq_length: Tokens per row; longer samples are truncated at the end.
        micro_batch_size: Rows in one microbatch of one data-parallel rank.
        packing: Pack short samples into shared rows.
        pad_to_multiple_of: Without packing, pad rows to the longest of their batch, rounded up to a multiple of this;
            None: to ``seq_length``.
        answers: Turns of the assistant to learn: ``all``, ``each`` in a sample of its own that ends with it, or the
            ``last`` of each conversation.
        separator: Text between a prompt and a completion.
        train_data_path: Training samples alone; with this or one of the next two, ``split`` and ``data_path`` are not
            used.
        valid_data_path: Validation samples alone.
        test_data_path: Test samples alone.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        seed: Seed of the sample order.
        index_cache: Directory that caches the tokenized samples for all ranks and later runs; None: each rank that
            reads data tokenizes them in memory.
    """

    def __init__(
        self,
        data_path: str | None = None,
        tokenizer: str | None = None,
        split: str = "95,5,0",
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        packing: bool = False,
        pad_to_multiple_of: int | None = None,
        answers: Answers = "all",
        separator: str = "",
        train_data_path: str | None = None,
        valid_data_path: str | None = None,
        test_data_path: str | None = None,
        num_workers: int = 0,
        seed: int = 1234,
        index_cache: str | None = None,
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, num_workers=num_workers, seed=seed)
        require_number("seq_length", seq_length, at_least=2)
        require_choice("answers", answers, get_args(Answers))
        if tokenizer is None:
            raise ConfigError("tokenizer=None: expected the directory of the model's tokenizer")
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self.index_cache = index_cache
        self.packing, self.pad_to_multiple_of = packing, pad_to_multiple_of
        if pad_to_multiple_of is not None:
            if packing:
                raise ConfigError(
                    f"pad_to_multiple_of={pad_to_multiple_of} is not for packing=True; leave one out"
                )
            require_divides("pad_to_multiple_of", pad_to_multiple_of, "seq_length", seq_length)
        paths = _split_sources(
            data_path, split, train=train_data_path, valid=valid_data_path, test=test_data_path
        )
        options = {
            "tokenizer": tokenizer,
            "seq_length": seq_length,
            "answers": answers,
            "separator": separator,
        }
        self._sources = {
            name: (InstructionOptions(path=path, **options), weights)  # type: ignore[arg-type]
            for name, (path, weights) in paths.items()
        }
        self._instructions: dict[InstructionOptions, Instructions] = {}

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} makes samples for GPTs")
        for options in {options for options, _ in self._sources.values()}:
            check_instructions(options)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> InstructionSamples:
        options, split = self._sources[name]
        if options not in self._instructions:
            instructions = cached_instructions(options, self.index_cache)
            largest = max(int(instructions.tokens.max()), int(instructions.padding_token))
            _check_token(largest, self.model(), f"tokenizer={self.tokenizer}")
            self._instructions[options] = instructions
        instructions = self._instructions[options]
        part = split_ranges(split, len(instructions))[name]
        if not part:
            raise DataError(
                f"split={split!r} gives {name} none of the {len(instructions)} samples of {options.path}"
            )
        packing_seed = self.seed if self.packing else None
        samples = InstructionSamples(
            instructions.part(part), self.seq_length, packing_seed, self.pad_to_multiple_of
        )
        if self.packing:
            share = samples.instructions.lengths.sum() / (len(samples) * self.seq_length)
            rank_zero_info(
                f"Packing: {len(samples):,} {name} rows, {share:.1%} of their tokens are not padding"
            )
        return samples


@explains_options
class DatasetDataModule(MegatronDataModule):
    """Map-style datasets with the loaders of indexed datasets: read once per replica, and resumable.

    An item is a dict with the keys that the objective takes (``input_ids``, ``labels``, ...), of the same lengths in
    all items unless ``collate`` makes them so. One rank of each data-parallel replica reads the items, so they may be
    random.

    Args:
        train: A ``datasets.Dataset``, a ``torch.utils.data.Dataset``, a list of dicts, or a directory written by
            ``datasets.Dataset.save_to_disk``.
        valid: The same for validation.
        test: The same for test and prediction.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        collate: Function that makes one dict of tensors [rows, ...] from a list of items; None stacks them.
        shuffle: Shuffle the training items, differently in each pass.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        seed: Seed of the sample order.
        rampup_batch_size: First global batch size, increment, and samples until the full size is reached.
    """

    def __init__(
        self,
        train: Any = None,
        valid: Any = None,
        test: Any = None,
        micro_batch_size: int = 4,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        seed: int = 1234,
        rampup_batch_size: list[int] | None = None,
    ) -> None:
        super().__init__(
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            seed=seed,
            rampup_batch_size=rampup_batch_size,
        )
        datasets: dict[SplitName, Any] = {"train": train, "valid": valid, "test": test}
        self._sources = {name: dataset for name, dataset in datasets.items() if dataset is not None}
        if not self._sources:
            raise ConfigError(
                "train=None, valid=None and test=None leave nothing to read; give at least one dataset"
            )
        self._collate = collate
        self.shuffling = "every pass" if shuffle else "never"

    @override
    def open(self, name: SplitName, num_samples: int | None) -> DatasetSamples:
        if isinstance(folder := self._sources[name], str):
            self._sources[name] = _load_dataset(folder)
        return DatasetSamples(self._sources[name], self._collate)


class DatasetSamples:
    """Stacked items of a map-style dataset: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list of dicts.

    Items are dicts of tensors, arrays, lists or numbers, with one shape per key, or whatever ``collate`` takes.
    Datasets are duck-typed.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``, and at least one item.
        collate: Function that makes one dict of tensors [rows, ...] from a list of items; None stacks them.

    Raises:
        DataError: If ``dataset`` is empty, a dict of splits, or not map-style.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not is_map_style or isinstance(dataset, Mapping | IterableDataset) or len(dataset) == 0:
            raise DataError(
                f"a {type(dataset).__name__} must be one map-style dataset (items by index) of at least one item; for"
                " several splits pass dataset['train'], for a stream return a DataLoader from train_dataloader"
            )
        self._dataset = dataset
        self._collate = collate
        # A Hugging Face dataset returns arrays twenty times as fast as lists.
        kind: Any = (
            getattr(dataset, "format", None)
            if collate is None and hasattr(dataset, "with_format")
            else None
        )
        is_lists = kind and kind["type"] is None
        self._items = dataset.with_format("numpy", columns=kind["columns"]) if is_lists else dataset

    @property
    def fingerprint(self) -> str:
        """The dataset's own fingerprint, if it has one (Hugging Face's do); else its length."""
        own = getattr(self._dataset, "_fingerprint", None)
        return own if isinstance(own, str) else f"{len(self)} items"

    def __len__(self) -> int:
        """Number of items."""
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Stack the items at ``indices``.

        Raises:
            DataError: If items are not dicts, or cannot be stacked.
        """
        get_many = getattr(self._items, "__getitems__", None)
        items = (
            get_many(list(indices))
            if get_many is not None
            else [self._items[index] for index in indices]
        )
        if self._collate is not None:
            batch = check_batch(self._collate(items))
            if (rows := len(next(iter(batch.values())))) != len(indices):
                raise DataError(
                    f"collate gave {rows} rows for {len(indices)} items; return one row per item"
                )
            return batch
        for index, item in zip(indices, items, strict=True):
            if not isinstance(item, Mapping) or item.keys() != items[0].keys():
                has = ", ".join(map(repr, item)) if isinstance(item, Mapping) else "no keys"
                raise DataError(
                    f"item {index} of the dataset is a {type(item).__name__} with {has}; give dicts that all have the"
                    " keys that the train step takes (input_ids, labels, ...), or a collate function that makes one"
                )
        return {key: _stack(key, [item[key] for item in items], indices) for key in items[0]}


def _load_dataset(folder: str) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(
            f"{folder} is read by the library datasets; pip install datasets"
        ) from error
    try:
        return load_from_disk(folder)
    except (
        OSError,
        ValueError,
        IndexError,
    ) as error:  # the library raises IndexError if there are no rows
        raise DataError(
            f"{folder} holds no dataset of save_to_disk ({str(error).splitlines()[0]})"
        ) from error


def _stack(key: str, values: list[Any], indices: Sequence[int]) -> Tensor:
    try:
        return torch.stack([_as_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"items {', '.join(map(str, indices))} cannot be stacked under {key!r} ({error}); remove the key"
            " (remove_columns), pad them to one length, or give a collate function that does"
        ) from None


def _as_tensor(value: Any) -> Tensor:
    """Convert ``value`` to a CPU tensor; torch raises if it is not numeric."""
    tensor = value.cpu() if isinstance(value, Tensor) else torch.tensor(value)
    # torch has few operations for the larger unsigned integers.
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


@explains_options
class TextEvaluationDataModule(MegatronDataModule):
    """Texts for ``Trainer.test``, ``validate`` and ``predict`` of a GPT; each target counts once, on any layout.

    ``task="perplexity"``: targets are all tokens of a text but the first, each predicted from the tokens before it. A
    text longer than ``seq_length`` is split into several rows; with a ``stride`` below ``seq_length`` they overlap, so
    that every target outside the first row has a context of at least ``seq_length - stride`` tokens. Megatron-LM calls
    it ``--overlapping-eval``. Texts of fewer than two tokens are left out.

    ``task="last_word"``: the target is the last word of each text, predicted from all words before it, as in LAMBADA,
    with ``MegatronModule(train_step="last_word")``, which logs ``test_last_word_accuracy``. The word is tokenized with
    the space before it. A text longer than ``seq_length`` is truncated at the beginning.

    Special tokens are prepended as the tokenizer does by default; no others are added. A batch has ``text`` and
    ``loss_mask``, as ``GPTTrainStep`` takes them; all rows have the length of the longest, at most ``seq_length``.

    Args:
        data_path: A file, a directory or a glob pattern: .jsonl (one text per line), .parquet (one per row) or any text
            file (one per file).
        tokenizer: Directory of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        task: ``perplexity`` or ``last_word``.
        seq_length: Maximum number of tokens that the model reads per row.
        stride: For ``perplexity``: tokens between the starts of consecutive rows; None: ``seq_length``.
        strict: For ``last_word``: all tokens of the word must be right; False: only the last token counts.
        json_key: Key of the text in .jsonl and .parquet files.
        micro_batch_size: Rows in one microbatch of one data-parallel rank.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        encoding: Encoding of text files and JSON lines in Python's names: utf-8, latin-1; utf-16 for text files only.
        errors: What is done with bytes that are not of that encoding: ``strict`` ends the run with file and byte,
            ``replace`` makes them U+FFFD and counts them.
    """

    def __init__(
        self,
        data_path: str,
        tokenizer: str,
        task: EvaluationTask = "perplexity",
        seq_length: int = 1024,
        stride: int | None = None,
        strict: bool = True,
        json_key: str = "text",
        micro_batch_size: int = 4,
        num_workers: int = 0,
        encoding: str = "utf-8",
        errors: Literal["strict", "replace"] = "strict",
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, num_workers=num_workers, seed=0)
        require_choice("task", task, get_args(EvaluationTask))
        require_number("seq_length", seq_length, at_least=1)
        if stride is not None and (task != "perplexity" or not 1 <= stride <= seq_length):
            raise ConfigError(
                f"stride={stride} is for task=perplexity, and 1 to seq_length={seq_length}"
            )
        self.data_path, self.tokenizer, self.task, self.seq_length = (
            data_path,
            tokenizer,
            task,
            seq_length,
        )
        self._stride = stride or seq_length
        self._strict = strict
        self._json_key = json_key
        self._encoding = TextEncoding(name=encoding, errors=errors)
        self._sources = dict.fromkeys(("valid", "test"))

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} evaluates GPTs")
        evaluates = self._trainer().state.fn in (TrainerFn.TESTING, TrainerFn.VALIDATING)
        if self.task == "last_word" and evaluates and type(run.train_step) is GPTTrainStep:
            raise ConfigError(
                "task=last_word: expected train_step='last_word', which counts last words, got 'gpt'"
            )
        _check_token(int(self._texts.tokens.max()), run.model, f"tokenizer={self.tokenizer}")

    @override
    def open(self, name: SplitName, num_samples: int | None) -> EvaluationTexts:
        texts, strategy = self._texts, self._strategy()
        num_targets = (texts.bounds[:, 2] - texts.bounds[:, 1]).sum()
        rank_zero_info(f"{self.data_path}: {num_targets:,} targets in {len(texts):,} rows")
        if texts.num_truncated:
            rank_zero_warn(
                f"{texts.num_truncated} texts of {self.data_path} have more tokens than seq_length={self.seq_length}"
                " and lose their beginning; raise it to keep them whole"
            )
        # Kernels are faster for multiples of 8.
        multiple = math.lcm(8, strategy.parallel.sequence_divisor)
        longest = int((texts.bounds[:, 2] - texts.bounds[:, 0]).max()) - 1
        return replace(texts, row_length=min(self.seq_length, -(-longest // multiple) * multiple))

    @cached_property
    def _texts(self) -> EvaluationTexts:
        decoder = Decoder(self._encoding)
        texts = read_texts(self.data_path, self._json_key, decoder)
        tokenized = tokenize_evaluation_texts(
            self.data_path,
            texts,
            self.tokenizer,
            self.seq_length,
            self.task,
            self._stride,
            self._strict,
        )
        if decoder.num_replaced:
            rank_zero_warn(
                f"{decoder.num_replaced:,} characters of {self.data_path} that are not {self._encoding.name} were "
                "replaced by U+FFFD"
            )
        return tokenized


def _split_sources(
    data_path: Any, split: str, **own_paths: Any
) -> dict[SplitName, tuple[Any, str]]:
    """Path of each split that has data, and the weights by which the splits of this path divide it.

    Args:
        data_path: Path that all splits share.
        split: Weights by which they divide it.
        own_paths: Path of each split alone.

    Raises:
        ConfigError: If there is no path, or both a shared one and those of single splits.
    """
    alone: dict[Any, Any] = {name: path for name, path in own_paths.items() if path is not None}
    if (data_path is None) != bool(alone):
        given = (
            ", ".join(f"{name}_data_path={path}" for name, path in alone.items())
            or "no path of a single split"
        )
        raise ConfigError(
            f"data_path={data_path} with {given}: expected data_path and split, or only paths of splits"
        )
    if data_path is None:
        weights_alone = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}
        return {name: (path, weights_alone[name]) for name, path in alone.items()}
    weights = zip(SPLIT_NAMES, parse_split(split), strict=True)
    return {name: (data_path, split) for name, weight in weights if weight > 0}


def _check_gpt(model: ModelConfig | None, what: str) -> None:
    if model is not None and model.architecture != "gpt":
        raise ConfigError(f"{what}, and {model.family} is a {model.architecture.upper()}")


def _check_token(largest: int, model: ModelConfig | None, source: str) -> None:
    """Refuse a token outside of the model's vocabulary, which would end the run inside a CUDA kernel."""
    if model is not None and largest >= model.vocab_size:
        raise DataError(
            f"{source}: expected tokens below the model's vocab_size={model.vocab_size}, got {largest}"
        )
