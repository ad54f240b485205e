"""Model directories that the tests of conversion read: tiny models, saved in every format there is."""

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


def tiny_gpt2(vocab_size: int = VOCAB_SIZE) -> Any:
    """A GPT-2 of two layers, whose output layer is the embedding."""
    from transformers import AutoModelForCausalLM, GPT2Config

    return tiny_model(AutoModelForCausalLM, GPT2Config(vocab_size=vocab_size, n_layer=2, n_embd=32, n_head=4))


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


_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
_T5 = {
    **{"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 3},
    **{"num_layers": 3, "num_decoder_layers": 2, "relative_attention_num_buckets": 8},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB_SIZE, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24},
    "llama": _DECODER,
    "llama-biases": {**_DECODER, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {**_DECODER, "head_dim": 16},
    "qwen2": _DECODER,
    "qwen3": {**_DECODER, "head_dim": 16},
    "gpt_bigcode": {"vocab_size": VOCAB_SIZE, "n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 24},
    "bloom": {"vocab_size": VOCAB_SIZE, "n_layer": 3, "hidden_size": 32, "n_head": 4},
    "falcon": {
        **{"vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4},
        **{"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    },
    "falcon-one-key": {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4},
    "gemma2": {**_DECODER, "head_dim": 16},
    "gemma3_text": {**_DECODER, "head_dim": 16, "sliding_window_pattern": 3},
    "phi3": _DECODER,
    "olmo2": _DECODER,
    "gpt_neox": {**_DECODER, "rotary_pct": 0.5},
    "opt": {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "cohere": _DECODER,
    "glm4": {**_DECODER, "head_dim": 16},
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu"},
}
_BERT_HEADS = ("PreTraining", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
MODELS = (*_CONFIGS, *(f"megatron-bert-{head}" for head in _BERT_HEADS))
"""Each family once, with its variants and heads, for ``tiny``; no two sizes of a tensor are alike by chance."""


def tiny(name: str) -> Any:
    """One of ``MODELS``: some layers, whose number most pipelines do not divide."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if name.startswith("megatron-bert-"):
        labels = {"num_labels": 3} if name.endswith("Classification") else {}
        return tiny_bert(name.removeprefix("megatron-bert-"), **labels)
    model_type = name.split("-")[0]
    config = CONFIG_MAPPING[model_type](**{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, **_CONFIGS[name]})
    return tiny_model(AutoModelForSeq2SeqLM if model_type in ("t5", "mt5") else AutoModelForCausalLM, config)
