"""Damaged and hostile files for every reader: ``python -m tests.campaigns --fuzz 10000 --jobs 14``.

Each attempt changes one file of an intact model, checkpoint, dataset or configuration, and runs a command on it in a
process that was forked from one that has imported everything. The table has a row for each command and format of a
file, and a column for each way to end (``_COLUMNS``); those of ``_BAD`` are defects.
"""

import functools
import hashlib
import io
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.campaigns.mutations import ANY, BY_SUFFIX

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MAX_MEGABYTES = 300
_MAX_SECONDS = 5.0
"""Beyond what the command takes on intact files; seconds of CPU time."""
_MAX_MEGABYTES_OF_LARGER_MODELS = 1000
"""For damaged but still valid configurations: without ``n_embd`` a GPT-2 has transformers' default width of 768 and
takes 290 MB to train."""
_PATIENCE = 60
"""Wall-clock seconds; other processes may need the cores too."""
_MAX_CHARACTERS = 3000
"""Maximum output of a refusal: warnings may precede its one line."""

_FIT = "fit --config fit.yaml"
_READ = "read"
_CHECKPOINT = ("run.ckpt/*", "run.ckpt/.metadata")
_LEGACY = ("legacy/*", "legacy/*/*/*", "legacy/*/*")
_TOKENIZER = ("hf/tok*", "hf/vocab*", "hf/special*", "hf/merges*")
_DATASET = ("corpus_text_document.bin", "corpus_text_document.idx")

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "IndexedDataModule": (_READ, (*_DATASET, "cache/*/*")),
    "fit, data": (_FIT, (*_DATASET, "cache/*/*")),
    "fit, configuration": (_FIT, ("fit.yaml", "hf/config.json")),
    "fit, checkpoint": (f"{_FIT} --trainer.max_steps 2 --ckpt_path run.ckpt", _CHECKPOINT),
    "fit, pretrained": (f"{_FIT} --model.pretrained true", ("hf/*",)),
    "convert, to a checkpoint": ("convert --load-path hf --save-path new --to megatron", ("hf/*",)),
    "convert, to a model": ("convert --load-path run.ckpt --save-path new --to hf", _CHECKPOINT),
    "convert, legacy": ("convert --load-path legacy --save-path new --to hf", _LEGACY),
    "inspect, model": ("inspect hf", ("hf/*",)),
    "inspect, checkpoint": ("inspect run.ckpt", _CHECKPOINT),
    "inspect, legacy": ("inspect legacy", _LEGACY),
    "inspect, dataset": (
        "inspect corpus_text_document --documents 3 --tokenizer hf",
        (*_DATASET, *_TOKENIZER),
    ),
    "generate": (
        "generate --checkpoint run.ckpt --tokenizer hf --prompt w1 --max-new-tokens 4",
        (*_CHECKPOINT, *_TOKENIZER),
    ),
}
"""Command, and globs of the files of which one is changed, by the first part of a row's name."""

_REFUSED = "refused in one line"
_IDENTICAL = "same result"
_ACCEPTED = "accepted"
_TRACEBACK = "traceback"
_LOST = "lost"
_HUNG = "hung"
_COSTLY = "costly"
_RAN = "code ran"
_BAD = (_TRACEBACK, _LOST, _HUNG, _COSTLY, _RAN)
_COLUMNS = (_REFUSED, _IDENTICAL, _ACCEPTED, *_BAD)
"""``accepted`` is another result for a reason that is printed below the table, ``lost`` one without any: damage that
should have been noticed. ``costly`` is more than 300 MB or 5 s beyond the intact files."""

_FORMATS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (".bin of tokens", lambda name: name.endswith("document.bin")),
    (".idx", lambda name: name.endswith(".idx")),
    ("cached indices", lambda name: name.startswith("cache/")),
    ("YAML", lambda name: name.endswith(".yaml")),
    ("checksums.json", lambda name: name.endswith("checksums.json")),
    (".metadata", lambda name: name.endswith(".metadata")),
    (".distcp", lambda name: name.endswith(".distcp")),
    (".pt", lambda name: name.endswith(".pt")),
    ("safetensors", lambda name: name.endswith(".safetensors")),
    ("config.json", lambda name: name.endswith("config.json") and "tokenizer" not in name),
    ("tokenizer", lambda name: name.startswith(("hf/tok", "hf/vocab", "hf/special", "hf/merges"))),
)


