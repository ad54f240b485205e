"""Loading takes the host memory that the rank keeps, and not much more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.families.parity import pretrained_module
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

_SLACK_BYTES = 32 << 20
"""For what Python, torch and gloo allocate on the way and keep, 10 to 20 MB by what is imported already, whatever
the model's size."""
_LAYERS, _HIDDEN, _FFN, _VOCAB = 24, 512, 4096, 4096


def _write_model(directory: Path) -> tuple[int, int]:
    """About 340 MB of bf16 Llama; returns the size of all tensors in fp32, as loaded, and of the largest in bf16."""
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
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    config.architectures = ["LlamaForCausalLM"]
    directory.mkdir(exist_ok=True)
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(4 * t.numel() for t in tensors.values()), max(2 * t.numel() for t in tensors.values())


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def memory_of_loading(directory: str, layout: Layout) -> tuple[int, int]:
    """Bytes of this rank's parameters, and by how much the resident memory's peak rose while they were loaded."""
    from unittest.mock import patch

    from torch.utils.data import DataLoader

    from lightning_megatron import module as module_file
    from tests.parity.training import Sentences

    real, measured = module_file.load_hugging_face, {}

    def measuring(chunks: Any, *args: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        before = _status("VmRSS")
        result = real(chunks, *args)
        measured["rise"] = _status("VmHWM") - before
        measured["own"] = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
        return result

    module = pretrained_module(directory)
    with patch.object(module_file, "load_hugging_face", measuring):
        trainer_of(Case(layout=layout)).validate(module, DataLoader(Sentences(2), batch_size=2), verbose=False)
    return measured["own"], measured["rise"]


def _status(field: str) -> int:
    """Bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


# ---- tests ----------------------------------------------------------------------------------------------------------


def test_a_rank_holds_its_shard_and_little_more(tmp_path: Path) -> None:
    whole, largest = _write_model(tmp_path)
    for own, rise in run_ranks(memory_of_loading, 2, str(tmp_path), Layout(tp=2)):
        # Memory of new parameters becomes resident when it is written first, so the shard is part of the rise.
        assert rise < own + 2 * largest + _SLACK_BYTES < 0.6 * whole
        assert rise > 0.9 * own, "the parameters were resident before: this measures nothing"


def memory_of_converting(directory: str, target: str) -> int:
    """By how much the resident memory's peak rises while a model is converted."""
    from lightning_megatron.convert.convert import ConvertOptions, convert

    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    convert(ConvertOptions(load_path=Path(directory), save_path=Path(target), to="megatron"))
    return _status("VmHWM") - before


@pytest.mark.exhaustive
def test_a_conversion_holds_one_copy_of_the_model(tmp_path: Path) -> None:
    whole, largest = _write_model(tmp_path / "source")
    (rise,) = run_ranks(memory_of_converting, 1, str(tmp_path / "source"), str(tmp_path / "a.ckpt"))
    # The files are in bf16. Of a gated layer's matrix, which is stored as two tensors, both are copied to be written.
    gates = _LAYERS * 2 * _FFN * _HIDDEN * 2
    # Libraries that are imported on the way and arenas of the threads that write take 30 to 75 MB; a second copy of the
    # model would take 360.
    assert 0.9 * whole / 2 < rise < whole / 2 + gates + 2 * largest + 6 * _SLACK_BYTES
