"""Data modules for ``Trainer``: indexed datasets, instructions, any map-style dataset, and texts for an evaluation."""

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

from lightning_megatron.data.evaluation import EvaluationTask, EvaluationTexts, read_evaluation_texts
from lightning_megatron.data.indexed import check_dataset
from lightning_megatron.data.instructions import (
    Answers,
    InstructionOptions,
    Instructions,
    InstructionSamples,
    cached_instructions,
    check_instructions,
)
from lightning_megatron.data.loader import check_batch
from lightning_megatron.data.masked import BertObjective, MaskingOptions, T5Format, T5Objective
from lightning_megatron.data.samples import (
    SPLIT_NAMES,
    GPTObjective,
    Objective,
    Part,
    Rows,
    Samples,
    SplitName,
    open_samples,
    parse_blend,
    parse_split,
    split_ranges,
)
from lightning_megatron.data.tokenizer import TokenizerFacts, load_tokenizer
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
"""A prefix; several, taken in proportion to their sizes; or weights and prefixes in turn."""
_TOKENS_CHECKED = 1 << 20


@explains_options
class IndexedDataModule(MegatronDataModule):
    """Training, validation and test samples from Megatron's indexed datasets, ``PREFIX.bin`` and ``PREFIX.idx``.

    Datasets of Megatron 1.x and 2.x (``cached``, ``lazy``) are read, too. A split that a run does not read may be
    empty.

    What a sample is depends on the model: for a GPT ``text`` [rows, seq_length + 1], in the order in which Megatron
    takes them; for a BERT masked tokens and the order of sentences; for a T5 spans replaced by sentinels. BERT and T5
    take datasets that ``preprocess --split-sentences`` wrote, with keys as their Hugging Face models name them.

    With ``max_steps`` the samples of the whole run are laid out at once, so each pass over the documents cuts them
    elsewhere; a run that is continued beyond that takes the same samples again, in another order.

    Args:
        data_path: Prefix of a dataset, as ``preprocess`` prints it; or a list: prefixes, taken in proportion to their
            sizes, or weights and prefixes in turn, e.g. ``[0.7, books, 0.3, web]``.
        split: Weights of training, validation and test documents, e.g. ``949,50,1``. A weight of 0 leaves a split out.
        seq_length: Tokens of a row: those a GPT predicts from, or those a BERT or an encoder reads.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        objective: ``gpt``, ``bert`` or ``t5``; None for the one of the model's architecture.
        tokenizer: Folder of the tokenizer, or its name on the Hugging Face hub (``org/name``); a BERT or T5 needs it
            for its special tokens and the borders of words.
        seq_length_decoder: Tokens that a T5's decoder reads.
        masking: What a BERT or T5 hides.
        t5_format: What ends a T5's rows: ``hugging_face``, as its released models were trained (the text with eos, the
            labels with one more sentinel and eos), or ``megatron`` (the labels with eos).
        sentence_order: Whether a BERT learns the order of sentences; None for what the model's task says.
        train_data_path: Datasets of training alone; with this or one of the next two, ``split`` and ``data_path`` are
            not used.
        valid_data_path: Datasets of validation alone.
        test_data_path: Datasets of test alone.
        drop_last_partial_validation_sequence: Leave the tokens that fill no whole row at the end of the validation
            documents out, as Megatron does; otherwise a GPT's last row is padded.
        num_workers: Processes that read ahead, on each rank that reads at all.
        seed: Of the order of samples, and of what is masked.
        index_cache: Folder for the order of samples, shared by all machines; next to the dataset if not given.
        rampup_batch_size: First global batch, increment, and samples until the batch has its full size.
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
            micro_batch_size=micro_batch_size, num_workers=num_workers, seed=seed, rampup_batch_size=rampup_batch_size
        )
        require_number("seq_length", seq_length, at_least=1)
        require_number("seq_length_decoder", seq_length_decoder, at_least=1)
        if seed >= 2**32:
            raise ConfigError(f"seed={seed} must be less than {2**32}, as NumPy's shuffles need it; correct seed")
        self.seq_length = seq_length
        self.seq_length_decoder = seq_length_decoder
        self.objective_name = objective
        self.tokenizer = tokenizer
        self.masking = as_options(MaskingOptions, masking, "masking")
        self.t5_format = t5_format
        self.sentence_order = sentence_order
        self.drop_last_partial_validation_sequence = drop_last_partial_validation_sequence
        self.index_cache = index_cache
        paths = _paths_of_splits(data_path, split, train=train_data_path, valid=valid_data_path, test=test_data_path)
        self._sources = {name: (parse_blend(path), weights) for name, (path, weights) in paths.items()}

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        decoder = {"seq_length_decoder": self.seq_length_decoder} if self._name(model) == "t5" else {}
        return {"seq_length": self.seq_length, **decoder}

    @override
    def check(self, run: Run) -> None:
        name = self._name(run.model)
        if run.model is not None and run.model.architecture != name:
            raise ConfigError(f"objective={name!r}: expected {run.model.architecture!r} for a {run.model.family}")
        objective = self._objective(run.model)
        parts = [part for split in self._sources for part in self._parts(split, None)]
        for prefix in dict.fromkeys(part.prefix for part in parts):
            tokens = check_dataset(prefix).tokens  # of which all may be terabytes
            ends = (tokens[:_TOKENS_CHECKED], tokens[-_TOKENS_CHECKED:])
            _check_token(max(int(end.max()) for end in ends), run.model, prefix)
        for part in parts:
            if part.name in run.splits:
                objective.count(part)
        if name != "gpt":
            _check_token(self._facts.size - 1, run.model, f"tokenizer={self.tokenizer}")

    @override
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        return open_samples(self._objective(self.model()), self._parts(name, num_samples), self.index_cache)

    def _parts(self, name: SplitName, num_samples: int | None) -> list[Part]:
        blend, split = self._sources[name]
        common = {"split": split, "name": name, "seed": self.seed, "num_samples": num_samples}
        return [Part(prefix=prefix, weight=weight, **common) for prefix, weight in blend]

    def _name(self, model: ModelConfig | None) -> str:
        return self.objective_name or ("gpt" if model is None else model.architecture)

    @cached_property
    def _facts(self) -> TokenizerFacts:
        if self.tokenizer is None:
            raise ConfigError("tokenizer=None: expected the folder of the dataset's tokenizer for a BERT or T5")
        return TokenizerFacts.of(load_tokenizer(self.tokenizer), self.tokenizer)

    def _objective(self, model: ModelConfig | None) -> Objective:
        """What a sample is."""
        name, length = self._name(model), self.seq_length
        if name == "gpt":
            drop_last = self.drop_last_partial_validation_sequence
            return GPTObjective(seq_length=length, drop_last_partial_validation_sequence=drop_last)
        common: Any = {"seq_length": length, "tokenizer": self._facts, "masking": self.masking}
        if name == "t5":
            return T5Objective(seq_length_decoder=self.seq_length_decoder, format=self.t5_format, **common)
        in_order = self.sentence_order
        if in_order is None:
            in_order = model is None or model.task == "pretraining"
        return BertObjective(sentence_order=in_order, **common)


@explains_options
class InstructionDataModule(MegatronDataModule):
    """Prompts and answers from JSON lines for a GPT, with the loss on the answers alone.

    A line has ``prompt`` and ``completion``, or ``messages`` for the tokenizer's chat template. A batch has
    ``input_ids``, ``labels``, ``attention_mask`` and ``position_ids``, [rows, seq_length] each; samples that share a
    row do not see each other.

    Args:
        data_path: A .jsonl file, a folder of them, or a pattern, to be split.
        tokenizer: Folder of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        split: Weights of training, validation and test samples, e.g. ``95,5,0``, in the order of the lines.
        seq_length: Tokens of a row; longer samples lose their end.
        micro_batch_size: Rows in one microbatch of one data-parallel rank.
        packing: Let short samples share a row.
        pad_to_multiple_of: Without packing, pad rows to the longest of their batch, rounded up to a multiple of this;
            None: to ``seq_length``.
        answers: Whether ``all`` turns of the assistant are learned, ``each`` in a sample of its own that ends with it,
            or the ``last`` of each conversation.
        separator: Text between a prompt and a completion.
        train_data_path: Training samples alone; with this or one of the next two, ``split`` and ``data_path`` are not
            used.
        valid_data_path: Validation samples alone.
        test_data_path: Test samples alone.
        num_workers: Processes that read ahead, on each rank that reads at all.
        seed: Of the order of samples.
        index_cache: Folder for the tokenized samples, so that they are tokenized once, for all ranks and later runs; if
            not given each rank that reads does it in memory.
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
            raise ConfigError("tokenizer=None cannot read text; give the folder of the model's tokenizer")
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self.index_cache = index_cache
        self.packing, self.pad_to_multiple_of = packing, pad_to_multiple_of
        if pad_to_multiple_of is not None:
            if packing:
                raise ConfigError(f"pad_to_multiple_of={pad_to_multiple_of} is not for packing=True; leave one out")
            require_divides("pad_to_multiple_of", pad_to_multiple_of, "seq_length", seq_length)
        paths = _paths_of_splits(data_path, split, train=train_data_path, valid=valid_data_path, test=test_data_path)
        options = {"tokenizer": tokenizer, "seq_length": seq_length, "answers": answers, "separator": separator}
        self._sources = {
            name: (InstructionOptions(path=path, **options), weights)  # type: ignore[arg-type]
            for name, (path, weights) in paths.items()
        }
        self._read: dict[InstructionOptions, Instructions] = {}

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} makes samples for GPTs")
        for options in {options for options, _ in self._sources.values()}:
            check_instructions(options)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> InstructionSamples:
        options, split = self._sources[name]
        if options not in self._read:
            instructions = cached_instructions(options, self.index_cache)
            largest = max(int(instructions.tokens.max()), int(instructions.padding_token))
            _check_token(largest, self.model(), f"tokenizer={self.tokenizer}")
            self._read[options] = instructions
        instructions = self._read[options]
        part = split_ranges(split, len(instructions))[name]
        if not part:
            raise DataError(f"split={split!r} gives {name} none of the {len(instructions)} samples of {options.path}")
        packing_seed = self.seed if self.packing else None
        samples = InstructionSamples(instructions.part(part), self.seq_length, packing_seed, self.pad_to_multiple_of)
        if self.packing:
            share = samples.instructions.lengths.sum() / (len(samples) * self.seq_length)
            rank_zero_info(f"Packing: {len(samples):,} {name} rows, of which {share:.1%} is no padding")
        return samples


