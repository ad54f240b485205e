"""The command ``generate``: its options, the prompts, the run, and the texts as they come.

Whatever takes long to import is imported when the command runs.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lightning_megatron.cli.errors import UsageError
from lightning_megatron.errors import CheckpointError, ConfigError, require_number
from lightning_megatron.generate.options import GenerationOptions

if TYPE_CHECKING:
    import torch

    from lightning_megatron.convert.shards import Source

_STDIN = Path("-")
_COPY_OF_STDIN = "LIGHTNING_MEGATRON_PROMPTS"
"""Environment variable: the file in which the first process has left its input to those that it starts."""
_BOLD, _PLAIN = "\033[1m", "\033[0m"
_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers give for bytes that are no whole character (yet)."""
_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}
_PRECISIONS = {"torch.bfloat16": "bf16-true", "torch.float16": "16-mixed"}
"""Of the Trainer, for weights that are not in float32."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Options of the command; those that ``GenerationOptions`` has, too, go there."""

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
    static_cache: bool | None = None
    """Steps of one shape, which a GPU replays as a CUDA graph; GPTs only (default: on GPUs)."""
    json: bool = False
    """Write a line {"prompt": ..., "text": ...} for each text."""
    stream: bool | None = None
    """Show a text while it grows (default: a single one on a terminal)."""
    max_new_tokens: int | None = None
    """At most so many (default: 20)."""
    min_new_tokens: int = 0
    """No end before."""
    stop_strings: Sequence[str] = field(default=(), metadata={"flag": "--stop"})
    """Texts behind which a text ends."""
    add_bos: bool = False
    """Put the tokenizer's first token before each prompt."""
    do_sample: bool | None = field(default=None, metadata={"flag": "--sample"})
    """Draw tokens at random; temperature, top-k, top-p and min-p do so, too."""
    temperature: float = 1.0
    """Divides logits; in (0, 100]."""
    top_k: int = 0
    """Draw from the N likeliest tokens."""
    top_p: float = 0.0
    """Draw from the likeliest tokens with this probability."""
    top_p_decay: float = 0.0
    """Multiplies top-p after each token."""
    top_p_bound: float = 0.0
    """Top-p decays no further."""
    min_p: float = 0.0
    """Draw from tokens so many times as likely as the likeliest one."""
    repetition_penalty: float = 1.0
    """Above 1 repetition is rarer."""
    no_repeat_ngram_size: int = 0
    """No run of N tokens comes twice."""
    seed: int = 0
    """Another seed draws another text."""
    num_beams: int = 1
    """Search with N beams; 1 for none."""
    length_penalty: float = 1.0
    """Above 0 favours longer texts."""
    early_stopping: Literal["true", "false", "never"] = "false"
    """End when enough texts are complete, when no better one is likely, or when none is possible."""
    num_return_sequences: int = 1
    """Texts of each prompt."""

    def generation(self) -> GenerationOptions:
        """What says how tokens are chosen; stop strings wait for the tokenizer."""
        names = {each.name for each in fields(self)} - {"tokenizer", "stop_strings", "early_stopping"}
        shared = {each.name: getattr(self, each.name) for each in fields(GenerationOptions) if each.name in names}
        return GenerationOptions(early_stopping=_EARLY_STOPPING[self.early_stopping], **shared)


