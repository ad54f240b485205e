"""The command ``generate``: its prompts, the run, and the texts as they come.

Whatever takes long to import is imported when the command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_megatron.errors import CheckpointError, ConfigError, require_number
from lightning_megatron.generate.options import GenerationOptions

if TYPE_CHECKING:
    import torch

    from lightning_megatron.convert.shards import Source

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers give for bytes that are no whole character (yet)."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of the command besides those of ``GenerationOptions``."""

    load_path: Path = field(metadata={"flag": "--checkpoint"})
    """What to read, or org/name."""
    prompt: Sequence[str] | None = None
    """Texts to continue."""
    prompt_file: Path | None = None
    """Text file with a prompt on each line; - for standard input."""
    tokenizer: Path | None = None
    """A transformers tokenizer (default: that of the checkpoint)."""
    config: Path | None = None
    """A Hugging Face config.json for checkpoints that do not say what their model is."""
    iteration: int | None = None
    """Which of a folder of iterations (default: the last one saved)."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to compute."""
    precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] | None = None
    """32-true computes in float32, the others in 16 bits (default: as the weights on GPUs, else 32-true)."""
    batch_size: int = 32
    """Prompts that are continued together."""
    json: bool = False
    """Write a line {"prompt": ..., "text": ...} for each text."""
    stream: bool | None = None
    """Show a text while it grows (default: a single one on a terminal)."""
    add_bos: bool = False
    """Put the tokenizer's first token before each prompt."""
    early_stopping: Literal["true", "false", "never"] = "false"
    """End beams when enough texts are complete, when no better one is likely, or when none is possible."""


def generate(options: GenerateOptions, how: GenerationOptions) -> None:
    """Continue prompts with the model of any checkpoint.

    Runs in one process or in tp x pp, each of which reads its own part. Reads what convert reads: Hugging Face model
    directories, *.ckpt of MegatronStrategy, Megatron-Core's distributed checkpoints and Megatron-LM's, or a model on
    the Hugging Face hub by its name (org/name). Greedy unless a sampling option is given. A GPT continues the prompt;
    a T5's encoder reads it, and its decoder writes the text.

    Example:
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --max-new-tokens 40
        lightning-megatron generate --checkpoint last.ckpt --tokenizer gpt2 --tp 2 --prompt "Once" "Twice" --top-p 0.8
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --num-beams 20 --length-penalty 1.5
        lightning-megatron generate --checkpoint gpt2 --prompt-file prompts.txt --json > texts.jsonl

    Raises:
        ConfigError: If an argument is wrong, the tokenizer is that of another model, or a prompt cannot be continued.
        CheckpointError: If the checkpoint cannot be read.
    """
    early_stopping: Any = {"true": True, "false": False}.get(options.early_stopping, "never")
    how = replace(how, early_stopping=early_stopping)
    prompts = read_prompts(options.prompt, options.prompt_file, options.tp * options.pp)
    can_stream = len(prompts) == how.num_beams == how.num_return_sequences == 1 and not options.json
    if options.stream and not can_stream:
        raise ConfigError("--stream shows one text of one prompt, without beams and --json; leave it out, or these")
    require_number("batch_size", options.batch_size, at_least=1)

    from lightning_megatron.convert.contents import open_source
    from lightning_megatron.generate.inputs import build_request, encode_prompts

    stored = open_source(options.load_path, options.config, options.iteration)
    if stored.model.architecture not in ("gpt", "t5"):
        raise ConfigError(f"{stored.path} is a {stored.model.family}, generate needs a GPT or T5")
    is_answer = stored.model.architecture == "t5"
    if is_answer and options.add_bos:
        raise ConfigError("--add-bos is for texts that are continued, and a T5 starts its own; leave it out")
    tokenizer = _tokenizer(options.tokenizer, stored)
    how = _with_ends(how, stored, tokenizer)
    input_ids, mask = encode_prompts(prompts, tokenizer, add_bos=options.add_bos)
    build_request({"input_ids": input_ids, "attention_mask": mask}, vars(how), stored.model)
    show = TextWriter(prompts, tokenizer, how, as_json=options.json, is_answer=is_answer)
    streams = can_stream and (sys.stdout.isatty() if options.stream is None else options.stream)
    rows = [{"input_ids": ids, "attention_mask": each} for ids, each in zip(input_ids, mask, strict=True)]
    _predict(options, stored, how, rows, show, streams=streams)


def _predict(
    options: GenerateOptions,
    stored: Source,
    how: GenerationOptions,
    rows: list[dict[str, torch.Tensor]],
    show: TextWriter,
    *,
    streams: bool,
) -> None:
    """Continue rows of tokens with the weights of any checkpoint; rank 0 shows the texts as they come."""
    import logging

    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_megatron.cli.doctor import check_accelerator
    from lightning_megatron.convert.shards import WeightLoader
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.strategy import MegatronStrategy

    class WritingModule(MegatronModule):
        def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
            loading = WeightLoader(chunks, stored)
            if loading.missing:
                names = ", ".join(map(str, sorted(loading.missing)))
                raise CheckpointError(f"{stored.path} has no {names}, and the model needs them; use a whole one")
            loading.fill()

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            if streams:
                add = partial(show.add, batch) if self.trainer.is_global_zero else None
                written: Any = self.generate(**batch, on_tokens=add, **vars(how))
            else:
                written = super().predict_step(batch, batch_idx, dataloader_idx)
            if self.trainer.is_global_zero:
                show.end(batch, written)

    check_accelerator(options.accelerator)
    module = WritingModule(model=stored.hf_config, generation=how)
    module.model_config = stored.model  # its config describes no variant
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=options.tp * options.pp,
        strategy=MegatronStrategy(tp=options.tp, pp=options.pp),
        precision=options.precision or _own_precision(stored, options.accelerator),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(rows, batch_size=options.batch_size)  # type: ignore[arg-type]
    trainer.predict(module, loader, return_predictions=False)