class DatasetDataModule(MegatronDataModule):
    """Items of map-style datasets, by the same loaders as indexed datasets: read once per copy of the model, resumed.

    An item is a dict with the keys that the objective takes (``input_ids``, ``labels``, ...), of the same lengths in
    all items, or ``collate`` makes them so. Items are read on one rank of each copy of the model, so they may be drawn
    at random.

    Args:
        train: A ``datasets.Dataset``, a ``torch.utils.data.Dataset``, a list of dicts, or the folder to which
            ``datasets.Dataset.save_to_disk`` wrote one.
        valid: The same for validation.
        test: The same for test and prediction.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        collate: Makes one dict of tensors [rows, ...] from a list of items; stacks them if not given.
        shuffle: Take the training items in another order in each pass.
        num_workers: Processes that read ahead, on each rank that reads at all.
        seed: Of the order of samples.
        rampup_batch_size: First global batch, increment, and samples until the batch has its full size.
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
            micro_batch_size=micro_batch_size, num_workers=num_workers, seed=seed, rampup_batch_size=rampup_batch_size
        )
        given: dict[SplitName, Any] = {"train": train, "valid": valid, "test": test}
        self._sources = {name: dataset for name, dataset in given.items() if dataset is not None}
        if not self._sources:
            raise ConfigError("train=None, valid=None and test=None leave nothing to read; give at least one dataset")
        self._collate = collate
        self.shuffling = "every pass" if shuffle else "never"

    @override
    def open(self, name: SplitName, num_samples: int | None) -> DatasetSamples:
        if isinstance(folder := self._sources[name], str):
            self._sources[name] = _load_dataset(folder)
        return DatasetSamples(self._sources[name], self._collate)


class DatasetSamples:
    """Items of a map-style dataset, stacked: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list of dicts.

    Items are dicts of tensors, arrays, lists or numbers, of one shape a key, or ``collate`` makes a batch of what they
    are. What a dataset can do is seen from its methods.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``, and at least one item.
        collate: Makes one dict of tensors [rows, ...] from a list of items; stacks them if not given.

    Raises:
        DataError: If ``dataset`` is empty, several splits, or not map-style.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not is_map_style or isinstance(dataset, Mapping | IterableDataset) or len(dataset) == 0:
            raise DataError(
                f"a {type(dataset).__name__} must be one map-style dataset (items by number) of at least one item; of"
                " several splits give dataset['train'], of a stream return a DataLoader of it from train_dataloader"
            )
        self._dataset = dataset
        self._collate = collate
        # A Hugging Face dataset of lists gives arrays twenty times as fast.
        kind: Any = getattr(dataset, "format", None) if collate is None and hasattr(dataset, "with_format") else None
        is_lists = kind and kind["type"] is None
        self._items = dataset.with_format("numpy", columns=kind["columns"]) if is_lists else dataset

    @property
    def fingerprint(self) -> str:
        """The dataset's own, as those of Hugging Face have; else of its length."""
        own = getattr(self._dataset, "_fingerprint", None)
        return own if isinstance(own, str) else f"{len(self)} items"

    def __len__(self) -> int:
        """Items."""
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The items at ``indices``, stacked.

        Raises:
            DataError: If items are no dicts, or cannot be stacked.
        """
        get_many = getattr(self._items, "__getitems__", None)
        items = get_many(list(indices)) if get_many is not None else [self._items[index] for index in indices]
        if self._collate is not None:
            batch = check_batch(self._collate(items))
            if (rows := len(next(iter(batch.values())))) != len(indices):
                raise DataError(f"collate gave {rows} rows for {len(indices)} items; return one row per item")
            return batch
        for index, item in zip(indices, items, strict=True):
            if not isinstance(item, Mapping) or item.keys() != items[0].keys():
                has = ", ".join(map(repr, item)) if isinstance(item, Mapping) else "no keys"
                raise DataError(
                    f"item {index} of the dataset is a {type(item).__name__} with {has}; give dicts that all have the"
                    " keys that the train step takes (input_ids, labels, ...), or a collate function that makes one"
                )
        return {key: _stacked(key, [item[key] for item in items], indices) for key in items[0]}


def _load_dataset(folder: str) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(f"{folder} is read with the library datasets; pip install datasets") from error
    try:
        return load_from_disk(folder)
    except (OSError, ValueError, IndexError) as error:  # IndexError is the library's own, where there is not one row
        raise DataError(f"{folder} holds no dataset of save_to_disk ({str(error).splitlines()[0]})") from error


def _stacked(key: str, values: list[Any], indices: Sequence[int]) -> Tensor:
    try:
        return torch.stack([_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"items {', '.join(map(str, indices))} cannot be stacked under {key!r} ({error}); remove the key"
            " (remove_columns), pad them to one length, or give a collate function that does"
        ) from None


def _tensor(value: Any) -> Tensor:
    """``value`` on the host; an error of torch's if it is no number and not made of numbers."""
    tensor = value.cpu() if isinstance(value, Tensor) else torch.tensor(value)
    # torch computes little with the larger unsigned integers.
    return tensor.long() if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor


