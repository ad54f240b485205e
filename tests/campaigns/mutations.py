"""Ways to damage a file or to make it malicious; each returns a description."""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.damage import Evil

Mutation = Callable[[random.Random, Path, Path], str]
"""Changes a file; injected code, if it runs, makes the directory at the third argument."""

_NUMBERS = (
    0,
    1,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
)
_VALUES: tuple[Any, ...] = (
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
    [],
    {},
    [[]],
    {"a": 1},
    [2**31] * 3,
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
    data = bytearray(file.read_bytes())
    value = rng.choice(_NUMBERS)
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

    evil = Evil(marker)
    protocol = rng.choice((0, 2, 4))
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
    value = _json(file)
    path = []
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
            f"x: {mkdir}\n{text}",
            f"{bomb}{text}",
            f"&a [*a]\n{text}",
            f"trainer: *nowhere\n{text}",
            f"{text}\n? {text}",
            f"\0{text}",
            text.replace("lr: 0.001", "lr: " + "9" * 5000),
            text.replace("max_steps: 1", f"max_steps: {mkdir}"),
            text.replace("max_steps: 1", f"max_steps: !!python/name:os.system {marker}"),
            text.replace("MegatronModule", "os.mkdir"),
            text.replace("class_path: MegatronModule", system),
        ]
    )
    file.write_text(harm)
    return f"YAML: {harm[:60]!r}"


ANY: tuple[Mutation, ...] = (
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
BY_SUFFIX: dict[str, tuple[Mutation, ...]] = {
    ".json": (*ANY, _json_value, _json_value, _json_value, _nested, _remote_code, _remote_code),
    ".yaml": (_flip, _cut, _splice, _another_kind, _nested, *[_malicious_yaml] * 6),
}
