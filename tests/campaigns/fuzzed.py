"""Damaged and hostile files for every reader, through ``fit``, ``convert``, ``inspect`` and ``generate``.

Each attempt changes one file of a sound model, checkpoint, dataset or configuration and runs a command on it in a fork
of this process. It must end with code 0 or, for a file that is refused, with code 2 and one line; take no more than 5 s
of CPU time and 200 MB beyond the same command on the sound files; and run nothing that a file names.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.attempts import Attempt, Outcome
from tests.campaigns.mutations import ANY, BY_SUFFIX
from tests.rank_zygote import _die_with_parent

_MOST_MEGABYTES, _MOST_SECONDS = 200, 5.0
_MOST_OF_LARGER_MODELS = 1000
"""Megabytes, of a configuration that is damaged but sound: without ``n_embd`` a GPT-2 is as wide as transformers says,
768, and takes 290 to train."""
_PATIENCE = 60.0
"""Seconds on the clock; others may need the cores too."""
_MOST_CHARACTERS = 3000
"""That a refusal prints: warnings may stand before its one line."""

_SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 300}
_FIT_YAML = """\
trainer:
  accelerator: cpu
  devices: 1
  strategy: {class_path: MegatronStrategy, init_args: {num_microbatches: 1}}
  max_steps: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
model:
  class_path: MegatronModule
  init_args: {model: hf, lr: 0.001}
data:
  class_path: IndexedDataModule
  init_args: {data_path: corpus_text_document, split: "1", seq_length: 16, micro_batch_size: 2, index_cache: cache}
"""
_FIT = "fit --config fit.yaml"

COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fit, data": (_FIT, ("corpus_text_document.bin", "corpus_text_document.idx", "cache/*/*")),
    "fit, configuration": (_FIT, ("fit.yaml", "hf/config.json")),
    "fit, checkpoint": (f"{_FIT} --trainer.max_steps 2 --ckpt_path run.ckpt", ("run.ckpt/*", "run.ckpt/.metadata")),
    "fit, pretrained": (f"{_FIT} --model.pretrained true", ("hf/*",)),
    "convert, to a checkpoint": ("convert --load-path hf --save-path new --to megatron", ("hf/*",)),
    "convert, to a model": (
        "convert --load-path run.ckpt --save-path new --to hf",
        ("run.ckpt/*", "run.ckpt/.metadata"),
    ),
    "convert, legacy": (
        "convert --load-path legacy --save-path new --to hf",
        ("legacy/*", "legacy/*/*/*", "legacy/*/*"),
    ),
    "inspect, model": ("inspect hf", ("hf/*",)),
    "inspect, checkpoint": ("inspect run.ckpt", ("run.ckpt/*", "run.ckpt/.metadata")),
    "inspect, legacy": ("inspect legacy", ("legacy/*", "legacy/*/*/*", "legacy/*/*")),
    "inspect, dataset": (
        "inspect corpus_text_document --tokenizer hf",
        ("corpus*.bin", "corpus*.idx", "hf/tok*", "hf/vocab*"),
    ),
    "generate": (
        "generate --checkpoint run.ckpt --tokenizer hf --prompt w1 --max-new-tokens 4",
        ("run.ckpt/*", "run.ckpt/.metadata", "hf/tok*", "hf/special*", "hf/vocab*", "hf/merges*"),
    ),
}
"""By row of the table: the command, and globs of the files of which one is changed."""


@functools.cache
def _sound() -> Path:
    """A folder with a tiny GPT-2 in every format, its tokenizer, a dataset and a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(tempfile.mkdtemp(prefix="campaign_sound_"), "files")
    atexit.register(shutil.rmtree, folder.parent, True)
    folder.mkdir()
    GPT2LMHeadModel(GPT2Config(**_SIZES, bos_token_id=0, eos_token_id=0)).save_pretrained(folder / "hf")
    (folder / "text.txt").write_text("\n\n".join(f"w{i} w{i * i % 97} w{i * 7 % 89} and on" for i in range(300)))
    (folder / "fit.yaml").write_text(_FIT_YAML)
    for command in (
        "train-tokenizer --input text.txt --vocab-size 300 --output tok",
        "preprocess --input text.txt --output-prefix corpus --tokenizer tok --append-eod",
        f"{_FIT} --trainer.max_steps 1",
        f"{_FIT} --trainer.enable_checkpointing true --trainer.callbacks+=ModelCheckpoint"
        " --trainer.callbacks.dirpath . --trainer.callbacks.filename run",
        "convert --load-path hf --save-path legacy --to megatron-legacy",
    ):
        ended = _run(command, folder)
        if ended.code != 0:
            raise SystemExit(f"{command} on sound files fails: {ended.printed}")
        if command.startswith("train-tokenizer"):
            shutil.copytree(folder / "tok", folder / "hf", dirs_exist_ok=True)
    return folder


