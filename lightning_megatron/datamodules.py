"""Data modules for ``Trainer``: indexed datasets, instructions, any map-style dataset, and texts for an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.blend import SplitRequest, build, check_request, open_samples, parse_blend
from lightning_megatron.data.conversations import Answers
from lightning_megatron.data.datasets import DatasetSamples, load_dataset
from lightning_megatron.data.evaluation import (
    EvaluationOptions,
    EvaluationTask,
    EvaluationTexts,
    read_evaluation_texts,
)
from lightning_megatron.data.gpt import GPTObjective
from lightning_megatron.data.indexed import largest_token_at_the_ends, open_dataset
from lightning_megatron.data.instructions import (
    InstructionOptions,
    Instructions,
    InstructionSamples,
    RowOptions,
    cached_instructions,
    check_instructions,
)
from lightning_megatron.data.masked import BertObjective, MaskingOptions, T5Format, T5Objective
from lightning_megatron.data.samples import (
    Objective,
    SampleOrder,
    Samples,
    SplitName,
    split_ranges,
    weighted_splits,
    whole_split,
)
from lightning_megatron.data.special_tokens import TokenizerFacts
from lightning_megatron.errors import ConfigError, DataError, as_options, require_number
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.megatron_datamodule import MegatronDataModule, Run
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.gpt import GPTTrainStep

DataPath: TypeAlias = str | list[str | float]
"""A prefix; several, taken in proportion to their sizes; or weights and prefixes in turn."""

_Path = TypeVar("_Path")


@explains_options
class IndexedDataModule(MegatronDataModule):
    """Training, validation and test samples from Megatron's indexed datasets, ``PREFIX.bin`` and ``PREFIX.idx``.

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
        self.seq_length = seq_length
        self.seq_length_decoder = seq_length_decoder
        self.objective_name = objective
        self.tokenizer = tokenizer
        self.masking = as_options(MaskingOptions, masking, "masking")
        self.t5_format = t5_format
        self.sentence_order = sentence_order
        self.drop_last_partial_validation_sequence = drop_last_partial_validation_sequence
        self.index_cache = index_cache
        own = {"train": train_data_path, "valid": valid_data_path, "test": test_data_path}
        paths = _paths_of_splits(data_path, split, own)  # type: ignore[arg-type]
        self._sources = {name: (parse_blend(path), weights) for name, (path, weights) in paths.items()}
        self._objectives: dict[tuple[str, bool], Objective] = {}

    @override
    def has_split(self, name: SplitName) -> bool:
        return name in self._sources

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        decoder = {"seq_length_decoder": self.seq_length_decoder} if self._name(model) == "t5" else {}
        return {"seq_length": self.seq_length, **decoder}

    @override
    def check(self, run: Run) -> None:
        name = self._name(run.model)
        if run.model is not None and run.model.architecture != name:
            raise ConfigError(
                f"objective={name!r} makes samples for another architecture than {run.model.family}'s; use"
                f" objective={run.model.architecture!r} or leave it out"
            )
        objective = self._objective(run.model)
        for split in self._sources:
            check_request(self._request(split, run.model, None))
        if run.model is None:
            return
        _check_token(objective.largest_token, run.model, self.tokenizer)
        for prefix in dict.fromkeys(source.prefix for sources, _ in self._sources.values() for source in sources):
            vocab_size = run.model.vocab_size
            if (largest := largest_token_at_the_ends(open_dataset(prefix))) >= vocab_size:
                raise DataError(
                    f"{prefix}.bin holds token {largest}, the model's vocab_size={vocab_size} ends at"
                    f" {vocab_size - 1}: it was tokenized for another model; preprocess with the model's tokenizer"
                )

    @override
    def order_of(self, name: SplitName, num_samples: int | None) -> SampleOrder:
        return build(self._request(name, self.model(), num_samples), self.index_cache)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        return open_samples(self._request(name, self.model(), num_samples), self.index_cache)

    def _request(self, name: SplitName, model: ModelConfig | None, num_samples: int | None) -> SplitRequest:
        sources, split = self._sources[name]
        objective = self._objective(model)
        return SplitRequest(
            name=name, sources=sources, split=split, objective=objective, seed=self.seed, num_samples=num_samples
        )

    def _name(self, model: ModelConfig | None) -> str:
        return self.objective_name or ("gpt" if model is None else model.architecture)

    def _objective(self, model: ModelConfig | None) -> Objective:
        """What a sample is; made once for a kind of model, as it reads the tokenizer."""
        kind = (self._name(model), model is None or model.task == "pretraining")
        if kind not in self._objectives:
            self._objectives[kind] = self._make_objective(*kind)
        return self._objectives[kind]

    def _make_objective(self, name: str, is_pretraining: bool) -> Objective:
        length, drop_last = self.seq_length, self.drop_last_partial_validation_sequence
        if name == "gpt":
            return GPTObjective(seq_length=length, drop_last_partial_validation_sequence=drop_last)
        if self.tokenizer is None:
            raise ConfigError(
                f"tokenizer=None does not tell which tokens mask and separate, which samples for a {name.upper()} need;"
                " give the folder of the tokenizer that the dataset was made with"
            )
        facts = TokenizerFacts.read(self.tokenizer)
        if name == "bert":
            in_order = is_pretraining if self.sentence_order is None else self.sentence_order
            return BertObjective(seq_length=length, tokenizer=facts, masking=self.masking, sentence_order=in_order)
        return T5Objective(
            seq_length=length,
            seq_length_decoder=self.seq_length_decoder,
            tokenizer=facts,
            masking=self.masking,
            format=self.t5_format,
        )


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

    shuffling = "every pass"

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
        if tokenizer is None:
            raise ConfigError("tokenizer=None cannot read text; give the folder of the model's tokenizer")
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self.index_cache = index_cache
        self._rows = RowOptions(packing=packing, pad_to_multiple_of=pad_to_multiple_of, seed=seed)
        self._rows.check_length(seq_length)
        own = {"train": train_data_path, "valid": valid_data_path, "test": test_data_path}
        paths = _paths_of_splits(data_path, split, own)  # type: ignore[arg-type]
        options = {"tokenizer": tokenizer, "seq_length": seq_length, "answers": answers, "separator": separator}
        self._sources = {
            name: (InstructionOptions(path=path, **options), weights)  # type: ignore[arg-type]
            for name, (path, weights) in paths.items()
        }
        self._read: dict[InstructionOptions, Instructions] = {}

    @override
    def has_split(self, name: SplitName) -> bool:
        return name in self._sources

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        multiple = self._rows.pad_to_multiple_of
        return {"seq_length": self.seq_length, **({} if multiple is None else {"pad_to_multiple_of": multiple})}

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} makes samples for GPTs")
        for options in {options for options, _ in self._sources.values()}:
            check_instructions(options)

    @override
    def order_of(self, name: SplitName, num_samples: int | None) -> SampleOrder:
        samples = self.open(name, num_samples)
        if self._rows.packing:
            rank_zero_info(f"Packing: {len(samples):,} {name} rows, of which {samples.efficiency:.1%} is no padding")
        return SampleOrder(num_samples=len(samples), fingerprint=samples.fingerprint)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> InstructionSamples:
        options, split = self._sources[name]
        if options not in self._read:
            instructions = cached_instructions(options, self.index_cache)
            _check_token(instructions.largest_token, self.model(), self.tokenizer)
            self._read[options] = instructions
        instructions = self._read[options]
        part = split_ranges(split, len(instructions))[name]
        if not part:
            raise DataError(
                f"split={split!r} gives {name} none of the {len(instructions)} samples of {options.path}; give it a"
                " larger weight or weight 0, or add samples"
            )
        return InstructionSamples(instructions.part(part), self._rows)


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
        self._datasets = {name: dataset for name, dataset in given.items() if dataset is not None}
        if not self._datasets:
            raise ConfigError("train=None, valid=None and test=None leave nothing to read; give at least one dataset")
        self._collate = collate
        self.shuffling = "every pass" if shuffle else "never"

    @override
    def has_split(self, name: SplitName) -> bool:
        return name in self._datasets

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        return {}

    @override
    def check(self, run: Run) -> None:
        for name in self._datasets:
            self.open(name, None)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> DatasetSamples:
        if isinstance(folder := self._datasets[name], str):
            self._datasets[name] = load_dataset(folder)
        return DatasetSamples(self._datasets[name], self._collate)


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

    shuffling = "never"

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
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self._options = EvaluationOptions(
            path=data_path,
            tokenizer=tokenizer,
            seq_length=seq_length,
            task=task,
            stride=stride,
            strict=strict,
            json_key=json_key,
        )
        self._read: EvaluationTexts | None = None

    @override
    def has_split(self, name: SplitName) -> bool:
        return name != "train"

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        return {"seq_length": self.seq_length}

    @override
    def check(self, run: Run) -> None:
        _check_gpt(run.model, f"{type(self).__name__} asks GPTs")
        is_asked = self._trainer().state.fn in (TrainerFn.TESTING, TrainerFn.VALIDATING)
        if self._options.task == "last_word" and is_asked and type(run.train_step) is GPTTrainStep:
            raise ConfigError(
                "task=last_word asks how many last words are right, which train_step='gpt' does not count; set "
                "train_step='last_word' of the model"
            )
        _check_token(int(self._texts().tokens.max()), run.model, self.tokenizer)

    @override
    def order_of(self, name: SplitName, num_samples: int | None) -> SampleOrder:
        texts = self._texts()
        rank_zero_info(f"{self._options.path}: {texts.num_targets:,} targets in {len(texts):,} rows")
        if texts.num_cut:
            rank_zero_warn(
                f"{texts.num_cut} texts of {self._options.path} have more tokens than seq_length={self.seq_length} and "
                "lose their beginning; raise it to keep them whole"
            )
        if texts.num_left_out:
            rank_zero_info(f"{texts.num_left_out} texts of less than two tokens are left out")
        return super().order_of(name, num_samples)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> EvaluationTexts:
        texts, strategy = self._texts(), self._strategy()
        # Kernels like even shapes.
        multiple = math.lcm(8, strategy.tp if strategy.sequence_parallel else 1)
        return replace(texts, row_length=min(self.seq_length, -(-texts.longest // multiple) * multiple))

    def _texts(self) -> EvaluationTexts:
        if self._read is None:
            self._read = read_evaluation_texts(self._options)
        return self._read


def _paths_of_splits(
    data_path: _Path | None, split: str, own: Mapping[SplitName, _Path | None]
) -> dict[SplitName, tuple[_Path, str]]:
    """Where the samples of each split that there is come from, and the weights by which the splits share them.

    Args:
        data_path: Where all splits come from.
        split: By which weights they share it.
        own: Where each split alone comes from.

    Raises:
        ConfigError: If there is nothing to read, or two answers to where a split comes from.
    """
    given: dict[SplitName, _Path] = {name: path for name, path in own.items() if path is not None}
    if data_path is None and not given:
        raise ConfigError("data_path=None leaves nothing to read; give data_path, or train_data_path and others")
    if data_path is None:
        return {name: (path, whole_split(name)) for name, path in given.items()}
    if given:
        names = ", ".join(f"{name}_data_path" for name in given)
        raise ConfigError(
            f"data_path={data_path} and {names} both say where samples come from; give data_path with split, or only"
            " paths of single splits"
        )
    return dict.fromkeys(weighted_splits(split), (data_path, split))


def _check_gpt(model: ModelConfig | None, what: str) -> None:
    if model is not None and model.architecture != "gpt":
        raise ConfigError(
            f"{what}, and {model.family} is a {model.architecture.upper()}; give a LightningDataModule of your own"
        )


def _check_token(largest: int, model: ModelConfig | None, tokenizer: str | None) -> None:
    """Refuse a token outside of the model's table, which would end the run inside a CUDA kernel."""
    if model is not None and largest >= model.vocab_size:
        raise ConfigError(
            f"tokenizer={tokenizer} gives the token {largest}, the model's vocab_size={model.vocab_size} ends at"
            f" {model.vocab_size - 1}; use the model's tokenizer"
        )