def _own_precision(stored: Source, accelerator: str) -> Any:
    """What computes with weights as they are stored; a CPU computes in float32, in which most are faster."""
    import torch

    on_gpu = {torch.bfloat16: "bf16-true", torch.float16: "16-mixed"} if torch.cuda.is_available() else {}
    return "32-true" if accelerator == "cpu" else on_gpu.get(stored.dtype, "32-true")


def _tokenizer(folder: Path | None, stored: Source) -> Any:
    from lightning_megatron.convert.hugging_face import tokenizer_files
    from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
    from lightning_megatron.hub import local_folder

    asked = folder or stored.path
    folder = stored.companions if folder is None else local_folder(folder, "tokenizer")
    if folder is None or not folder.is_dir() or not tokenizer_files(folder):
        raise ConfigError(f"{asked} comes with no tokenizer; give --tokenizer DIR of one")
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder, stored.model.vocab_size)
    return tokenizer


def _with_ends(how: GenerationOptions, stored: Source, tokenizer: Any) -> GenerationOptions:
    """The options with the tokens that end a text: the generation config's, the model's, else the tokenizer's."""
    from lightning_megatron.convert.hugging_face import generation_config
    from lightning_megatron.generate.inputs import special_tokens

    ends = special_tokens(stored.companions if generation_config(stored.companions) else stored.hf_config)
    eos = tuple(token for token in ends.eos if token < stored.model.vocab_size)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    pad = ends.pad if ends.pad is not None else tokenizer.pad_token_id
    return replace(how, eos_token_id=eos, pad_token_id=pad, tokenizer=tokenizer)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(texts: Sequence[str] | None, file: Path | None, num_processes: int) -> list[str]:
    """The texts, or the lines of the file; empty lines are no prompts.

    Args:
        texts: Of the command line.
        file: Instead of them; ``-`` for standard input, which one process can read.
        num_processes: How many will read the same.

    Raises:
        ConfigError: If there is none of the two, or both; the file cannot be read, is not UTF-8, or has no text.
    """
    if (texts is None) == (file is None):
        raise ConfigError(
            f"{'one' if file is None else 'only one'} of the arguments --prompt --prompt-file is required"
        )
    if file is None:
        return list(texts or [])
    is_input = file == Path("-")
    if is_input and num_processes > 1:
        raise ConfigError(f"--prompt-file -: expected one process, which can read it, got {num_processes}; give a file")
    try:
        # Some editors begin a file with a mark of its encoding.
        text = (Path("/dev/stdin") if is_input else file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        fix = "give a text file, or - for standard input"
        raise ConfigError(f"--prompt-file {file} cannot be read: {reason}; {fix}") from None
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {file} has no text; write a prompt on each line")
    return prompts


# ---- texts -----------------------------------------------------------------------------------------------------------


@dataclass
class TextWriter:
    """Writes the texts of each batch of prompts: for readers, behind their prompts, or for programs, as JSON lines.

    A single text may be written while it grows, never a part of a character, and nothing behind a stop text.
    """

    prompts: Sequence[str]
    """As the user wrote them."""
    tokenizer: Any
    """Of transformers."""
    how: GenerationOptions
    """With the stop texts, and how many texts there are of each prompt."""
    as_json: bool
    """A line for each text; else a blank line between two."""
    is_answer: bool
    """Whether they are an encoder-decoder's, which stand on a line of their own."""
    _new: list[int] = field(default_factory=list)
    _num_done: int = 0
    _num_shown: int = 0

    def add(self, batch: dict[str, torch.Tensor], tokens: torch.Tensor) -> None:
        """Write what the next token of the only text, [1], makes readable; it is -1 once the text is finished."""
        from lightning_megatron.generate.inputs import decode_completion

        self._new += [token for token in tokens.tolist() if token >= 0]
        given = [] if self.is_answer else batch["input_ids"][0].tolist()
        self._write(self._shown(decode_completion(self.tokenizer, given, self._new)).rstrip(_HALF_CHARACTER))

    def end(self, batch: dict[str, torch.Tensor], written: torch.Tensor) -> None:
        """Write the texts of the next prompts, or what is left of the one that grew."""
        from lightning_megatron.generate.inputs import decode_completions

        for text in decode_completions(self.tokenizer, written, **batch, is_t5=self.is_answer):
            self._write(self._shown(text) + "\n")
            self._num_done, self._num_shown = self._num_done + 1, 0

    def _shown(self, text: str) -> str:
        """A prompt and the text that follows it, up to the end of the first of the stop texts."""
        prompt = self.prompts[self._num_done // self.how.num_return_sequences]
        text = text[: min((text.index(each) + len(each) for each in self.how.stop_texts if each in text), default=None)]
        if self.as_json:
            is_narrow = not (sys.stdout.encoding or "utf").lower().startswith("utf")
            return json.dumps({"prompt": prompt, "text": text}, ensure_ascii=is_narrow)
        gap = "\n" if self._num_done else ""
        return f"{gap}{prompt}{self.is_answer * chr(10)}{text}"

    def _write(self, text: str) -> None:
        sys.stdout.write(text[self._num_shown :])
        sys.stdout.flush()
        self._num_shown = max(self._num_shown, len(text))
