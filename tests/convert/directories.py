"""Tiny models, and model directories of them in every Hugging Face file format."""

import copy
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_megatron.convert import ConvertOptions
from lightning_megatron.convert.convert import convert
from tests.families.t5_models import mt5, t5, t5_1_1
from tests.families.test_gpts import changes_of, gpt_model
from tests.families.test_megatron_bert import bert_model
from tests.models import VOCAB_SIZE

Format = Literal["safetensors", "sharded_safetensors", "bin", "sharded_bin", "old_bin"]
FORMATS: tuple[Format, ...] = (
    "safetensors",
    "sharded_safetensors",
    "bin",
    "sharded_bin",
    "old_bin",
)


def converted(
    source: Path,
    target: Path,
    *others: Path,
    **options: Any,
) -> Path:
    """Convert ``source``, or the mean of it and of ``others``, by default to Hugging Face; returns ``target``."""
    fields = {"load_path": source, "save_path": target, "to": "hf", **options}
    convert(ConvertOptions(**fields), others)
    return target


def tiny_llama(**fields: Any) -> Any:
    """A Llama of four layers: separate query, key and value projections, untied output layer."""
    return gpt_model("llama", {"max_position_embeddings": 24, **fields})


def tiny_gpt2(vocab_size: int = VOCAB_SIZE) -> Any:
    """A GPT-2 of two layers with tied embeddings."""
    return gpt_model(
        "gpt2", {"vocab_size": vocab_size, "n_layer": 2, "n_inner": None, "n_positions": 1024}
    )


def tiny_bert(head: str, num_labels: int = 2) -> Any:
    """A Megatron-BERT of four layers; ``head`` as in ``MegatronBertFor<head>``."""
    return copy.deepcopy(bert_model(head, num_labels))


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a model directory, by name."""
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def save_as(
    model: Any,
    directory: Path,
    kind: Format,
) -> dict[str, Tensor]:
    """Save ``model``; returns the saved tensors by name."""
    if kind in ("safetensors", "sharded_safetensors"):
        model.save_pretrained(
            directory, max_shard_size="20KB" if kind == "sharded_safetensors" else "1GB"
        )
        return tensors_in(directory)
    directory.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return save_pickled(model.state_dict(), directory, kind)


def save_pickled(
    tensors: dict[str, Tensor],
    directory: Path,
    kind: Format,
) -> dict[str, Tensor]:
    """Save tensors as ``pytorch_model*.bin``, as transformers did before safetensors."""
    if kind != "sharded_bin":
        torch.save(
            tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin"
        )
        return tensors
    weight_map: dict[str, str] = {}
    for i in range(3):
        file = f"pytorch_model-{i + 1:05}-of-00003.bin"
        part = {name: tensors[name] for name in list(tensors)[i::3]}
        torch.save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


_GPTS = (
    "gpt2",
    "llama",
    "llama tied, biased",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_bigcode",
    "bloom",
    "falcon",
    "falcon 40b",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt_neox",
    "opt",
    "cohere",
    "glm4",
)
_BERT_HEADS = (
    "PreTraining",
    "MaskedLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)
_T5S = {"t5": t5, "t5 untied": t5_1_1, "mt5": mt5}
MODELS = (*_GPTS, *_T5S, *(f"megatron-bert-{head}" for head in _BERT_HEADS))
"""Names for ``tiny``: families with different weight layouts, variants and heads."""


def tiny(name: str) -> Any:
    """Build one of ``MODELS``."""
    if name.startswith("megatron-bert-"):
        return tiny_bert(
            name.removeprefix("megatron-bert-"), 3 if name.endswith("Classification") else 2
        )
    if name in _T5S:
        return copy.deepcopy(_T5S[name]())
    family, _, variant = name.partition(" ")
    return gpt_model(family, changes_of(family, variant) if variant else {})
