"""The command ``generate``: read prompts, generate with any checkpoint, and write or stream the completions.

Slow imports are inside the functions.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_megatron.cli.doctor import check_accelerator
from lightning_megatron.cli.stored_model import (
    fill_from,
    tokenizer_for,
    trainer_for,
    with_special_tokens,
)
from lightning_megatron.data.encoding import Decoder, TextEncoding, UndecodableError
from lightning_megatron.errors import MOST_PROCESSES, ConfigError, require_number
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.storage.hub import first_line

if TYPE_CHECKING:
    import torch

    from lightning_megatron.convert.source import ModelSource

_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Decoded from bytes that are not (yet) a complete character."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of the command in addition to ``GenerationOptions``."""

    load_path: Path = field(metadata={"flag": "--checkpoint"})
    """Checkpoint to read, or the name of a model on the Hugging Face hub, org/name."""
    prompt: Sequence[str] | None = None
    """Prompts to complete."""
    prompt_file: Path | None = None
    """Text file with one prompt per line; - for standard input."""
    tokenizer: Path | None = None
    """A transformers tokenizer (default: that of the checkpoint)."""
    config: Path | None = None
    """A Hugging Face config.json, for checkpoints without a model config."""
    iteration: int | None = None
    """Iteration to read from a directory of several (default: the last one saved)."""
    ema: bool = False
    """Take the average that the callback EMA kept, instead of the weights with which training goes on."""
    base: Path | None = None
    """Base model of adapters, or its name on the hub (default: the one that they name, if it is on this host)."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on."""
    precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] | None = None
    """32-true computes in float32, the others in 16 bits (default: dtype of the weights on GPUs, else 32-true)."""
    batch_size: int = 32
    """Prompts per batch."""
    json: bool = False
    """Write a line {"prompt": ..., "text": ...} for each completion."""
    stream: bool | None = None
    """Print tokens as they are generated (default: for a single completion on a terminal)."""
    add_bos: bool = False
    """Prepend the tokenizer's beginning-of-sequence token to each prompt."""
    early_stopping: Literal["true", "false", "never"] = "false"
    """Stop beams when enough sequences are finished (true), a better one is unlikely (false), or impossible (never)."""