def generate(options: GenerateOptions) -> None:
    """Continue prompts with the model of any checkpoint.

    On one process or on tp x pp of them. Read is what convert reads: Hugging Face model directories, *.ckpt of
    MegatronStrategy, Megatron-Core's distributed checkpoints and Megatron-LM's, or models of the Hugging Face hub by
    name (org/name); each process reads its own part. Greedy unless an option says how to draw. GPTs continue the
    prompts; the encoder of a T5 reads them, and the text is its decoder's.

    Example:
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --max-new-tokens 40
        lightning-megatron generate --checkpoint last.ckpt --tokenizer gpt2 --tp 2 --prompt "Once" "Twice" --top-p 0.8
        lightning-megatron generate --checkpoint gpt2 --prompt "Are you human?" --num-beams 20 --length-penalty 1.5
        lightning-megatron generate --checkpoint gpt2 --prompt-file prompts.txt --json > texts.jsonl

    Raises:
        ConfigError: If an argument is wrong, the tokenizer is that of another model, or a prompt cannot be continued.
        CheckpointError: If the checkpoint cannot be read.
    """
    how = options.generation()
    prompts = read_prompts(options.prompt, options.prompt_file, options.tp * options.pp)
    streams = _streams(options, len(prompts))
    require_number("batch_size", options.batch_size, at_least=1)
    stored = _opened(options)
    tokenizer = _tokenizer(options.tokenizer, stored)
    how = _with_ends(how, options.stop_strings, stored, tokenizer)

    from lightning_megatron.generate.inputs import Inputs, check_prompts
    from lightning_megatron.generate.texts import encoded

    input_ids, mask = encoded(prompts, tokenizer, add_bos=options.add_bos)
    check_prompts(Inputs(input_ids=input_ids, attention_mask=mask), stored.model, how)
    is_answer = stored.model.architecture == "t5"
    show_what_can_be_shown()
    show: TextStream | TextPrinter
    if streams:
        prompt, given = (f"{prompts[0]}\n", []) if is_answer else (prompts[0], input_ids[0].tolist())
        show = TextStream(tokenizer, prompt, given, options.stop_strings)
    else:
        show = TextPrinter(tokenizer, options.stop_strings, as_json=options.json, is_answer=is_answer)
    _predict(options, stored, how, list(zip(prompts, input_ids, mask, strict=True)), show)


def _predict(
    options: GenerateOptions,
    stored: Source,
    how: GenerationOptions,
    rows: list[tuple[str, torch.Tensor, torch.Tensor]],
    show: TextStream | TextPrinter,
) -> None:
    """Continue rows (text, tokens, mask) with the weights of any checkpoint; rank 0 shows the texts as they come."""
    import logging

    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_megatron.convert.shards import Loading
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.strategy import MegatronStrategy

    class WritingModule(MegatronModule):
        def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
            loading = Loading(chunks, stored)
            if loading.missing:
                names = ", ".join(map(str, sorted(loading.missing)))
                raise CheckpointError(f"{stored.path} has no {names}, and the model needs them; use a whole one")
            loading.fill()

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor | None:
            is_first = self.trainer.is_global_zero
            if isinstance(show, TextStream):
                if is_first:
                    show.begin()
                return self.generate(**batch, on_tokens=show.add if is_first else None, **vars(how))
            written = super().predict_step(batch, batch_idx, dataloader_idx)
            if is_first and written is not None:
                first = batch_idx * options.batch_size
                show.add(rows[first : first + options.batch_size], written)
            return written

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
    batches: Any = [{"input_ids": tokens, "attention_mask": mask} for _, tokens, mask in rows]
    trainer.predict(module, DataLoader(batches, batch_size=options.batch_size), return_predictions=False)
    if trainer.is_global_zero:
        show.end()


def _own_precision(stored: Source, accelerator: str) -> Any:
    """What computes with weights as they are stored; a CPU computes in float32, in which most are faster."""
    import torch

    if accelerator == "cpu" or not torch.cuda.is_available():
        return "32-true"
    return _PRECISIONS.get(str(stored.dtype), "32-true")


def _opened(options: GenerateOptions) -> Source:
    from lightning_megatron.convert.convert import open_source
    from lightning_megatron.hub import local_folder

    config = None if options.config is None else local_folder(options.config, "config")
    stored = open_source(local_folder(options.load_path, "model"), config, options.iteration)
    if stored.model.architecture not in ("gpt", "t5"):
        raise ConfigError(
            f"{stored.path} is a {stored.model.family}, and generate needs a GPT or T5, which write texts"
        )
    if stored.model.architecture == "t5" and options.add_bos:
        raise ConfigError("--add-bos is for texts that are continued, and a T5 starts its own; leave it out")
    return stored


