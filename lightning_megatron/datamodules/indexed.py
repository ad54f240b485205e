"""How does the Trainer get the samples of indexed datasets, for a GPT, a BERT or a T5?"""

from __future__ import annotations

from typing import Literal, TypeAlias

from typing_extensions import override

from lightning_megatron.data.blend import (
    SampleOrder,
    Source,
    SplitRequest,
    build,
    check_request,
    open_samples,
    parse_blend,
)
from lightning_megatron.data.formats.mmap import largest_token_at_the_ends, read_header
from lightning_megatron.data.gpt import GPTObjective
from lightning_megatron.data.masked import BertObjective, MaskingOptions, T5Format, T5Objective
from lightning_megatron.data.samples import Objective, Samples, SplitName, weighted_splits, whole_split
from lightning_megatron.data.special_tokens import TokenizerFacts
from lightning_megatron.datamodules.base import (
    MegatronDataModule,
    Run,
    require_at_least,
    require_whole_step,
)
from lightning_megatron.datamodules.split_paths import paths_of_splits
from lightning_megatron.errors import ConfigError, DataError, as_options
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.models.config import ModelConfig

DataPath: TypeAlias = str | list[str | float]
"""A prefix; several, taken in proportion to their sizes; or weights and prefixes in turn."""


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
        require_at_least("seq_length", seq_length, 1)
        require_at_least("seq_length_decoder", seq_length_decoder, 1)
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
        self._sources = _sources(data_path, split, paths_of_splits(data_path, own))  # type: ignore[arg-type]
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
        self.check_lengths(run)
        objective = self._objective(run.model)
        for split in self._sources:
            num_samples = check_request(self._request(split, objective, None))
            if split == "train":
                require_whole_step(run, num_samples)
        if run.model is not None:
            self._check_vocabulary(objective, run.model.vocab_size)

    @override
    def order_of(self, name: SplitName, num_samples: int | None) -> SampleOrder:
        return build(self._request(name, self._objective(self.model()), num_samples), self.index_cache)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> Samples:
        return open_samples(self._request(name, self._objective(self.model()), num_samples), self.index_cache)

    def _request(self, name: SplitName, objective: Objective, num_samples: int | None) -> SplitRequest:
        sources, split = self._sources[name]
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
        if name == "gpt":
            return GPTObjective(
                seq_length=self.seq_length,
                drop_last_partial_validation_sequence=self.drop_last_partial_validation_sequence,
            )
        if self.tokenizer is None:
            raise ConfigError(
                f"tokenizer=None does not tell which tokens mask and separate, which samples for a {name.upper()} need;"
                " give the folder of the tokenizer that the dataset was made with"
            )
        facts = TokenizerFacts.read(self.tokenizer)
        if name == "t5":
            return T5Objective(
                seq_length=self.seq_length,
                seq_length_decoder=self.seq_length_decoder,
                tokenizer=facts,
                masking=self.masking,
                format=self.t5_format,
            )
        order = is_pretraining if self.sentence_order is None else self.sentence_order
        return BertObjective(seq_length=self.seq_length, tokenizer=facts, masking=self.masking, sentence_order=order)

    def _check_vocabulary(self, objective: Objective, vocab_size: int) -> None:
        """A token outside of the model's table would end the run inside a CUDA kernel."""
        if objective.largest_token >= vocab_size:
            raise ConfigError(
                f"tokenizer={self.tokenizer} has the token {objective.largest_token}, which samples contain, the"
                f" model's vocab_size={vocab_size} ends at {vocab_size - 1}; use the model's tokenizer, or a model with"
                f" vocab_size={objective.largest_token + 1}"
            )
        for prefix in dict.fromkeys(source.prefix for sources, _ in self._sources.values() for source in sources):
            if (largest := largest_token_at_the_ends(read_header(prefix))) >= vocab_size:
                raise DataError(
                    f"{prefix}.bin holds token {largest}, the model's vocab_size={vocab_size} ends at"
                    f" {vocab_size - 1}: it was tokenized for another model; preprocess with the model's tokenizer"
                )


def _sources(
    data_path: DataPath | None, split: str, own: dict[SplitName, DataPath] | None
) -> dict[SplitName, tuple[tuple[Source, ...], str]]:
    """The datasets of each split that there is, and the weights by which a split takes its documents from them."""
    if own is not None:
        return {name: (parse_blend(path), whole_split(name)) for name, path in own.items()}
    assert data_path is not None, "paths_of_splits has seen to it"
    sources = parse_blend(data_path)
    return dict.fromkeys(weighted_splits(split), (sources, split))
