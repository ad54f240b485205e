"""``SampleText``: texts that the model generates while it trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from lightning_megatron.callbacks.intervals import check_interval, is_due
from lightning_megatron.callbacks.log_dir import LogDirCallback
from lightning_megatron.callbacks.throughput import interrupt_clocks
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.generate.layout import prepend_token
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.request import build_request
from lightning_megatron.generate.text import decode_completions, encode_prompts
from lightning_megatron.storage.paths import open_to_append


@checks_options
class SampleText(LogDirCallback):
    """Generates completions of prompts every few steps, on all ranks together, without an effect on training.

    A T5's encoder reads the prompts, and its decoder generates the text.

    Loggers with ``add_text`` (TensorBoard) get each text under ``samples/0``, ``samples/1``, ... For other loggers
    the texts are JSON lines in the file ``samples.jsonl`` of their directory; without a logger they are printed. With a
    fixed ``seed`` differences between steps are due to the model, not to chance.
    """

    def __init__(
        self,
        tokenizer: str | Path | Any,
        prompts: Sequence[str],
        every_n_steps: int | None = None,
        generation: GenerationOptions | None = None,
    ) -> None:
        """Set the prompts and the options of generation.

        Args:
            tokenizer: Directory of a transformers tokenizer, its name on the Hugging Face hub, or the tokenizer itself.
            prompts: Texts to continue, as one batch.
            every_n_steps: Optimizer steps between samples; None takes the Trainer's ``log_every_n_steps``.
            generation: Generation options; None takes the module's ``generation``.

        Raises:
            ConfigError: If there is no prompt, ``tokenizer`` is not a tokenizer, or the interval is below 1.
        """
        check_interval(every_n_steps)
        if not isinstance(tokenizer, (str, Path)) and not hasattr(tokenizer, "get_vocab"):
            raise ConfigError(
                f"tokenizer={tokenizer!r}: expected a directory, a name or a tokenizer of transformers"
            )
        if not prompts or isinstance(prompts, str):
            raise ConfigError(
                f"prompts={prompts!r}: expected a list of texts to continue; give at least one"
            )
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.every_n_steps = every_n_steps
        self.generation = generation

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tokenize the prompts.

        Raises:
            ConfigError: If the module cannot continue the prompts.
            DataError: If there is no tokenizer.
        """
        if stage != "fit":
            return
        model = getattr(pl_module, "model_config", None)
        if model is None or model.architecture not in ("gpt", "t5"):
            raise ConfigError(
                f"SampleText: expected a GPT or T5, got {type(pl_module).__name__}; remove the callback"
            )
        self._tokenizer = self.tokenizer
        if isinstance(self.tokenizer, (str, Path)):
            self._tokenizer = load_tokenizer(self.tokenizer)
        check_vocabulary(
            self._tokenizer,
            getattr(self.tokenizer, "name_or_path", self.tokenizer),
            model.vocab_size,
        )
        self._is_t5 = model.architecture == "t5"
        module_options: Any = pl_module.generation
        self._options: GenerationOptions = self.generation or module_options
        ids, mask = encode_prompts(self.prompts, self._tokenizer)
        if self._options.bos_token_id is not None:
            # Here, so that the columns match those of generate's output.
            ids, mask = prepend_token(ids, mask, self._options.bos_token_id)
        self._rows = {"input_ids": ids, "attention_mask": mask}
        build_request(self._rows, vars(self._options), model)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Continue the prompts if a sample is due."""
        if not is_due(trainer, self.every_n_steps):
            return
        generate: Any = pl_module.generate
        sequences = generate(**self._rows, **vars(self._options))
        interrupt_clocks(trainer)
        if trainer.is_global_zero:
            texts = decode_completions(
                self._tokenizer,
                sequences,
                **self._rows,
                is_t5=self._is_t5,
            )
            per_prompt = self._options.num_return_sequences
            prompts = [self.prompts[index // per_prompt] for index in range(len(texts))]
            self._write(trainer, list(zip(prompts, texts, strict=True)))

    def _write(
        self,
        trainer: Trainer,
        texts: list[tuple[str, str]],
    ) -> None:
        without_add_text: list[Logger] = []
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is None:
                without_add_text.append(logger)
                continue
            for index, (prompt, completion) in enumerate(texts):
                text = f"prompt\n\n{_verbatim(prompt)}\n\ncontinued\n\n{_verbatim(completion)}\n"
                add_text(f"samples/{index}", text, trainer.global_step)
        assert self._log_dir is not None
        for folder in {Path(logger.log_dir or self._log_dir) for logger in without_add_text}:
            folder.mkdir(parents=True, exist_ok=True)
            with open_to_append(folder / "samples.jsonl") as file:
                for prompt, completion in texts:
                    row = {"step": trainer.global_step, "prompt": prompt, "text": completion}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not trainer.loggers:
            for prompt, completion in texts:
                print(f"step {trainer.global_step}: {prompt!r} -> {completion!r}", flush=True)


def _verbatim(text: str) -> str:
    """An indented code block of Markdown."""
    return "    " + text.replace("\n", "\n    ")