def _tokenizer(folder: Path | None, stored: Source) -> Any:
    from lightning_megatron.convert.hugging_face_files import tokenizer_files
    from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
    from lightning_megatron.hub import local_folder

    asked = folder or stored.path
    folder = stored.companions if folder is None else local_folder(folder, "tokenizer")
    if folder is None or not folder.is_dir() or not tokenizer_files(folder):
        raise ConfigError(f"{asked} comes with no tokenizer; give --tokenizer DIR of one")
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder, stored.model.vocab_size)
    return tokenizer


def _with_ends(how: GenerationOptions, stop: Sequence[str], stored: Source, tokenizer: Any) -> GenerationOptions:
    """The options with the tokens that end a text: the generation config's, the model's, else the tokenizer's."""
    from lightning_megatron.convert.hugging_face_files import GENERATION_CONFIG_FILE
    from lightning_megatron.generate.texts import end_tokens

    folder = stored.companions
    has_file = folder is not None and (folder / GENERATION_CONFIG_FILE).is_file()
    ends = end_tokens(folder if has_file else stored.hf_config)
    eos = tuple(token for token in ends.eos if token < stored.model.vocab_size)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    pad = ends.pad if ends.pad is not None else tokenizer.pad_token_id
    return replace(how, eos_token_id=eos, pad_token_id=pad, stop_strings=tuple(stop), tokenizer=tokenizer)


def _streams(options: GenerateOptions, num_prompts: int) -> bool:
    """Whether the text is shown while it grows.

    Raises:
        ConfigError: If it was asked to be, and cannot.
    """
    can = num_prompts == options.num_beams == options.num_return_sequences == 1 and not options.json
    if options.stream and not can:
        raise ConfigError("--stream shows one text of one prompt, without beams and --json; leave it out, or these")
    return can and (sys.stdout.isatty() if options.stream is None else options.stream)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(texts: Sequence[str] | None, file: Path | None, num_processes: int) -> list[str]:
    """The texts, or the lines of the file; empty lines are no prompts.

    Args:
        texts: Of the command line.
        file: Instead of them; ``-`` for standard input.
        num_processes: How many will read the same.

    Raises:
        ConfigError: If there is none of the two, or both; the file cannot be read, has no text, or a text is not UTF-8.
    """
    if (texts is None) == (file is None):
        raise UsageError(f"{'one' if file is None else 'only one'} of the arguments --prompt --prompt-file is required")
    if file is None:
        for text in texts or []:
            if text.encode(errors="replace").decode() != text:  # bytes that Python has kept as halves of characters
                raise ConfigError(f"--prompt {text!r} is not UTF-8; write it so")
        return list(texts or [])
    try:
        content = _standard_input(num_processes) if file == _STDIN else file.read_bytes()
        text = content.decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except OSError as error:
        reason = f"{error.strerror}; give a text file, or - for standard input"
        raise ConfigError(f"--prompt-file {file} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt-file {file} cannot be read: it is not UTF-8; give a text file") from None
    prompts = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {file} has no text; write a prompt on each line")
    return prompts


