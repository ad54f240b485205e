"""Which model directories do the tests of conversion read? Tiny models, saved in every format there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from tests.families.parity import VOCAB_SIZE, tiny_model

Format = Literal["safetensors", "sharded_safetensors", "bin", "sharded_bin", "old_bin"]
FORMATS: tuple[Format, ...] = ("safetensors", "sharded_safetensors", "bin", "sharded_bin", "old_bin")


def tiny_llama(**fields: Any) -> Any:
    """A Llama of four layers, whose query, key and value projections and output layer are tensors of their own."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 24,
            **fields,
        }
    )
    return tiny_model(AutoModelForCausalLM, config)


def tiny_gpt2() -> Any:
    """A GPT-2 of two layers, whose output layer is the embedding."""
    from transformers import AutoModelForCausalLM, GPT2Config

    return tiny_model(AutoModelForCausalLM, GPT2Config(vocab_size=VOCAB_SIZE, n_layer=2, n_embd=32, n_head=4))


def tiny_bert(head: str, **fields: Any) -> Any:
    """A Megatron-BERT of two layers; ``head`` as in ``MegatronBertFor<head>``."""
    import transformers

    config = transformers.MegatronBertConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        max_position_embeddings=24,
        **fields,
    )
    return tiny_model(getattr(transformers, f"MegatronBertFor{head}"), config)


def save_as(model: Any, directory: Path, kind: Format) -> dict[str, torch.Tensor]:
    """Save ``model``; returns the tensors that the files hold."""
    if kind in ("safetensors", "sharded_safetensors"):
        model.save_pretrained(directory, max_shard_size="20KB" if kind == "sharded_safetensors" else "1GB")
        tied = (model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
        return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    directory.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return save_pickled(model.state_dict(), directory, kind)


def save_pickled(tensors: dict[str, torch.Tensor], directory: Path, kind: Format) -> dict[str, torch.Tensor]:
    """Save tensors as transformers did before safetensors."""
    if kind != "sharded_bin":
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
        return tensors
    weight_map: dict[str, str] = {}
    for i in range(3):
        file = f"pytorch_model-{i + 1:05}-of-00003.bin"
        part = {name: tensor for n, (name, tensor) in enumerate(tensors.items()) if n % 3 == i}
        torch.save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors
