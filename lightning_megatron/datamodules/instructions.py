"""How does the Trainer get prompts and answers for supervised fine-tuning?"""

from __future__ import annotations

from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron.data.blend import SampleOrder
from lightning_megatron.data.conversations import Answers
from lightning_megatron.data.instructions import (
    InstructionOptions,
    Instructions,
    InstructionSamples,
    RowOptions,
    cached_instructions,
    check_instructions,
)
from lightning_megatron.data.samples import SplitName, split_ranges, weighted_splits
from lightning_megatron.datamodules.base import (
    MegatronDataModule,
    Run,
    require_at_least,
    require_whole_step,
)
from lightning_megatron.datamodules.split_paths import paths_of_splits
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.models.config import ModelConfig


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
        require_at_least("seq_length", seq_length, 2)
        if tokenizer is None:
            raise ConfigError("tokenizer=None cannot read text; give the folder of the model's tokenizer")
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self.index_cache = index_cache
        self._answers = answers
        self._separator = separator
        self._row_options = RowOptions(packing=packing, pad_to_multiple_of=pad_to_multiple_of, seed=seed)
        self._row_options.check_length(seq_length)
        own = {"train": train_data_path, "valid": valid_data_path, "test": test_data_path}
        self._paths = paths_of_splits(data_path, own)  # type: ignore[arg-type]
        self._data_path, self._split = data_path, split
        weighted = weighted_splits(split)
        self._names: set[SplitName] = set(weighted if self._paths is None else self._paths)
        self._read: dict[str, Instructions] = {}

    @override
    def has_split(self, name: SplitName) -> bool:
        return name in self._names

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        multiple = self._row_options.pad_to_multiple_of
        return {"seq_length": self.seq_length, **({} if multiple is None else {"pad_to_multiple_of": multiple})}

    @override
    def check(self, run: Run) -> None:
        if run.model is not None and run.model.architecture != "gpt":
            raise ConfigError(
                f"{type(self).__name__} makes samples for GPTs, and {run.model.family} is a"
                f" {run.model.architecture.upper()}; give a LightningDataModule of your own"
            )
        self.check_lengths(run)
        for path in {self._path(name) for name in self._names}:
            check_instructions(self._options(path))
        if run.whole_epochs and self.has_split("train"):
            require_whole_step(run, len(self.open("train", None)))

    @override
    def order_of(self, name: SplitName, num_samples: int | None) -> SampleOrder:
        samples = self.open(name, num_samples)
        if self._row_options.packing:
            rank_zero_info(f"Packing: {len(samples):,} {name} rows, of which {samples.efficiency:.1%} is no padding")
        return SampleOrder(num_samples=len(samples), fingerprint=samples.fingerprint)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> InstructionSamples:
        path = self._path(name)
        if path not in self._read:
            self._read[path] = self._with_known_tokens(cached_instructions(self._options(path), self.index_cache))
        instructions = self._read[path]
        if self._paths is None:
            part = split_ranges(self._split, len(instructions))[name]
            if not part:
                raise DataError(
                    f"split={self._split!r} gives {name} none of the {len(instructions)} samples of {path}; give it a"
                    " larger weight or weight 0, or add samples"
                )
            instructions = instructions.part(part)
        return InstructionSamples(instructions, self._row_options)

    def _with_known_tokens(self, instructions: Instructions) -> Instructions:
        """The same; a token outside of the model's table would end the run inside a CUDA kernel."""
        model = self.model()
        if model is not None and instructions.largest_token >= model.vocab_size:
            raise ConfigError(
                f"tokenizer={self.tokenizer} gives the token {instructions.largest_token}, the model's vocab_size="
                f"{model.vocab_size} ends at {model.vocab_size - 1}; use the model's tokenizer"
            )
        return instructions

    def _path(self, name: SplitName) -> str:
        path = self._data_path if self._paths is None else self._paths[name]
        assert path is not None, "paths_of_splits has seen to it"
        return path

    def _options(self, path: str) -> InstructionOptions:
        return InstructionOptions(
            path=path,
            tokenizer=self.tokenizer,
            seq_length=self.seq_length,
            answers=self._answers,
            separator=self._separator,
        )