def _format(name: str) -> str:
    """Format of the file ``name``, a path relative to the files."""
    return next((title for title, matches in _FORMATS if matches(name)), "other")


# ---- one attempt ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Ended:
    code: int | None
    """None after a timeout."""
    printed: str
    seconds: float = 0.0
    megabytes: float = 0.0
    result: dict[str, str] = field(default_factory=dict)
    """Digests of what a successful command printed and wrote."""


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """How one attempt ended."""

    row: str
    format: str
    column: str
    reason: str = ""
    """Why another result was accepted."""
    defect: str = ""
    """Description of a bad one, from which it can be made again."""


class _Files:
    """The intact files at a path, where cached indices name them, and results of commands on them."""

    def __init__(self, folder: Path, intact: Path) -> None:
        self._intact = folder / "intact"
        self._usual: dict[str, _Ended] = {}
        self.path = folder / "files"
        self.marker = folder / "code_has_run"
        shutil.copytree(intact, self._intact)
        self.restore()
        # Cached indices are found by the dataset's path and times, which copies keep.
        for command in (_FIT, _READ):
            self._run_intact(command)
        shutil.copytree(self.path / "cache", self._intact / "cache")

    def restore(self) -> None:
        """Make all files intact again."""
        for path in (self.path, self.marker):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self._intact, self.path)

    def usual(self, command: str) -> _Ended:
        """Time, memory and result of a command on the intact files; of the result what two runs have in common."""
        if command not in self._usual:
            first = self._run_intact(command)
            second = self._run_intact(command)
            common = dict(first.result.items() & second.result.items())
            if not common:
                raise SystemExit(f"{command} on intact files has another result each time")
            self._usual[command] = _Ended(
                code=0,
                printed="",
                seconds=second.seconds,
                megabytes=second.megabytes,
                result=common,
            )
        return self._usual[command]

    def _run_intact(self, command: str) -> _Ended:
        self.restore()
        ended = _run(command, self.path)
        if ended.code != 0:
            raise SystemExit(f"{command} on intact files fails: {ended.printed}")
        return ended


def _attempt(row: str, rng: random.Random, files: _Files) -> _Attempt:
    command, globs = ROWS[row]
    usual = files.usual(command)
    files.restore()
    candidates = {file for pattern in globs for file in files.path.glob(pattern)}
    # A format with many files is not tried more often than others.
    by_format: dict[str, list[Path]] = {}
    for file in sorted(each for each in candidates if each.is_file()):
        by_format.setdefault(_format(str(file.relative_to(files.path))), []).append(file)
    title = rng.choice(list(by_format))
    file = rng.choice(by_format[title])
    name = str(file.relative_to(files.path))
    times = file.stat()
    change = rng.choice(BY_SUFFIX.get(file.suffix, ANY))(rng, file, files.marker)
    # The cached indices of a dataset are used if its times are unchanged.
    if title in (".idx", ".bin of tokens") and rng.random() < 0.5 and file.is_file():
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        change += ", with its old times"
    is_forged = title == "cached indices" and rng.random() < 0.5 and _forge_checksums(file)
    change += ", with matching checksums" * is_forged
    ended = _run(command, files.path)
    column, text = _judge(command, ended, usual, files, name, is_forged)
    if column not in _BAD:
        return _Attempt(row=row, format=title, column=column, reason=text)
    defect = f"{column}: {command}: {name}: {change}: {text}\n{ended.printed[-_MAX_CHARACTERS:]}"
    return _Attempt(row=row, format=title, column=column, defect=defect)


def _forge_checksums(file: Path) -> bool:
    """Make the checksums of a cached index match its damaged files; returns whether that was possible."""
    from tests.checkpoint.damage import update_checksums

    if file.name == "checksums.json" or not file.is_file() or file.is_symlink():
        return False
    if not (file.parent / "checksums.json").is_file():
        return False
    update_checksums(file.parent)
    return True