class TextEvaluationDataModule(MegatronDataModule):
    """Texts for ``Trainer.test``, ``validate`` and ``predict`` of a GPT; each target counts once, at any layout.

    ``task="perplexity"``: how well each token of each text is predicted from those before it (all but the first token
    of a text, which has none before it). A text longer than ``seq_length`` is read in several rows; with a ``stride``
    below ``seq_length`` they overlap, so that every target but those of the first row sees at least ``seq_length -
    stride`` tokens. Megatron-LM calls it ``--overlapping-eval``. Texts of less than two tokens are left out.

    ``task="last_word"``: how well the last word of each text is predicted from all before it, as in LAMBADA, with
    ``MegatronModule(train_step="last_word")``, which logs ``test_last_word_accuracy``. The word is tokenized with the
    space before it. Of a text longer than ``seq_length`` the beginning is not read.

    Special tokens that the tokenizer puts before texts by itself are put there, others not. A batch has ``text`` and
    ``loss_mask``, as ``GPTTrainStep`` takes them; all rows have the length of the longest, at most ``seq_length``.

    Args:
        data_path: A file, a folder or a pattern: .jsonl (one text a line), .parquet (one a row) or any file of text
            (one a file).
        tokenizer: Folder of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        task: ``perplexity`` or ``last_word``.
        seq_length: Most tokens that the model reads in one row.
        stride: For ``perplexity``: tokens by which each row begins behind the one before; None: ``seq_length``.
        strict: For ``last_word``: all tokens of the word must be right; False: only the last token counts.
        json_key: What holds the text in .jsonl and .parquet files.
        micro_batch_size: Rows in one microbatch of one data-parallel rank.
        num_workers: Processes that read ahead, on each rank that reads at all.
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
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, num_workers=num_workers, seed=0)
        require_choice("task", task, get_args(EvaluationTask))
        require_number("seq_length", seq_length, at_least=1)
        if stride is not None and (task != "perplexity" or not 1 <= stride <= seq_length):
            raise ConfigError(f"stride={stride} is for task=perplexity, and 1 to seq_length={seq_length}")
        self.data_path, self.tokenizer, self.task, self.seq_length = data_path, tokenizer, task, seq_length
        self._given = (data_path, tokenizer, seq_length, task, stride or seq_length, strict, json_key)
        self._sources = dict.fromkeys(("valid", "test"))

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} asks GPTs")
        is_asked = self._trainer().state.fn in (TrainerFn.TESTING, TrainerFn.VALIDATING)
        if self.task == "last_word" and is_asked and type(run.train_step) is GPTTrainStep:
            raise ConfigError("task=last_word: expected train_step='last_word', which counts last words, got 'gpt'")
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
        # Kernels like even shapes.
        multiple = math.lcm(8, strategy.parallel.sequence_divisor)
        longest = int((texts.bounds[:, 2] - texts.bounds[:, 0]).max()) - 1
        return replace(texts, row_length=min(self.seq_length, -(-longest // multiple) * multiple))

    @cached_property
    def _texts(self) -> EvaluationTexts:
        return read_evaluation_texts(*self._given)


def _paths_of_splits(data_path: Any, split: str, **own: Any) -> dict[SplitName, tuple[Any, str]]:
    """Where the samples of each split that there is come from, and the weights by which the splits share them.

    Args:
        data_path: Where all splits come from.
        split: By which weights they share it.
        own: Where each split alone comes from.

    Raises:
        ConfigError: If there is nothing to read, or two answers to where a split comes from.
    """
    alone: dict[Any, Any] = {name: path for name, path in own.items() if path is not None}
    if (data_path is None) != bool(alone):
        given = ", ".join(f"{name}_data_path={path}" for name, path in alone.items()) or "no path of a single split"
        raise ConfigError(f"data_path={data_path} with {given}: expected data_path and split, or only paths of splits")
    if data_path is None:
        whole = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}
        return {name: (path, whole[name]) for name, path in alone.items()}
    weights = zip(SPLIT_NAMES, parse_split(split), strict=True)
    return {name: (data_path, split) for name, weight in weights if weight > 0}


def _check_gpt(model: ModelConfig | None, what: str) -> None:
    if model is not None and model.architecture != "gpt":
        raise ConfigError(f"{what}, and {model.family} is a {model.architecture.upper()}")


def _check_token(largest: int, model: ModelConfig | None, source: str) -> None:
    """Refuse a token outside of the model's table, which would end the run inside a CUDA kernel."""
    if model is not None and largest >= model.vocab_size:
        raise DataError(f"{source} holds token {largest}, the model's vocab_size={model.vocab_size} ends before it")
