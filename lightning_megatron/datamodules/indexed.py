"""``IndexedDataModule``: Megatron's indexed datasets."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from lightning_megatron.data.blends import parse_blend
from lightning_megatron.data.gpt_samples import GPTObjective
from lightning_megatron.data.index_cache import open_samples
from lightning_megatron.data.indexed import check_dataset
from lightning_megatron.data.masked import MaskingOptions
from lightning_megatron.data.masked_bert import BertObjective
from lightning_megatron.data.masked_t5 import T5Format, T5Objective
from lightning_megatron.data.samples import Objective, Part, Samples
from lightning_megatron.data.splits import SplitName
from lightning_megatron.data.tokenizer import largest_id, load_tokenizer
from lightning_megatron.data.tokenizer_facts import TokenizerFacts
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.datamodules.sources import check_token, split_sources
from lightning_megatron.errors import (
    ConfigError,
    as_options,
    require_number,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig

DataPath: TypeAlias = str | list[str | float]
"""A prefix; a list of prefixes, weighted by their sizes; or weights and prefixes in turn."""
_TOKENS_CHECKED = 1 << 20
_READ_BY = {
    "seq_length_decoder": ("t5",),
    "masking": ("bert", "t5"),
    "t5_format": ("t5",),
    "sentence_order": ("bert",),
    "drop_last_partial_validation_sequence": ("gpt",),
}
"""Options that not every objective reads, and which ones do."""
_SPLIT = "949,50,1"


@checks_options
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
            for special tokens and word boundaries. A GPT needs none; one that is given must fit its vocabulary.
        seq_length_decoder: Tokens per row that a T5's decoder reads.
        masking: How tokens of a BERT or T5 are masked.
        t5_format: End of a T5's rows: ``hugging_face``, as its released models were trained (the text with eos, the
            labels with one more sentinel and eos), or ``megatron`` (the labels with eos).
        sentence_order: Whether a BERT learns the order of sentences; None: if the model's task is ``pretraining``.
        train_data_path: Datasets for training alone; with this or one of the next two, ``split`` and ``data_path`` are
            refused.
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
        split: str = _SPLIT,
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
        paths = split_sources(
            data_path,
            split,
            _SPLIT,
            train=train_data_path,
            valid=valid_data_path,
            test=test_data_path,
        )
        self._sources = {
            name: (parse_blend(path), weights) for name, (path, weights) in paths.items()
        }

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        lengths = {"seq_length": self.seq_length}
        if self._objective_name(model) == "t5":
            lengths["seq_length_decoder"] = self.seq_length_decoder
        return lengths

    @override
    def check(self, run: Run) -> None:
        name = self._objective_name(run.model)
        if run.model is not None and run.model.architecture != name:
            raise ConfigError(
                f"objective={name!r}: expected {run.model.architecture!r} for a {run.model.family}"
            )
        self._check_read(name)
        objective = self._objective(run.model)
        parts = [part for split in self._sources for part in self._parts(split, None)]
        for prefix in dict.fromkeys(part.prefix for part in parts):
            tokens = check_dataset(prefix).tokens  # only both ends are read: all may be terabytes
            ends = (tokens[:_TOKENS_CHECKED], tokens[-_TOKENS_CHECKED:])
            check_token(
                max(int(end.max()) for end in ends),
                run.model,
                prefix,
            )
        for part in parts:
            if part.name in run.splits:
                objective.count(part)
        if name != "gpt" or self.tokenizer is not None:
            largest = largest_id(self._loaded_tokenizer)
            check_token(largest, run.model, f"tokenizer={self.tokenizer}")

    @override
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        return open_samples(
            self._objective(self.model()), self._parts(name, num_samples), self.index_cache
        )

    def _check_read(self, objective: str) -> None:
        """Check that the objective reads every option that is set.

        Raises:
            ConfigError: For the first one that it does not read.
        """
        parameters = inspect.signature(IndexedDataModule).parameters
        for option, objectives in _READ_BY.items():
            value = getattr(self, option)
            if objective not in objectives and value != parameters[option].default:
                raise ConfigError(
                    f"{option}={value!r}: expected the objective {' or '.join(objectives)}, which reads it, got "
                    f"{objective}; leave {option} out"
                )

    def _parts(
        self,
        name: SplitName,
        num_samples: int | None,
    ) -> list[Part]:
        blend, split = self._sources[name]
        common = {
            "split": split,
            "name": name,
            "seed": self.seed,
            "num_samples": num_samples,
        }
        return [
            Part(
                prefix=prefix,
                weight=weight,
                **common,
            )
            for prefix, weight in blend
        ]

    def _objective_name(self, model: ModelConfig | None) -> str:
        if self.objective_name:
            return self.objective_name
        if model is None:
            return "gpt"
        return model.architecture

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer=None: expected the directory of the dataset's tokenizer for a BERT or T5"
            )
        return load_tokenizer(self.tokenizer)

    @cached_property
    def _tokenizer_facts(self) -> TokenizerFacts:
        return TokenizerFacts.of(self._loaded_tokenizer, str(self.tokenizer))

    def _objective(self, model: ModelConfig | None) -> Objective:
        """Objective that makes the model's samples."""
        name = self._objective_name(model)
        length = self.seq_length
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
