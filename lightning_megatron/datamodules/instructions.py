"""``InstructionDataModule``: prompts and answers to learn."""

from __future__ import annotations

from typing import get_args

from lightning.fabric.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron.data.instruction_records import Answers, InstructionOptions
from lightning_megatron.data.instruction_rows import InstructionSamples
from lightning_megatron.data.instructions import (
    Instructions,
    cached_instructions,
    check_instructions,
)
from lightning_megatron.data.splits import SplitName, split_ranges
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.datamodules.sources import check_gpt, check_token, split_sources
from lightning_megatron.errors import (
    ConfigError,
    DataError,
    require_choice,
    require_divides,
    require_number,
)
from lightning_megatron.foreign_names import checks_options

_SPLIT = "95,5,0"


@checks_options
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
        train_data_path: Training samples alone; with this or one of the next two, ``split`` and ``data_path`` are
            refused.
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
        split: str = _SPLIT,
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
        self.packing = packing
        self.pad_to_multiple_of = pad_to_multiple_of
        if pad_to_multiple_of is not None:
            if packing:
                raise ConfigError(
                    f"pad_to_multiple_of={pad_to_multiple_of} is not for packing=True; leave one out"
                )
            require_divides("pad_to_multiple_of", pad_to_multiple_of, "seq_length", seq_length)
        paths = split_sources(
            data_path,
            split,
            _SPLIT,
            train=train_data_path,
            valid=valid_data_path,
            test=test_data_path,
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
        check_gpt(run.model, f"{type(self).__name__} makes samples for GPTs")
        for options in {options for options, _ in self._sources.values()}:
            check_instructions(options)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> InstructionSamples:
        options, split = self._sources[name]
        if options not in self._instructions:
            instructions = cached_instructions(options, self.index_cache)
            largest = max(int(instructions.tokens.max()), int(instructions.padding_token))
            check_token(largest, self.model(), f"tokenizer={self.tokenizer}")
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