def _judge(
    command: str, ended: _Ended, usual: _Ended, files: _Files, name: str, is_forged: bool
) -> tuple[str, str]:
    """Column of the table, and why."""
    may_be_larger = ended.code == 0 and name.endswith(("config.json", "fit.yaml"))
    max_megabytes = _MAX_MEGABYTES_OF_LARGER_MODELS if may_be_larger else _MAX_MEGABYTES
    if files.marker.exists():
        return _RAN, "code of a file has run"
    if ended.code is None:
        return _HUNG, f"not ended after {_PATIENCE} s"
    if ended.code not in (0, 2) or "Traceback (most recent call last)" in ended.printed:
        return _TRACEBACK, f"ended with {ended.code}"
    if ended.seconds > usual.seconds + _MAX_SECONDS:
        return _COSTLY, f"{ended.seconds:.1f} s of CPU time, intact {usual.seconds:.1f} s"
    if ended.megabytes > usual.megabytes + max_megabytes:
        return _COSTLY, f"{ended.megabytes:.0f} MB, intact {usual.megabytes:.0f} MB"
    if ended.code == 2:
        is_one_line = ended.printed.count("error: ") == 1 and len(ended.printed) <= _MAX_CHARACTERS
        return (_REFUSED, "") if is_one_line else (_TRACEBACK, "refused in more than one line")
    different = [key for key, digest in usual.result.items() if ended.result.get(key) != digest]
    if not different:
        return _IDENTICAL, ""
    if reason := _accepted(command, files, name, is_forged):
        return _ACCEPTED, reason
    return _LOST, f"another result: {', '.join(different)}"


_WITHOUT_CHECKSUM = {
    ".bin of tokens": "tokens are any numbers, without a checksum",
    "YAML": "another valid configuration, which the user's file may state",
    "config.json": "another valid configuration, without a checksum",
    "tokenizer": "another valid tokenizer, without a checksum",
    "safetensors": "other numbers in weights, without a checksum",
    ".pt": "other numbers in weights, without a checksum",
    "other": "plain files of a model, without a checksum",
}


def _accepted(
    command: str,
    files: _Files,
    name: str,
    is_forged: bool,
) -> str:
    """Why another result may come of the changed file ``name``; "" if it must not."""
    title = _format(name)
    if is_forged:
        return "cached indices whose checksums were forged with them"
    if command.startswith("inspect run.ckpt") and title in (".distcp", ".pt", "other"):
        return "inspect reads none of them, and prints their sizes"
    if name.startswith("run.ckpt/"):
        # Described or read without checksums, which the command then says.
        return "a checkpoint without checksums.json" if title == "checksums.json" else ""
    if title == ".idx":
        return _accepted_index(files, name)
    return _WITHOUT_CHECKSUM.get(title, "")


def _accepted_index(files: _Files, name: str) -> str:
    """Bounds of documents, and the type of tokens, are what an ``.idx`` does not state twice."""
    from lightning_megatron.data.indexed import open_dataset

    intact = open_dataset(str(files.path.with_name("intact") / name)[:-4], for_training=False)
    changed = open_dataset(str(files.path / name)[:-4], for_training=False)
    if (intact.lengths != changed.lengths).any() or (intact.positions != changed.positions).any():
        return ""
    if intact.dtype != changed.dtype:
        return "another type of tokens of the same width, without a checksum"
    return "other bounds of documents in ascending order, without a checksum"


# ---- a command in a process of its own ------------------------------------------------------------------------------