@functools.cache
def _usual(command: str) -> _Ended:
    """What a command takes on the sound files."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_sound(), Path(folder, "files"))
        ended = _run(command, Path(folder, "files"))
    if ended.code != 0:
        raise SystemExit(f"{command} on sound files fails: {ended.printed}")
    return ended


@dataclass(frozen=True, kw_only=True)
class _Ended:
    code: int | None
    """None if it had to be killed."""
    printed: str
    cpu_seconds: float
    megabytes: float


def _run(command: str, folder: Path) -> _Ended:
    """Run a command of ``lightning-megatron`` in a fork of this process."""
    import lightning_megatron.cli.generate
    import lightning_megatron.cli.inspect
    import lightning_megatron.cli.train
    import lightning_megatron.convert.convert
    import lightning_megatron.module  # noqa: F401  # once, not in each fork

    output = folder.parent / f"{folder.name}.printed"
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _die_with_parent(parent)
        _be(command, folder, output)
    deadline, code = time.monotonic() + _PATIENCE, None
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            status = -1
            break
        time.sleep(0.005)
    code = None if status == -1 else os.waitstatus_to_exitcode(status)
    printed = output.read_text(errors="replace")
    return _Ended(
        code=code, printed=printed, cpu_seconds=usage.ru_utime + usage.ru_stime, megabytes=usage.ru_maxrss / 1024
    )


def _be(command: str, folder: Path, output: Path) -> Any:
    """The forked process, which ends here."""
    code = 99
    try:
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.chdir(folder)
        import faulthandler

        from lightning_megatron.cli import main

        faulthandler.enable()
        try:
            code = main(command.split())
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wrong(ended: _Ended, usual: _Ended, marker: Path, file: Path) -> str:
    """What must not be, in words; "" if nothing is."""
    may_be_larger = ended.code == 0 and file.name in ("config.json", "fit.yaml")
    most = _MOST_OF_LARGER_MODELS if may_be_larger else _MOST_MEGABYTES
    if marker.exists():
        return "code of a file has run"
    if ended.code is None:
        return f"not ended after {_PATIENCE:.0f} s"
    if ended.code not in (0, 2) or "Traceback (most recent call last)" in ended.printed:
        return f"ended with {ended.code}"
    if ended.cpu_seconds > usual.cpu_seconds + _MOST_SECONDS:
        return f"took {ended.cpu_seconds:.1f} s of CPU time, {usual.cpu_seconds:.1f} s on sound files"
    if ended.megabytes > usual.megabytes + most:
        return f"took {ended.megabytes:.0f} MB, {usual.megabytes:.0f} MB on sound files"
    if ended.code == 2 and len(ended.printed) > _MOST_CHARACTERS:
        return f"a refusal of {len(ended.printed)} characters"
    return ""


def prepare(rows: Iterable[str]) -> None:
    """Make the sound files and measure the commands on them, once for all jobs."""
    for row in rows:
        _usual(COMMANDS[row.removeprefix(_ROW)][0])
    gc.collect()
    gc.freeze()  # else each fork copies the pages of all that was imported, to visit it


def _attempt(command: str, globs: tuple[str, ...], rng: random.Random, folder: Path) -> Outcome:
    usual = _usual(command)
    files, marker = folder / "files", folder / "code_has_run"
    shutil.copytree(_sound(), files)
    known = sorted({file for each in globs for file in files.glob(each) if file.is_file()})
    file = rng.choice(known)
    mutate = rng.choice(BY_SUFFIX.get(file.suffix, ANY))
    done = mutate(rng, file, marker)
    begin = time.monotonic()
    ended = _run(command, files)
    wrong = _wrong(ended, usual, marker, file)
    told = f"{command}: {file.relative_to(files)} {done}: {wrong}\n{ended.printed[-_MOST_CHARACTERS:]}" if wrong else ""
    with contextlib.suppress(OSError):
        (folder / "told.txt").write_text(told)
    return Outcome(**{"hung" if ended.code is None else "lost": told}, noticed=time.monotonic() - begin)


_ROW = "fuzz: "
ATTEMPTS: dict[str, Attempt] = {
    f"{_ROW}{row}": functools.partial(_attempt, command, globs) for row, (command, globs) in COMMANDS.items()
}
