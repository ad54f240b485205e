"""Damaged and hostile files for every reader, through ``fit``, ``convert``, ``inspect`` and ``generate``.

Each attempt changes one file of an intact model, checkpoint, dataset or configuration and runs a command on it. The
command must end with code 0 or, if it refuses the file, with code 2 and one line; take at most 5 s of CPU time and
200 MB more than on the intact files; and run no code that a file names.
"""

import functools
import io
import json
import os
import pickle
import random
import resource
import shutil
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.campaigns import Attempt, Outcome
from tests.checkpoint.damage import Evil
from tests.cli.command import run_here
from tests.cli.corpus import VOCAB_SIZE, configuration, make_corpus
from tests.models import GPT2
from tests.ranks import RankError, run_ranks

_MAX_MEGABYTES, _MAX_SECONDS = 200, 5.0
_MAX_MEGABYTES_OF_LARGER_MODELS = 1000
"""For damaged but still valid configurations: without ``n_embd`` a GPT-2 has transformers' default width of 768 and
takes 290 MB to train."""
_PATIENCE = 60
"""Wall-clock seconds; other processes may need the cores too."""
_MAX_CHARACTERS = 3000
"""Maximum output of a refusal: warnings may precede its one line."""

_FIT = "fit --config fit.yaml"
_CHECKPOINT, _LEGACY = (
    ("run.ckpt/*", "run.ckpt/.metadata"),
    ("legacy/*", "legacy/*/*/*", "legacy/*/*"),
)
_TOKENIZER = ("hf/tok*", "hf/vocab*")

_COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fit, data": (_FIT, ("corpus_text_document.bin", "corpus_text_document.idx", "cache/*/*")),
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
        "inspect corpus_text_document --tokenizer hf",
        ("corpus*.bin", "corpus*.idx", *_TOKENIZER),
    ),
    "generate": (
        "generate --checkpoint run.ckpt --tokenizer hf --prompt w1 --max-new-tokens 4",
        (*_CHECKPOINT, *_TOKENIZER, "hf/special*", "hf/merges*"),
    ),
}
"""Command, and globs of the files of which one is changed, by row of the table."""


# ---- ways to damage a file or make it malicious; each returns a description ----------------------------

_Mutation = Callable[[random.Random, Path, Path], str]
"""Changes a file; injected code, if it runs, makes the directory at the third argument."""

_NUMBERS = (0, 1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1e300,
        float("nan"),
        2**31,
        2**62,
        "",
        "\x1b[31m",
        "../../etc/passwd",
        "x" * 100_000,
    ),
    *([], {}, [[]], {"a": 1}, [2**31] * 3),
)
_LARGEST_CHANGED = 1 << 22


# ---- bytes ----------------------------------------------------------------------------------------------------------


def _flip(rng: random.Random, file: Path, marker: Path) -> str:
    data = bytearray(file.read_bytes())
    offsets = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 8, 64)))] if data else []
    for offset in offsets:
        data[offset] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"bits flipped at {offsets}"


def _cut(rng: random.Random, file: Path, marker: Path) -> str:
    length = rng.choice((0, 1, 7, rng.randrange(file.stat().st_size + 1)))
    os.truncate(file, min(length, file.stat().st_size))
    return f"cut to {length} bytes"


def _number(rng: random.Random, file: Path, marker: Path) -> str:
    data, value = bytearray(file.read_bytes()), rng.choice(_NUMBERS)
    offset = rng.randrange(min(len(data), rng.choice((64, 512, len(data)))) or 1) if data else 0
    data[offset : offset + 8] = struct.pack("<Q", value)
    file.write_bytes(data)
    return f"the number {value} at {offset}"


def _splice(rng: random.Random, file: Path, marker: Path) -> str:
    data = file.read_bytes()
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    chunk = rng.choice((data[a:b], bytes(b - a), rng.randbytes(min(b - a, 4096)), data[a:b] * 3))
    offset = rng.randrange(len(data) + 1)
    file.write_bytes((data[:offset] + chunk + data[offset:])[:_LARGEST_CHANGED])
    return f"{len(chunk)} bytes inserted at {offset}"


# ---- files ----------------------------------------------------------------------------------------------------------


def _another_kind(rng: random.Random, file: Path, marker: Path) -> str:
    kinds = ["missing", "folder", "/dev/null", "/etc/passwd", "loop", "nowhere", "parent"]
    # A configuration is named by the user, and may legitimately be a pipe.
    target = rng.choice(kinds if file.suffix == ".yaml" else [*kinds, "fifo", "/dev/zero"])
    file.unlink()
    if target == "folder":
        file.mkdir()
    elif target == "fifo":
        os.mkfifo(file)
    elif target != "missing":
        file.symlink_to(
            {"loop": file.name, "nowhere": "/nowhere/x", "parent": ".."}.get(target, target)
        )
    return f"is now: {target}"


# ---- code -----------------------------------------------------------------------------------------------------------


def _evil_pickle(rng: random.Random, file: Path, marker: Path) -> str:
    """Replace the file, or the pickles of an archive, with a malicious pickle."""
    import torch

    evil, protocol = Evil(marker), rng.choice((0, 2, 4))
    if zipfile.is_zipfile(file) and rng.random() < 0.7:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()  # entries of the archive have no checksums
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name in names:
                archive.writestr(
                    name, pickle.dumps({"a": evil}, 2) if name.endswith("data.pkl") else b"3"
                )
        file.write_bytes(content.getvalue())
        return "data.pkl of the archive would run code"
    if rng.random() < 0.5:
        saved = io.BytesIO()
        torch.save({"model": evil, "args": evil}, saved)
        file.write_bytes(saved.getvalue())
        return "torch.save of an object that would run code"
    data = pickle.dumps(evil, protocol)
    file.write_bytes(rng.choice((data, data + file.read_bytes(), b"\x93NUMPY\x01\x00v\x00" + data)))
    return f"pickle of protocol {protocol} that would run code"


def _remote_code(rng: random.Random, file: Path, marker: Path) -> str:
    """Add an ``auto_map``, by which transformers loads a module next to a config."""
    value = _json(file)
    (file.parent / "evil.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\nclass _Evil: pass\n"
    )
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")
    evil = {"auto_map": dict.fromkeys(classes, "evil.Evil"), "trust_remote_code": True}
    if rng.random() < 0.5:
        evil |= {
            "model_type": "evil",
            "tokenizer_class": "Evil",
            "custom_pipelines": {"x": {"impl": "evil.Evil"}},
        }
    file.write_text(json.dumps({**(value if isinstance(value, dict) else {}), **evil}))
    return f"names a module with code: {sorted(evil)}"


# ---- JSON and YAML --------------------------------------------------------------------------------------------------


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}


def _json_value(rng: random.Random, file: Path, marker: Path) -> str:
    value, path = _json(file), []
    node = value
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        path.append(key)
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.4:
            node[key] = rng.choice(_VALUES)
            break
        node = node[key]
    file.write_text(json.dumps(value))
    return f"another value at {path}"


def _nested(rng: random.Random, file: Path, marker: Path) -> str:
    depth = rng.choice((100, 5_000, 200_000))
    file.write_text(
        rng.choice(('{"a":' * depth + "1" + "}" * depth, "[" * depth + "]" * depth, "[" * depth))
    )
    return f"{depth} nested brackets"


def _malicious_yaml(rng: random.Random, file: Path, marker: Path) -> str:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    mkdir = f"!!python/object/apply:os.mkdir [{marker}]"
    text = file.read_text()
    system = f"class_path: os.system\n  init_args: {{command: mkdir {marker}}}"
    harm = rng.choice(
        [
            *(
                f"x: {mkdir}\n{text}",
                f"{bomb}{text}",
                f"&a [*a]\n{text}",
                f"trainer: *nowhere\n{text}",
            ),
            *(f"{text}\n? {text}", "\0" + text, text.replace("lr: 0.001", "lr: " + "9" * 5000)),
            text.replace("max_steps: 1", f"max_steps: {mkdir}"),
            text.replace("max_steps: 1", f"max_steps: !!python/name:os.system {marker}"),
            text.replace("MegatronModule", "os.mkdir"),
            text.replace("class_path: MegatronModule", system),
        ]
    )
    file.write_text(harm)
    return f"YAML: {harm[:60]!r}"


_ANY: tuple[_Mutation, ...] = (
    _flip,
    _flip,
    _cut,
    _cut,
    _number,
    _number,
    _splice,
    _another_kind,
    _evil_pickle,
)
_BY_SUFFIX: dict[str, tuple[_Mutation, ...]] = {
    ".json": (*_ANY, _json_value, _json_value, _json_value, _nested, _remote_code, _remote_code),
    ".yaml": (_flip, _cut, _splice, _another_kind, _nested, *[_malicious_yaml] * 6),
}


# ---- attempts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Ended:
    code: int | None
    """None after a timeout."""
    printed: str
    cpu_seconds: float = 0.0
    megabytes: float = 0.0


@functools.cache
def _intact() -> Path:
    """Directory with a tiny GPT-2 in every format, its tokenizer, a dataset and a configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(tempfile.mkdtemp(prefix="campaign_sound_"))
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
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
    config["trainer"] |= {"logger": False, "enable_checkpointing": False, "max_steps": 1}
    config["model"]["init_args"] = {"model": "hf", "lr": 0.001}
    config["data"]["init_args"]["index_cache"] = "cache"
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    for command in (
        f"{_FIT} --trainer.max_steps 1",
        f"{_FIT} --trainer.enable_checkpointing true --trainer.callbacks+=ModelCheckpoint"
        " --trainer.callbacks.dirpath . --trainer.callbacks.filename run",
        "convert --load-path hf --save-path legacy --to megatron-legacy",
    ):
        _run_intact(command, folder)
    return folder


def _run_intact(command: str, folder: Path) -> _Ended:
    ended = _run(command, folder)
    if ended.code != 0:
        raise SystemExit(f"{command} on intact files fails: {ended.printed}")
    return ended


@functools.cache
def _usual(command: str) -> _Ended:
    """Time and memory of a command on the intact files."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_intact(), Path(folder, "files"))
        return _run_intact(command, Path(folder, "files"))


def _run(command: str, folder: Path) -> _Ended:
    """Run a ``lightning-megatron`` command in a forked process that has already imported everything."""
    try:
        return run_ranks(_measure, 1, str(folder), command, timeout=_PATIENCE)[0]  # type: ignore[no-any-return]
    except RankError as error:
        return _Ended(code=None if error.rank is None else 1, printed=str(error))


def _measure(folder: str, command: str) -> _Ended:
    ((code, out, err),) = run_here(folder, [command.split()])
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    return _Ended(code=code, printed=f"{out}{err}", cpu_seconds=seconds, megabytes=megabytes)


def _wrong(ended: _Ended, usual: _Ended, marker: Path, file: Path) -> str:
    """Description of the failure, or ""."""
    may_be_larger = ended.code == 0 and file.name in ("config.json", "fit.yaml")
    max_megabytes = _MAX_MEGABYTES_OF_LARGER_MODELS if may_be_larger else _MAX_MEGABYTES
    if marker.exists():
        return "code of a file has run"
    if ended.code is None:
        return f"not ended after {_PATIENCE} s"
    if ended.code not in (0, 2) or "Traceback (most recent call last)" in ended.printed:
        return f"ended with {ended.code}"
    if ended.cpu_seconds > usual.cpu_seconds + _MAX_SECONDS:
        return (
            f"took {ended.cpu_seconds:.1f} s of CPU time, {usual.cpu_seconds:.1f} s on intact files"
        )
    if ended.megabytes > usual.megabytes + max_megabytes:
        return f"took {ended.megabytes:.0f} MB, {usual.megabytes:.0f} MB on intact files"
    if ended.code == 2 and len(ended.printed) > _MAX_CHARACTERS:
        return f"a refusal of {len(ended.printed)} characters"
    return ""


def _attempt(command: str, globs: tuple[str, ...], rng: random.Random, folder: Path) -> Outcome:
    usual = _usual(command)
    files, marker = folder / "files", folder / "code_has_run"
    shutil.copytree(_intact(), files)
    file = rng.choice(
        sorted({file for pattern in globs for file in files.glob(pattern) if file.is_file()})
    )
    change = rng.choice(_BY_SUFFIX.get(file.suffix, _ANY))(rng, file, marker)
    begin = time.monotonic()
    ended = _run(command, files)
    wrong = _wrong(ended, usual, marker, file)
    text = f"{command}: {file.relative_to(files)} {change}: {wrong}\n{ended.printed[-_MAX_CHARACTERS:]}"
    return Outcome(
        wrong=text if wrong else "", hung=ended.code is None, noticed=time.monotonic() - begin
    )


CAMPAIGNS: dict[str, dict[str, Attempt]] = {
    "fuzzed": {
        f"fuzz: {row}": functools.partial(_attempt, *arguments)
        for row, arguments in _COMMANDS.items()
    }
}
