"""How much host memory does a conversion take? Less than twice the largest file, whatever the model's size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.directory import Contents, files_of

_LAYERS, _HIDDEN, _FFN, _VOCAB = 17, 2048, 5504, 32000
_SOURCE_FILE_BYTES = 210_000_000
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hf": ("large", {"max_shard_size": "140MB"}),
    "megatron": ("middle", {"tp": 2, "pp": 3}),
    "megatron-legacy": ("middle", {"tp": 2, "pp": 3}),
}
"""Target -> model and options."""

_MEASURED = """
import json, os, shutil, sys
from pathlib import Path
from lightning_megatron.convert.conversion import ConvertOptions, convert

def status(field):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
os.fsync = lambda descriptor: None  # the files are removed at once: the disk need not see them
measured = {}
for to, (size, options) in cases.items():
    # What is imported on the way is no part of the rise.
    convert(ConvertOptions(load_path=folder / "small", save_path=folder / f"small-{to}", to=to))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status("VmRSS")
    target = folder / f"{size}-{to}"
    done = convert(ConvertOptions(load_path=folder / size, save_path=target, to=to, **options))
    rise = status("VmHWM") - before
    largest = max(file.stat().st_size for file in target.rglob("*") if file.is_file())
    measured[to] = {"rise": rise, "largest": largest, "bytes": done.num_bytes, "seconds": done.seconds}
    shutil.rmtree(target)
print(json.dumps(measured))
"""


def _contents(layers: int) -> Contents:
    """The tensors of a Llama in bfloat16."""
    matrix = {"q": _HIDDEN, "k": _HIDDEN, "v": _HIDDEN, "o": _HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCAB, _HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (rows, _HIDDEN) for name, rows in matrix.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": (_FFN, _HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (_HIDDEN, _FFN)}
        shapes |= {f"{at}{name}_layernorm.weight": (_HIDDEN,) for name in ("input", "post_attention")}
    return {name: (shape, torch.bfloat16) for name, shape in shapes.items()}


def _write_model(directory: Path, layers: int) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=layers,
        hidden_size=_HIDDEN,
        intermediate_size=_FFN,
        num_attention_heads=16,
        num_key_value_heads=16,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    files = files_of(_contents(layers), _SOURCE_FILE_BYTES)
    for file in files:
        with (directory / file.name).open("wb") as opened:
            opened.write(file.header)
            opened.truncate(len(file.header) + file.num_bytes)  # zeros that take no space: bytes are compared elsewhere
    weight_map = {name: file.name for file in files for name in file.names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, float]]]:
    """Bytes and seconds of each case; the files are not kept, as pytest keeps temporary folders."""
    folder = tmp_path_factory.mktemp("models")
    try:
        for name, layers in (("small", 1), ("middle", 4), ("large", _LAYERS)):
            _write_model(folder / name, layers)
        command = [sys.executable, "-c", _MEASURED, str(folder), json.dumps(_CASES)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        yield json.loads(result.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", _CASES)
def test_a_model_is_converted_in_the_memory_of_two_files(measured: dict[str, dict[str, float]], to: str) -> None:
    found = measured[to]
    assert found["rise"] < 2 * found["largest"], found
    assert found["largest"] < 0.3 * found["bytes"], "the files are so large that this says little"


@pytest.mark.exhaustive
def test_a_model_of_two_gigabytes_needs_no_more_than_a_small_one(measured: dict[str, dict[str, float]]) -> None:
    assert measured["hf"]["bytes"] > 1.9e9
    # Queries, keys and values of one layer are held, 25 MB, and some blocks of 8 MiB.
    assert measured["hf"]["rise"] < 100e6, measured["hf"]