def _run(command: str, folder: Path) -> _Ended:
    """Run a command in a forked process, of which nothing remains."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    log = folder.with_name("log")
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            _be_child(parent, log)
            sending.send(_measure(command, folder))
        except BaseException:
            import traceback

            sending.send(_Ended(code=1, printed=traceback.format_exc()))
        finally:
            os._exit(0)
    sending.close()
    try:
        if receiving.poll(_PATIENCE):
            return receiving.recv()  # type: ignore[no-any-return]
        return _Ended(code=None, printed=log.read_text(errors="replace"))
    except EOFError:
        return _Ended(code=1, printed=f"died: {log.read_text(errors='replace')}")
    finally:
        receiving.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _be_child(parent: int, log: Path) -> None:
    import numpy
    import torch

    from tests.ranks import die_with_parent

    os.setsid()  # own process group, so that child processes can be killed with it
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _measure(command: str, folder: Path) -> _Ended:
    from tests.hostile.measure import measure

    if command == _READ:
        os.chdir(folder)
    measured = measure(folder, command, _read_batches if command == _READ else None)
    result: dict[str, str] = {}
    if measured.code == 0:
        text = measured.stdout.replace(str(folder), "").encode()
        result = {"printed": hashlib.sha256(text).hexdigest(), **_written(folder)}
    return _Ended(
        code=measured.code,
        printed=measured.printed,
        seconds=measured.seconds,
        megabytes=measured.megabytes,
        result=result,
    )


def _written(folder: Path) -> dict[str, str]:
    """Digests of the files of a converted model, and of the losses of a run."""
    files = [file for file in (folder / "new").rglob("*") if file.is_file()]
    found = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    losses = folder / "losses/run/metrics.csv"
    if losses.is_file():
        found["losses"] = hashlib.sha256(losses.read_bytes()).hexdigest()
    return found


def _read_batches() -> tuple[int, str, str]:
    """Read all samples of an ``IndexedDataModule``; returns what a command does: exit code, stdout and stderr."""
    from lightning_megatron.data.batch_shape import BatchShape
    from lightning_megatron.datamodules.base import Run
    from lightning_megatron.datamodules.indexed import IndexedDataModule
    from lightning_megatron.errors import ConfigError

    shape = BatchShape(
        micro_batch_size=2, num_microbatches=2, data_parallel_size=1, data_parallel_rank=0
    )
    digest = hashlib.sha256()
    try:
        data = IndexedDataModule(
            "corpus_text_document", split="90,10,0", seq_length=32, index_cache="cache"
        )
        data.check(Run(shape=shape, splits=("train", "valid")))
        for split in ("train", "valid"):
            samples = data.open(split, 400)
            for begin in range(0, len(samples), 4):
                rows = samples.rows(range(begin, min(begin + 4, len(samples))))
                for key, values in sorted(rows.items()):
                    digest.update(f"{key} {values.dtype} {tuple(values.shape)}".encode())
                    digest.update(values.numpy().tobytes())
    except ConfigError as error:
        return 2, "", f"error: {error}"
    return 0, digest.hexdigest(), ""


def _make_intact(folder: Path) -> None:
    """Write a tiny GPT-2 in every format, its tokenizer, a dataset and a configuration into ``folder``."""
    import yaml
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.cli.command import run_here
    from tests.cli.corpus import VOCAB_SIZE, configuration, make_corpus
    from tests.models import GPT2

    corpus = make_corpus(folder)
    sizes = {
        **GPT2,
        "n_layer": 2,
        "n_positions": 32,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder / "hf")
    shutil.copytree(folder / "tok", folder / "hf", dirs_exist_ok=True)
    config = configuration(Path(corpus.name), folder)
    logger = {"save_dir": ".", "name": "losses", "version": "run"}
    config["trainer"] |= {
        "logger": {"class_path": "CSVLogger", "init_args": logger},
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "max_steps": 1,
    }
    config["model"]["init_args"] = {"model": "hf", "lr": 0.001}
    config["data"]["init_args"]["index_cache"] = "cache"
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    for command in (
        f"{_FIT} --trainer.enable_checkpointing true --trainer.callbacks+=ModelCheckpoint"
        " --trainer.callbacks.dirpath . --trainer.callbacks.filename run",
        "convert --load-path hf --save-path legacy --to megatron-legacy",
    ):
        ((code, out, err),) = run_here(str(folder), [command.split()])
        if code != 0:
            raise SystemExit(f"{command} fails: {out}{err}")
    for name in ("cache", "losses"):
        shutil.rmtree(folder / name)


# ---- many attempts --------------------------------------------------------------------------------------------------


def run(
    rows: Sequence[str],
    attempts: float,
    minutes: float,
    jobs: int,
    seed: int,
) -> int:
    """Make attempts until either limit is reached, print defects and the table; returns the exit code."""
    _import_everything()
    counts = Counter[tuple[str, str, str]]()
    reasons = Counter[tuple[str, str]]()
    begin = time.monotonic()
    num_done = 0
    try:
        for number, attempt in _results(rows, attempts, minutes, jobs, seed):
            num_done += 1
            counts[attempt.row, attempt.format, attempt.column] += 1
            if attempt.reason:
                reasons[attempt.format, attempt.reason] += 1
            if attempt.defect:
                print(f"--fuzz, seed {seed}, attempt {number}: {attempt.defect}\n", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        print(_table(counts))
        for (title, reason), number in sorted(reasons.items()):
            print(f"accepted, {title}: {reason}: {number}")
        seconds = time.monotonic() - begin
        print(f"{num_done} attempts in {seconds:.0f} s, seed {seed}, jobs {jobs}", flush=True)
    return int(any(counts[key] for key in counts if key[2] in _BAD))


def _import_everything() -> None:
    """Import what attempts need into this process, from which all others are forked."""
    from tests import ranks

    os.environ |= dict.fromkeys(_THREADS, "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA stays unused until after the fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ranks.preload()


def _results(
    rows: Sequence[str], attempts: float, minutes: float, jobs: int, seed: int
) -> Iterator[tuple[int, _Attempt]]:
    """Number and outcome of each attempt, from ``jobs`` workers."""
    deadline = time.monotonic() + 60 * minutes
    counter = multiprocessing.get_context("fork").Value("q", 0)
    workers: list[int] = []
    pipes: list[Connection] = []
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="fuzz_"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.callback(_end_workers, workers)
        _fork_and_wait(functools.partial(_make_intact_quietly, root / "intact"))
        for worker in range(jobs):
            receiving, sending = multiprocessing.Pipe(duplex=False)
            folder = root / f"worker_{worker}"
            work = functools.partial(_work, rows, attempts, deadline, seed, counter, folder)
            workers.append(_fork(lambda work=work, sending=sending: work(sending)))  # type: ignore[misc]
            sending.close()
            pipes.append(receiving)
        while pipes:
            for pipe in wait(pipes):
                assert isinstance(pipe, Connection)
                try:
                    yield pipe.recv()
                except EOFError:
                    pipes.remove(pipe)


def _end_workers(workers: Sequence[int]) -> None:
    for pid in workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # its child dies with it
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _work(
    rows: Sequence[str],
    attempts: float,
    deadline: float,
    seed: int,
    counter: Any,
    folder: Path,
    results: Connection,
) -> None:
    """Take the next number and make its attempt, until none is left."""
    folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    files = _Files(folder, folder.parent / "intact")
    while time.monotonic() < deadline:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        if number >= attempts:
            return
        rng = random.Random(f"{seed} {number}")
        results.send((number, _attempt(rows[number % len(rows)], rng, files)))


def _make_intact_quietly(folder: Path) -> None:
    folder.mkdir()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        _make_intact(folder)


def _fork(work: Callable[[], None]) -> int:
    """Do ``work`` in a forked process, which ends with this one; returns its id."""
    from tests.ranks import die_with_parent

    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        work()
        code = 0
    except BaseException as error:
        print(f"a worker ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _fork_and_wait(work: Callable[[], None]) -> None:
    """Do ``work``, which may start threads, in a process of its own: forking this one must remain safe."""
    if os.waitpid(_fork(work), 0)[1] != 0:
        raise SystemExit("the intact files could not be made")


def _table(counts: Counter[tuple[str, str, str]]) -> str:
    """Markdown table with a row for each command and format, and one for all."""
    pairs = sorted({key[:2] for key in counts}, key=lambda pair: (list(ROWS).index(pair[0]), pair))
    lines = [["command", "format", "tried", *_COLUMNS]]
    for row, title in pairs:
        numbers = [counts[row, title, column] for column in _COLUMNS]
        lines.append([row, title, *map(str, [sum(numbers), *numbers])])
    totals = [sum(counts[*pair, column] for pair in pairs) for column in _COLUMNS]
    lines.append(["all", "", *map(str, [sum(totals), *totals])])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
