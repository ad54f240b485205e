"""``TextEvaluationDataModule``: texts to evaluate a GPT on."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Literal, get_args

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.documents import read_texts
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.evaluation import (
    EvaluationTask,
    EvaluationTexts,
    tokenize_evaluation_texts,
)
from lightning_megatron.data.splits import SplitName
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.datamodules.sources import check_gpt, check_token
from lightning_megatron.errors import (
    ConfigError,
    require_choice,
    require_number,
)
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.steps.gpt import GPTTrainStep


@checks_options
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
        if not strict and task != "last_word":
            raise ConfigError(
                f"strict=False: expected task='last_word', whose words it is about, got {task!r}; leave it out"
            )
        self.data_path = data_path
        self.tokenizer = tokenizer
        self.task = task
        self.seq_length = seq_length
        self._stride = stride or seq_length
        self._strict = strict
        self._json_key = json_key
        self._encoding = TextEncoding(name=encoding, errors=errors)
        self._sources = dict.fromkeys(("valid", "test"))

    @override
    def check(self, run: Run) -> None:
        check_gpt(run.model, f"{type(self).__name__} evaluates GPTs")
        evaluates = self._trainer().state.fn in (TrainerFn.TESTING, TrainerFn.VALIDATING)
        if self.task == "last_word" and evaluates and type(run.train_step) is GPTTrainStep:
            raise ConfigError(
                "task=last_word: expected train_step='last_word', which counts last words, got 'gpt'"
            )
        check_token(
            int(self._texts.tokens.max()),
            run.model,
            f"tokenizer={self.tokenizer}",
        )

    @override
    def open(self, name: SplitName, num_samples: int | None) -> EvaluationTexts:
        texts = self._texts
        strategy = self._strategy()
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
