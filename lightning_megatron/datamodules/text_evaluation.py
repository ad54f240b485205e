"""How does the Trainer ask a GPT about texts, as Megatron-LM's zero-shot tasks do?"""

from __future__ import annotations

import math

from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_megatron.data.blend import SampleOrder
from lightning_megatron.data.evaluation import (
    EvaluationOptions,
    EvaluationRows,
    EvaluationTask,
    EvaluationTexts,
    read_evaluation_texts,
)
from lightning_megatron.data.samples import SplitName
from lightning_megatron.datamodules.base import MegatronDataModule, Run
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.gpt import GPTTrainStep

_ROUND = 8
"""Rows are padded to a multiple of this: kernels like even shapes."""


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
        self._objective: object = None

    @override
    def has_split(self, name: SplitName) -> bool:
        return name != "train"

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        return {"seq_length": self.seq_length}

    @override
    def check(self, run: Run) -> None:
        if run.model is not None and run.model.architecture != "gpt":
            raise ConfigError(
                f"{type(self).__name__} asks GPTs, and {run.model.family} is a {run.model.architecture.upper()}; give "
                "a LightningDataModule of your own"
            )
        self._check_objective()
        self.check_lengths(run)
        largest = int(self._texts().tokens.max())
        if run.model is not None and largest >= run.model.vocab_size:
            raise ConfigError(
                f"tokenizer={self.tokenizer} gives the token {largest}, the model's vocab_size={run.model.vocab_size} "
                f"ends at {run.model.vocab_size - 1}; use the model's tokenizer"
            )

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
    def open(self, name: SplitName, num_samples: int | None) -> EvaluationRows:
        texts, strategy = self._texts(), self._strategy()
        multiple = math.lcm(_ROUND, strategy.tp if strategy.sequence_parallel else 1)
        return EvaluationRows(texts, min(self.seq_length, -(-texts.longest // multiple) * multiple))

    @override
    def run(self, module: LightningModule, *, whole_epochs: bool = False) -> Run:
        self._objective = getattr(module, "train_step", None)
        return super().run(module, whole_epochs=whole_epochs)

    def _check_objective(self) -> None:
        is_asked = self._trainer().state.fn in (TrainerFn.TESTING, TrainerFn.VALIDATING)
        if self._options.task == "last_word" and is_asked and type(self._objective) is GPTTrainStep:
            raise ConfigError(
                "task=last_word asks how many last words are right, which train_step='gpt' does not count; set "
                "train_step='last_word' of the model"
            )

    def _texts(self) -> EvaluationTexts:
        if self._read is None:
            self._read = read_evaluation_texts(self._options)
        return self._read
