"""``PreferenceDataModule``: pairs of a chosen and a rejected answer, with what a reference model says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.convert.frozen_model import FrozenWeights
from lightning_megatron.convert.registry import model_config
from lightning_megatron.data.instruction_records import InstructionOptions, record_files
from lightning_megatron.data.instructions import Instructions
from lightning_megatron.data.preferences import (
    PreferenceSamples,
    cached_preferences,
    check_preferences,
)
from lightning_megatron.data.splits import SPLIT_NAMES, SplitName, split_ranges
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.datamodules.reference import ReferencePass
from lightning_megatron.datamodules.sources import check_gpt, check_token, split_sources
from lightning_megatron.errors import ConfigError, DataError, require_divides, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.steps.dpo import PreferencePairs
from lightning_megatron.steps.reward import RewardTrainStep
from lightning_megatron.storage.hub import local_folder

_SPLIT = "95,5,0"


@checks_options
class PreferenceDataModule(MegatronDataModule):
    """Preferences for a GPT: pairs of answers from JSON lines, for ``DPOTrainStep`` or ``RewardTrainStep``.

    A line has ``prompt``, ``chosen`` and ``rejected``: strings, or lists of messages for the tokenizer's chat template.
    Without ``prompt``, ``chosen`` and ``rejected`` are whole conversations, and the prompt is the messages with which
    both begin. The answer alone is learned, of a chat the turns of the assistant after the prompt, with the token that
    ends it.

    A batch has ``chosen_input_ids``, ``chosen_attention_mask`` and ``chosen_labels``, the same for ``rejected_``, and
    ``reference_chosen_logps`` and ``reference_rejected_logps``, as ``DPOTrainStep`` takes them; for ``RewardTrainStep``
    tokens and masks alone. A row is a pair.

    The reference's log-probabilities are computed before the model is built, at the layout of the run, and cached: a
    later run with the same tokens, weights and dtype reads them. For anything else they are computed again. A model
    with ``lora`` needs none: its reference is the model with its adapters off, which ``DPOTrainStep`` computes in each
    step, unless ``reference`` is given.

    Args:
        data_path: A .jsonl file, a directory of them, or a glob pattern, to be split.
        tokenizer: Directory of the model's tokenizer, or its name on the Hugging Face hub (``org/name``).
        split: Weights of training, validation and test pairs, e.g. ``95,5,0``, in the order of the lines.
        seq_length: Tokens of a prompt with an answer; longer ones are truncated at the end.
        micro_batch_size: Pairs in one microbatch of one data-parallel rank, two sequences each.
        pad_to_multiple_of: Pad rows to the longest of their batch, rounded up to a multiple of this; None: to
            ``seq_length``.
        separator: Text between a prompt and an answer that are strings.
        reference: Directory of the reference model's Hugging Face weights, or its name on the hub; None: the weights
            that training begins with, by the module's ``pretrained`` or the strategy's ``load_from``.
        reference_cache: Directory that caches the reference's log-probabilities; None: ``reference_logps`` beside the
            data.
        train_data_path: Training pairs alone; with this or one of the next two, ``split`` and ``data_path`` are
            refused.
        valid_data_path: Validation pairs alone.
        test_data_path: Test pairs alone.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        seed: Seed of the order of pairs.
        index_cache: Directory that caches the tokenized pairs for all ranks and later runs; None: each rank that reads
            data tokenizes them in memory.
    """

    def __init__(
        self,
        data_path: str | None = None,
        tokenizer: str | None = None,
        split: str = _SPLIT,
        seq_length: int = 1024,
        micro_batch_size: int = 4,
        pad_to_multiple_of: int | None = None,
        separator: str = "",
        reference: str | None = None,
        reference_cache: str | None = None,
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
            raise ConfigError("tokenizer=None: expected the directory of the model's tokenizer")
        self.seq_length = seq_length
        self.tokenizer = tokenizer
        self.index_cache = index_cache
        self.reference = reference
        self.reference_cache = reference_cache
        self.pad_to_multiple_of = pad_to_multiple_of
        if pad_to_multiple_of is not None:
            require_divides("pad_to_multiple_of", pad_to_multiple_of, "seq_length", seq_length)
        paths = split_sources(
            data_path,
            split,
            _SPLIT,
            train=train_data_path,
            valid=valid_data_path,
            test=test_data_path,
        )
        options = {"tokenizer": tokenizer, "seq_length": seq_length, "separator": separator}
        self._sources = {
            name: (InstructionOptions(path=path, **options), weights)  # type: ignore[arg-type]
            for name, (path, weights) in paths.items()
        }
        self._pairs: dict[InstructionOptions, Instructions] = {}
        self._reference_logps: dict[SplitName, NDArray[np.float32]] = {}

    @override
    def check(self, run: Run) -> None:
        check_gpt(run.model, f"{type(self).__name__} makes pairs for GPTs")
        if self.reference is not None and isinstance(run.train_step, RewardTrainStep):
            raise ConfigError(
                f"reference={self.reference}: expected a train step that compares with a reference, as 'dpo' does, got "
                f"{type(run.train_step).__name__}; leave it out"
            )
        for options in {options for options, _ in self._sources.values()}:
            check_preferences(options)
        if self._needs_reference(run):
            weights = self._reference_weights(run)
            check_gpt(weights.model, "reference: expected a GPT")
            if run.model is not None and weights.model.vocab_size != run.model.vocab_size:
                raise ConfigError(
                    f"reference={weights.path}: expected the model's vocabulary of {run.model.vocab_size} tokens, got "
                    f"{weights.model.vocab_size}; give a model with the same tokenizer"
                )
            weights.check(self._strategy().settings, "reference")

    @override
    def setup(self, stage: str) -> None:
        """Check on rank 0, and compute the reference's log-probabilities. Collective over the world.

        Raises:
            ConfigError: If strategy, Trainer settings or source are incompatible, or the reference model is unknown.
        """
        super().setup(stage)
        self._reference_logps = {}
        run = self.run()
        if stage == "predict" or not self._needs_reference(run):
            return
        weights = self._reference_weights(run)
        checkpointing = self._strategy().checkpointing
        goes_on = checkpointing.has_trained and checkpointing.start_checkpoint is None
        if stage == "fit" and self.reference is None and goes_on:
            rank_zero_warn(
                "reference=None: expected weights that training begins with, got a module that this process has "
                f"trained; the reference is still {weights.path}: give reference=DIR for another"
            )
        for name in SPLIT_NAMES:
            if name not in run.splits or not self.has_split(name):
                continue
            order, samples = self._open(name, None)
            options, _ = self._sources[name]
            reference = ReferencePass(
                weights=weights,
                strategy=self._strategy(),
                rows_per_batch=self.micro_batch_size * run.shape.num_microbatches,
                cache=self._reference_folder(options),
            )
            self._reference_logps[name] = reference.logps(samples, order.num_samples)  # type: ignore[arg-type]

    def _needs_reference(self, run: Run) -> bool:
        """Whether a run reads log-probabilities of a reference that its model does not contain."""
        if self.reference is not None:
            return True
        return isinstance(run.train_step, PreferencePairs) and run.train_step.needs_references

    def _reference_folder(self, options: InstructionOptions) -> Path:
        if self.reference_cache is not None:
            return Path(self.reference_cache)
        first, *_ = record_files(options.path)
        return first.parent / "reference_logps"

    def _reference_weights(self, run: Run) -> FrozenWeights:
        """The reference model: the given one, else the weights that training begins with.

        Raises:
            ConfigError: If they are random, or those of a checkpoint that a restarted run would not know any more.
        """
        module: Any = self._trainer().lightning_module
        multiple = 128
        if run.model is not None:
            multiple = run.model.make_vocab_size_divisible_by
        if self.reference is not None:
            folder = local_folder(self.reference, "model")
            config = replace(model_config(str(folder)), make_vocab_size_divisible_by=multiple)
            return FrozenWeights(model=config, source=folder)
        checkpointing = self._strategy().checkpointing
        fitting = self._trainer().state.fn in (None, TrainerFn.FITTING)
        if fitting and checkpointing.weights_alone_of is not None:
            raise ConfigError(
                "reference=None: expected the weights that training begins with from pretrained=True or load_from, got "
                f"ckpt_path={checkpointing.weights_alone_of} with load_weights_only=True, which a restarted run would "
                "not know any more; give load_from instead, or reference=DIR"
            )
        checkpoint = checkpointing.initial_weights
        source = checkpoint or getattr(module, "pretrained_path", None)
        if source is None or run.model is None:
            raise ConfigError(
                "reference=None: expected a model with pretrained=True or a strategy with load_from, whose weights are "
                "the reference, got random weights; set one of them, or reference=DIR"
            )
        if getattr(module, "model_provider", None) is not None:
            raise ConfigError(
                "reference=None: expected this package's model, got a model_provider, whose weights cannot be loaded "
                "into a second model; give reference=DIR, or references in the batches of a DataLoader"
            )
        return FrozenWeights(model=replace(run.model, lora=None, lora_dropout=0.0), source=source)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> PreferenceSamples:
        options, split = self._sources[name]
        if options not in self._pairs:
            pairs = cached_preferences(options, self.index_cache)
            largest = max(int(pairs.tokens.max()), int(pairs.padding_token))
            check_token(largest, self.model(), f"tokenizer={self.tokenizer}")
            self._pairs[options] = pairs
        answers = self._pairs[options]
        num_pairs = len(answers) // 2
        part = split_ranges(split, num_pairs)[name]
        if not part:
            raise DataError(
                f"split={split!r} gives {name} none of the {num_pairs} pairs of {options.path}"
            )
        return PreferenceSamples(
            answers=answers.part(range(2 * part.start, 2 * part.stop)),
            seq_length=self.seq_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            has_labels=not isinstance(self.run().train_step, RewardTrainStep),
            reference_logps=self._reference_logps.get(name),
        )
