"""Host memory: loading needs little more than the rank's shard, converting little more than the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.families.parity import pretrained_module
from tests.parity.training import TP2, Case, Layout, trainer_of
from tests.ranks import run_ranks

_SLACK_BYTES = 32 << 20
"""Allowance for what Python, torch and gloo allocate and keep: 10 to 20 MB, depending on what is already imported,
whatever the model's size."""
_LAYERS = 24
_HIDDEN = 512
_FFN = 4096
_VOCAB = 4096


def _write_model(directory: Path) -> tuple[int, int]:
    """Write a bf16 Llama of about 340 MB; returns the bytes of all tensors in fp32 and of the largest in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCAB,
        num_hidden_layers=_LAYERS,
        hidden_size=_HIDDEN,
        intermediate_size=_FFN,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=32,
    )
    with torch.device("meta"):
        shapes = {
            name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()
        }
    tensors = {
        name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    config.architectures = ["LlamaForCausalLM"]
    directory.mkdir(exist_ok=True)
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(4 * t.numel() for t in tensors.values()), max(
        2 * t.numel() for t in tensors.values()
    )


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def _measure_loading(directory: str, layout: Layout) -> tuple[int, int]:
    """Bytes of this rank's parameters, and the rise of peak resident memory during loading."""
    from unittest.mock import patch

    from torch.utils.data import DataLoader

    from lightning_megatron import module as module_file
    from lightning_megatron.convert.hugging_face import load_hugging_face
    from tests.parity.training import Sentences

    measured = {}

    def measure(chunks: Any, *args: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to current resident memory
        before = _status("VmRSS")
        result = load_hugging_face(chunks, *args)
        measured["rise"] = _status("VmHWM") - before
        measured["own"] = sum(
            p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters()
        )
        return result

    module = pretrained_module(directory)
    with patch.object(module_file, "load_hugging_face", measure):
        trainer_of(Case(layout=layout)).validate(
            module, DataLoader(Sentences(2), batch_size=2), verbose=False
        )
    return measured["own"], measured["rise"]


def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    ]
    return 1024 * int(line.split()[1])


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_loading_needs_little_more_than_the_shard(tmp_path: Path) -> None:
    total, largest = _write_model(tmp_path)
    for own, rise in run_ranks(
        _measure_loading,
        2,
        str(tmp_path),
        TP2,
    ):
        # New parameters become resident when first written, so the rise includes the shard.
        assert rise < own + 2 * largest + _SLACK_BYTES < 0.6 * total
        assert rise > 0.9 * own, "the parameters were resident before: this measures nothing"


def _measure_converting(directory: str, target: str) -> int:
    """The rise of peak resident memory during a conversion."""
    from tests.convert.directories import converted

    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    converted(Path(directory), Path(target), to="megatron")
    return _status("VmHWM") - before


@pytest.mark.exhaustive
def test_conversion_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    total, largest = _write_model(tmp_path / "source")
    (rise,) = run_ranks(
        _measure_converting,
        1,
        str(tmp_path / "source"),
        str(tmp_path / "a.ckpt"),
    )
    # Files are in bf16. The two stored tensors of a gated layer's matrix are both copied for writing.
    gates = _LAYERS * 2 * _FFN * _HIDDEN * 2
    # Imports and the arenas of writer threads take 30 to 75 MB; a second copy of the model would take 360.
    assert 0.9 * total / 2 < rise < total / 2 + gates + 2 * largest + 6 * _SLACK_BYTES
