"""What does the model write by now? Prompts continued every few steps of training, kept where the run's log is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from typing_extensions import override

from lightning_megatron.callbacks.interval import check_interval, is_due
from lightning_megatron.callbacks.throughput import ThroughputMonitor
from lightning_megatron.data.corpus.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompt_checks import check_prompts
from lightning_megatron.generate.prompts import with_first_token
from lightning_megatron.generate.texts import decoder_texts, encoded, new_texts


class SampleText(Callback):
    """Continues prompts every few steps, on all ranks together; training goes on as if nothing had happened.

    A T5's encoder reads the prompts, and the text is its decoder's.

    Loggers that show texts (TensorBoard) get one under ``samples/0``, ``samples/1``, ... for each prompt. For others
    the texts are lines of JSON in the file ``samples.jsonl`` of their folder; without a logger they are printed. With a
    fixed ``seed`` differences between steps are the model's, not chance.
    """

    def __init__(
        self,
        tokenizer: str | Path | Any,
        prompts: Sequence[str],
        every_n_steps: int | None = None,
        generation: GenerationOptions | None = None,
    ) -> None:
        """Set what to continue and how.

        Args:
            tokenizer: Folder of a transformers tokenizer, its name on the Hugging Face hub, or the tokenizer itself.
            prompts: Texts to continue, as one batch.
            every_n_steps: Optimizer steps between samples; None takes the Trainer's ``log_every_n_steps``.
            generation: How tokens are chosen; None takes the module's ``generation``.

        Raises:
            ConfigError: If there is no prompt, the tokenizer is none, or the interval is below 1.
        """
        check_interval(every_n_steps)
        if not isinstance(tokenizer, (str, Path)) and not hasattr(tokenizer, "get_vocab"):
            raise ConfigError(
                f"tokenizer={tokenizer!r} is no folder and no tokenizer of transformers; give one of them"
            )
        if not prompts or isinstance(prompts, str):
            raise ConfigError(f"prompts={prompts!r} are no list of texts to continue; give at least one")
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.every_n_steps = every_n_steps
        self.generation = generation
        self._last_step = 0
        self._folder: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Turn the prompts into tokens.

        Raises:
            ConfigError: If the module cannot continue them.
            DataError: If there is no tokenizer.
        """
        if stage != "fit":
            return
        model = getattr(pl_module, "model_config", None)
        if model is None or model.architecture not in ("gpt", "t5"):
            raise ConfigError(
                f"SampleText shows texts of GPTs and T5s, and {type(pl_module).__name__} has none; remove it"
            )
        is_folder = isinstance(self.tokenizer, (str, Path))
        self._tokenizer = load_tokenizer(self.tokenizer) if is_folder else self.tokenizer
        folder = getattr(self.tokenizer, "name_or_path", self.tokenizer)
        check_vocabulary(self._tokenizer, folder, model.vocab_size)
        self._is_answer = model.architecture == "t5"
        own: Any = pl_module.generation
        self._options: GenerationOptions = self.generation or own
        rows: tuple[Tensor, Tensor | None] = encoded(self.prompts, self._tokenizer)
        if self._options.bos_token_id is not None:  # here, so that the columns are those of what generate returns
            rows = with_first_token(*rows, self._options.bos_token_id)
        check_prompts(*rows, model, self._options)
        self._rows = rows

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle on the folder: asking the Trainer is a broadcast, which every rank must join."""
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Continue the prompts if it is time."""
        if trainer.global_step == self._last_step or not is_due(trainer, self.every_n_steps):
            return
        self._last_step = trainer.global_step
        generate: Any = pl_module.generate
        written = generate(*self._rows, **vars(self._options))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
            if isinstance(callback, ThroughputMonitor):
                callback.interrupt()
        if trainer.is_global_zero:
            is_answer = self._is_answer
            texts = (
                decoder_texts(self._tokenizer, written)
                if is_answer
                else new_texts(self._tokenizer, written, *self._rows)
            )
            copies = self._options.num_return_sequences
            self._keep(trainer, [(self.prompts[index // copies], text) for index, text in enumerate(texts)])

    def _keep(self, trainer: Trainer, texts: list[tuple[str, str]]) -> None:
        without_texts: list[Logger] = []
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is None:
                without_texts.append(logger)
                continue
            for index, (prompt, new) in enumerate(texts):
                add_text(f"samples/{index}", _as_written(prompt, new), trainer.global_step)
        assert self._folder is not None
        for folder in {Path(logger.log_dir or self._folder) for logger in without_texts}:
            _append(folder, trainer.global_step, texts)
        if not trainer.loggers:
            for prompt, new in texts:
                print(f"step {trainer.global_step}: {prompt!r} -> {new!r}", flush=True)


def _append(folder: Path, step: int, texts: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        for prompt, new in texts:
            file.write(json.dumps({"step": step, "prompt": prompt, "text": new}, ensure_ascii=False) + "\n")


def _as_written(prompt: str, new: str) -> str:
    """Markdown that shows the texts letter by letter, whatever is in them: indented, so that it is code."""
    blocks = ("\n".join(f"    {line}" for line in text.split("\n")) for text in (prompt, new))
    return "prompt\n\n{}\n\ncontinued\n\n{}\n".format(*blocks)