def generate(options: GenerateOptions, generation: GenerationOptions) -> None:
    """Complete prompts with the model of any checkpoint.

    Runs in one process or in tp x pp, each of which reads its own shard. Reads what convert reads: Hugging Face model
    directories, *.ckpt of MegatronStrategy, Megatron-Core's distributed checkpoints and Megatron-LM's, or a model on
    the Hugging Face hub by its name (org/name). Greedy unless a sampling option is given. A GPT continues the prompt;
    a T5's encoder reads it, and its decoder writes the completion.

    Example:
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --max-new-tokens 40
        lightning-megatron generate --checkpoint last.ckpt --tokenizer gpt2 --tp 2 --prompt "Once" "Twice" --top-p 0.8
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --num-beams 20 --length-penalty 1.5
        lightning-megatron generate --checkpoint gpt2 --prompt-file prompts.txt --json > texts.jsonl

    Raises:
        ConfigError: If an argument is wrong, the tokenizer does not match the model, or a prompt cannot be completed.
        CheckpointError: If the checkpoint cannot be read.
    """
    early_stopping: Any = {"true": True, "false": False}.get(options.early_stopping, "never")
    generation = replace(generation, early_stopping=early_stopping)
    prompts = read_prompts(options.prompt, options.prompt_file, options.tp * options.pp)
    num_sequences = len(prompts) * generation.num_beams * generation.num_return_sequences
    can_stream = num_sequences == 1 and not options.json
    if options.stream and not can_stream:
        raise ConfigError(
            "--stream: expected one prompt and completion, without beams or --json; leave it out"
        )
    require_number("batch_size", options.batch_size, at_least=1)
    require_number("tp", options.tp, at_least=1, at_most=MOST_PROCESSES)
    require_number("pp", options.pp, at_least=1, at_most=MOST_PROCESSES // options.tp)

    from lightning_megatron.convert.formats import open_source
    from lightning_megatron.generate.request import build_request
    from lightning_megatron.generate.text import encode_prompts

    stored = open_source(
        options.load_path,
        options.config,
        options.iteration,
        options.base,
        ema=options.ema,
    )
    if stored.model.architecture not in ("gpt", "t5"):
        raise ConfigError(f"{stored.path} is a {stored.model.family}, generate needs a GPT or T5")
    if not stored.model.has_output_layer:
        raise ConfigError(
            f"{stored.path} has a head for task={stored.model.task!r}, generate needs a language model; get its logits "
            "with Trainer.predict and return_logits=True"
        )
    is_t5 = stored.model.architecture == "t5"
    if is_t5 and options.add_bos:
        raise ConfigError(
            "--add-bos: expected a GPT, which continues its prompt, got a T5; leave it out"
        )
    tokenizer = tokenizer_for(stored, options.tokenizer)
    generation = with_special_tokens(generation, stored, tokenizer)
    input_ids, mask = encode_prompts(prompts, tokenizer, add_bos=options.add_bos)
    batch = {"input_ids": input_ids, "attention_mask": mask}
    build_request(batch, vars(generation), stored.model)
    writer = TextWriter(prompts, tokenizer, generation, as_json=options.json, is_t5=is_t5)
    streams = options.stream
    if streams is None:
        streams = can_stream and sys.stdout.isatty()
    rows = [
        {"input_ids": row, "attention_mask": row_mask}
        for row, row_mask in zip(input_ids, mask, strict=True)
    ]
    with _lack_of_memory_as_error():
        _predict(options, stored, generation, rows, writer, streams=streams)


@contextlib.contextmanager
def _lack_of_memory_as_error() -> Iterator[None]:
    """Raise a ``ConfigError`` that names the options to lower if memory cannot be allocated."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = first_line(error)
        if not isinstance(error, MemoryError) and "allocate" not in reason:
            raise
        fix = "lower --batch-size, --num-beams, --num-return-sequences or --max-new-tokens"
        raise ConfigError(
            f"memory: expected room for all sequences, got too little ({reason}); {fix}"
        ) from error


def _predict(
    options: GenerateOptions,
    stored: ModelSource,
    generation: GenerationOptions,
    rows: list[dict[str, torch.Tensor]],
    writer: TextWriter,
    *,
    streams: bool,
) -> None:
    """Complete tokenized prompts with the weights of any checkpoint; rank 0 writes the completions."""
    from torch.utils.data import DataLoader

    from lightning_megatron.module import MegatronModule
    from lightning_megatron.strategy import MegatronStrategy

    class WritingModule(MegatronModule):
        def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
            fill_from(stored, chunks)

        def predict_step(
            self,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int = 0,
        ) -> None:
            writes = self.trainer.is_global_zero
            sequences: Any
            if streams:
                on_tokens = partial(writer.add, batch) if writes else None
                sequences = self.generate(**batch, on_tokens=on_tokens, **vars(generation))
            else:
                sequences = super().predict_step(batch, batch_idx, dataloader_idx)
            if writes:
                writer.end(batch, sequences)

    check_accelerator(options.accelerator)
    module = WritingModule(model=stored.hf_config, generation=generation)
    # It may be a variant that a Hugging Face config cannot describe.
    module.model_config = stored.model
    trainer = trainer_for(
        stored,
        MegatronStrategy(tp=options.tp, pp=options.pp),
        accelerator=options.accelerator,
        devices=options.tp * options.pp,
        precision=options.precision,
    )
    loader: Any = DataLoader(rows, batch_size=options.batch_size)  # type: ignore[arg-type]
    trainer.predict(module, loader, return_predictions=False)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(
    texts: Sequence[str] | None,
    file: Path | None,
    num_processes: int,
) -> list[str]:
    """Prompts of the command line, or the non-empty lines of a file.

    Args:
        texts: Prompts of the command line.
        file: Text file to read instead; ``-`` for standard input, which only one process can read.
        num_processes: Number of processes that read the prompts.

    Raises:
        ConfigError: If neither or both are given, or the file cannot be read, is not UTF-8, or has no text.
    """
    if file is None:
        if texts is None:
            raise ConfigError("one of the arguments --prompt --prompt-file is required")
        return list(texts)
    if texts is not None:
        raise ConfigError("only one of the arguments --prompt --prompt-file is required")
    source = file
    if file == Path("-"):
        if num_processes > 1:
            raise ConfigError(
                f"--prompt-file -: expected one process, which can read it, got {num_processes}; give a file"
            )
        source = Path("/dev/stdin")
    try:
        content = source.read_bytes()
        # Some editors write a byte order mark, which the decoder drops.
        text = Decoder(TextEncoding(), fix="save it as UTF-8").decode(content)
    except OSError as error:
        fix = "give a text file, or - for standard input"
        raise ConfigError(f"--prompt-file {file} cannot be read: {error.strerror}; {fix}") from None
    except UndecodableError as error:
        raise ConfigError(f"--prompt-file {file} {error}") from None
    prompts = [line for line in re.split("\r\n|\r|\n", text) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {file} has no text; write one prompt per line")
    return prompts


# ---- output ----------------------------------------------------------------------------------------------------------


@dataclass
class TextWriter:
    """Writes completions after their prompts, or as JSON lines.

    A single completion can be streamed, by complete characters, and only up to the first stop string.
    """

    prompts: Sequence[str]
    """Prompts as typed by the user."""
    tokenizer: Any
    """Tokenizer of transformers."""
    generation: GenerationOptions
    """For the stop strings, and the number of completions per prompt."""
    as_json: bool
    """Write one JSON line per completion, instead of text separated by blank lines."""
    is_t5: bool
    """Whether the model is a T5, whose completion starts on its own line."""
    _new: list[int] = field(default_factory=list)
    _num_done: int = 0
    _num_shown: int = 0

    def add(
        self,
        batch: dict[str, torch.Tensor],
        tokens: torch.Tensor,
    ) -> None:
        """Stream one more token of a single completion: [1], -1 once it is finished."""
        from lightning_megatron.generate.text import decode_completion

        self._new += [token for token in tokens.tolist() if token >= 0]
        prompt = [] if self.is_t5 else batch["input_ids"][0].tolist()
        completion = decode_completion(self.tokenizer, prompt, self._new)
        self._write(self._format(completion).rstrip(_REPLACEMENT_CHARACTER))

    def end(
        self,
        batch: dict[str, torch.Tensor],
        sequences: torch.Tensor,
    ) -> None:
        """Write the completions of a batch, or the rest of the streamed one."""
        from lightning_megatron.generate.text import decode_completions

        for text in decode_completions(self.tokenizer, sequences, **batch, is_t5=self.is_t5):
            self._write(self._format(text) + "\n")
            self._num_done += 1
            self._num_shown = 0

    def _format(self, text: str) -> str:
        """Format a completion with its prompt, up to and including the first stop string."""
        prompt = self.prompts[self._num_done // self.generation.num_return_sequences]
        stops = self.generation.stop_texts
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        text = text[: min(ends, default=None)]
        if self.as_json:
            encoding = sys.stdout.encoding or "utf"
            escapes = not encoding.lower().startswith("utf")
            return json.dumps({"prompt": prompt, "text": text}, ensure_ascii=escapes)
        if self._num_done:
            prompt = f"\n{prompt}"
        if self.is_t5:
            prompt += "\n"
        return prompt + text

    def _write(self, text: str) -> None:
        sys.stdout.write(text[self._num_shown :])
        sys.stdout.flush()
        self._num_shown = max(self._num_shown, len(text))