def _standard_input(num_processes: int) -> bytes:
    """All of it. It can be read once: whoever starts other processes leaves it to them in a file.

    Raises:
        ConfigError: If another program has started them.
    """
    if _COPY_OF_STDIN in os.environ:
        return Path(os.environ[_COPY_OF_STDIN]).read_bytes()
    if num_processes > 1 and "LOCAL_RANK" in os.environ:
        raise ConfigError(
            f"--prompt-file - is read by one process, and {num_processes} were started already; give a file"
        )
    content = sys.stdin.buffer.read()
    if num_processes > 1:
        descriptor, name = tempfile.mkstemp(prefix="prompts-")
        atexit.register(Path(name).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as copy:
            copy.write(content)
        os.environ[_COPY_OF_STDIN] = name
    return content


# ---- texts -----------------------------------------------------------------------------------------------------------


class TextPrinter:
    """Writes the texts of each batch of prompts: for readers, behind their prompts, or for programs, as JSON lines."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], *, as_json: bool, is_answer: bool) -> None:
        """Set how tokens become texts.

        Args:
            tokenizer: Of transformers.
            stop: Texts that end a text.
            as_json: A line for each text; else a blank line between two.
            is_answer: Whether they are an encoder-decoder's, which stand on a line of their own.
        """
        self._tokenizer, self._stop, self._as_json, self._is_answer = tokenizer, stop, as_json, is_answer
        self._is_first = True

    def add(self, rows: Sequence[tuple[str, torch.Tensor, torch.Tensor]], written: torch.Tensor) -> None:
        """Print what was written, as many texts for each of the rows (prompt, tokens, mask)."""
        from lightning_megatron.generate.texts import decoder_texts, new_texts

        for (prompt, tokens, mask), own in zip(rows, written.chunk(len(rows)), strict=True):
            if self._is_answer:
                texts = decoder_texts(self._tokenizer, own)
            else:
                texts = new_texts(self._tokenizer, own, tokens[None], mask[None])
            self.show((prompt, cut(text, self._stop)) for text in texts)

    def show(self, texts: Iterable[tuple[str, str]]) -> None:
        """Write some more prompts and texts that follow them."""
        for prompt, text in texts:
            if self._as_json:
                line = json.dumps({"prompt": prompt, "text": text}, ensure_ascii=not _shows_everything(sys.stdout))
                sys.stdout.write(line + "\n")
                continue
            begin, between = "" if self._is_first else "\n\n", "\n" if self._is_answer else ""
            sys.stdout.write(begin + _marked(prompt, sys.stdout) + between + text)
            self._is_first = False
        sys.stdout.flush()

    def end(self) -> None:
        """There are no more."""
        if not self._is_first:
            sys.stdout.write("\n")


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the end of the first of the stop texts."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text


class TextStream:
    """Writes one text while it grows, never a part of a character, and nothing behind a stop text."""

    def __init__(self, tokenizer: Any, prompt: str, tokens: Sequence[int], stop: Sequence[str]) -> None:
        """Set what the text follows.

        Args:
            tokenizer: Of transformers.
            prompt: As the user wrote it.
            tokens: Those of the prompt.
            stop: Texts that end it.
        """
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._given = list(tokens)
        self._stop = stop
        self._new: list[int] = []
        self._shown = 0

    def begin(self) -> None:
        """Write the prompt."""
        self._write(_marked(self._prompt, sys.stdout))

    def add(self, tokens: torch.Tensor) -> None:
        """Write what the next token makes readable.

        Args:
            tokens: [1]; -1 once the text is finished.
        """
        token = int(tokens[0])
        if token >= 0:
            self._new.append(token)
            self._show(is_whole=False)

    def end(self) -> None:
        """Write what is left, and end the line."""
        self._show(is_whole=True)
        self._write("\n")

    def _show(self, *, is_whole: bool) -> None:
        from lightning_megatron.generate.texts import continuation

        text = cut(continuation(self._tokenizer, self._given, self._new), self._stop)
        ready = text if is_whole else text.rstrip(_HALF_CHARACTER)
        if len(ready) > self._shown:
            self._write(ready[self._shown :])
            self._shown = len(ready)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def show_what_can_be_shown() -> None:
    """Have standard output write ? for what its encoding lacks, instead of failing there."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not _shows_everything(sys.stdout):
        sys.stdout.reconfigure(errors="replace")


def _shows_everything(out: TextIO) -> bool:
    """Whether every character can be written; what is no file takes any."""
    return not out.encoding or out.encoding.lower().startswith("utf")


def _marked(prompt: str, out: TextIO) -> str:
    """The prompt; bold on a terminal, so that one sees where the model goes on."""
    is_plain = not out.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return prompt if is_plain else f"{_BOLD}{prompt}{_PLAIN}"
