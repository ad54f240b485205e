"""Megatron-LM's layouts, written by hand from Hugging Face's weights, shard by shard.

Nothing of the package is used: names, row orders, folders and pickles are spelled out once more.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
Stages = tuple[tuple[tuple[int, ...], ...], ...]
"""Of each stage, of each of its chunks, the numbers of its layers in the whole model."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a test's checkpoint is written."""

    stages: Stages
    version: float | None = 3.0
    """None leaves it out, as the first releases did."""
    tp: int = 1
    stack: str = "encoder"
    """``transformer`` in the first releases."""
    attention: str = "self_attention"
    """``attention`` in the first releases."""
    norm: str = "layernorm"
    """``norm`` in the last releases of the legacy modules."""
    padding: int = 3
    """Rows that the vocabulary has more, on the last rank."""
    dtype: torch.dtype = torch.float32
    is_zip: bool = True
    """Torch's format since 1.6."""
    arguments: Mapping[str, Any] | None = field(default_factory=dict)
    """Besides those that all have; None leaves out all of them."""

    @property
    def pp(self) -> int:
        return len(self.stages)

    def rank_folder(self, tensor: int, stage: int) -> str:
        return f"mp_rank_{tensor:02d}" if self.pp == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def even(layers: int, pp: int = 1) -> Stages:
    """Equal stages of one chunk."""
    each = layers // pp
    return tuple((tuple(range(stage * each, (stage + 1) * each)),) for stage in range(pp))


Chunk = Callable[[int, tuple[int, ...], bool, bool], Mapping[str, Any]]
"""Makes the nested model of a chunk from tensor rank, layers, and whether it is the first and the last of all."""


def write(root: Path, layout: Layout, chunk: Chunk, arguments: Mapping[str, Any], iteration: int = 40) -> Path:
    """Write the tree: tracker file, folder of the iteration, a folder and a file for each rank."""
    folder = root / f"iter_{iteration:07d}"
    num_chunks = len(layout.stages[0])
    for stage, chunks in enumerate(layout.stages):
        for tensor in range(layout.tp):
            state: dict[str, Any] = {"iteration": iteration}
            if layout.version is not None:
                state["checkpoint_version"] = layout.version
            if layout.arguments is not None:
                sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
                state["args"] = Namespace(**{**arguments, **sizes, "consumed_train_samples": 640, **layout.arguments})
            for number, layers in enumerate(chunks):
                is_first = stage == 0 and number == 0
                is_last = stage == layout.pp - 1 and number == num_chunks - 1
                name = "model" if num_chunks == 1 else f"model{number}"
                state[name] = _cast(chunk(tensor, layers, is_first, is_last), layout.dtype)
            moments = {0: {"step": 40, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}
            state["optimizer"] = {"optimizer": {"state": moments}, "fp32_from_fp16_params": [[torch.ones(3)]]}
            state["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": 640, "lr_decay_style": "linear"}
            file = folder / layout.rank_folder(tensor, stage) / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save(state, file, _use_new_zipfile_serialization=layout.is_zip)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def _cast(nested: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype).clone() if isinstance(value, torch.Tensor) else _cast(value, dtype)
        for name, value in nested.items()
    }


# ---- shards ---------------------------------------------------------------------------------------------------------


def block(tensor: torch.Tensor, axis: int, rank: int, tp: int) -> torch.Tensor:
    """An equal part."""
    size = tensor.shape[axis] // tp
    return tensor.narrow(axis, rank * size, size)


def vocabulary(tensor: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """Rows of the padded vocabulary, which has a copy of its last row where nothing belongs."""
    rows = tensor.shape[0] + layout.padding
    rows += -rows % layout.tp
    padded = torch.cat([tensor, tensor[-1:].expand(rows - tensor.shape[0], *tensor.shape[1:])])
    return block(padded, 0, rank, layout.tp)


def heads(kinds: list[torch.Tensor], width: int, layout: Layout, rank: int) -> torch.Tensor:
    """Queries, keys and values (or keys and values) of a rank's heads, in the order of the version.

    Args:
        kinds: Each of them whole: [heads * width, ...].
        width: Of a head.
        layout: Whose version counts.
        rank: Tensor-parallel.
    """
    parts = [block(each.reshape(-1, width, *each.shape[1:]), 0, rank, layout.tp) for each in kinds]
    if not layout.version:
        ordered = torch.stack(parts)  # kind, head, width
    elif layout.version == 1.0:
        ordered = torch.stack(parts, dim=2)  # head, width, kind
    else:
        ordered = torch.stack(parts, dim=1)  # head, kind, width
    return ordered.reshape(-1, *kinds[0].shape[1:])


def groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, tp: int, rank: int) -> torch.Tensor:
    """Of each of a rank's query groups: its queries, its key, its value."""
    number = key.shape[0] // width
    rows = []
    for group in range(rank * number // tp, (rank + 1) * number // tp):
        rows += [block(query, 0, group, number), block(key, 0, group, number), block(value, 0, group, number)]
    return torch.cat(rows)


# ---- models ---------------------------------------------------------------------------------------------------------


def gpt2(model: Any, layout: Layout) -> Chunk:
    """A GPT of Megatron-LM with the weights of a GPT-2."""
    weights: Tensors = model.state_dict()
    width = model.config.n_embd // model.config.n_head

    def layer(tensor: int, number: int, local: int) -> dict[str, torch.Tensor]:
        h, n, tp = f"transformer.h.{number}.", f"layers.{local}.", layout.tp
        tensors = {}
        for kind in ("weight", "bias"):
            # Conv1D keeps matrices transposed.
            qkv, fc1, proj, fc2 = (
                weights[f"{h}{name}.{kind}"].t() if kind == "weight" else weights[f"{h}{name}.{kind}"]
                for name in ("attn.c_attn", "mlp.c_fc", "attn.c_proj", "mlp.c_proj")
            )
            is_split = kind == "weight"
            tensors[f"{n}input_{layout.norm}.{kind}"] = weights[f"{h}ln_1.{kind}"]
            tensors[f"{n}{layout.attention}.query_key_value.{kind}"] = heads(list(qkv.chunk(3)), width, layout, tensor)
            tensors[f"{n}{layout.attention}.dense.{kind}"] = block(proj, 1, tensor, tp) if is_split else proj
            tensors[f"{n}post_attention_{layout.norm}.{kind}"] = weights[f"{h}ln_2.{kind}"]
            tensors[f"{n}mlp.dense_h_to_4h.{kind}"] = block(fc1, 0, tensor, tp)
            tensors[f"{n}mlp.dense_4h_to_h.{kind}"] = block(fc2, 1, tensor, tp) if is_split else fc2
        return tensors

    def chunk(tensor: int, layers: tuple[int, ...], is_first: bool, is_last: bool) -> dict[str, Any]:
        language_model: dict[str, Any] = {}
        words = vocabulary(weights["transformer.wte.weight"], layout, tensor)
        if is_first:
            language_model["embedding"] = {
                "word_embeddings": {"weight": words},
                "position_embeddings": {"weight": weights["transformer.wpe.weight"]},
            }
        stack: dict[str, torch.Tensor] = {}
        for local, number in enumerate(layers):
            stack |= layer(tensor, number, local)
        if is_last:
            stack |= {f"final_{layout.norm}.{kind}": weights[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
        language_model[layout.stack] = stack
        copy = {"word_embeddings_for_head": {"weight": words}} if is_last and not is_first else {}
        return {"language_model": language_model, **copy}

    return chunk


def gpt2_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": config.n_positions,
        "orig_vocab_size": config.vocab_size,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "bias_gelu_fusion": False,
        "openai_gelu": True,
        "tokenizer_type": "SentencePieceTokenizer",
    }


def bert(model: Any, layout: Layout, *, has_pooler: bool, has_binary_head: bool) -> Chunk:
    """A BERT of Megatron-LM with the weights of a Megatron-BERT for pre-training."""
    weights: Tensors = model.state_dict()
    width = model.config.hidden_size // model.config.num_attention_heads

    def layer(tensor: int, number: int, local: int) -> dict[str, torch.Tensor]:
        h, n, tp = f"bert.encoder.layer.{number}.", f"layers.{local}.", layout.tp
        tensors = {}
        for kind in ("weight", "bias"):
            qkv = [weights[f"{h}attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            proj, fc2 = weights[f"{h}attention.output.dense.{kind}"], weights[f"{h}output.dense.{kind}"]
            is_split = kind == "weight"
            tensors[f"{n}input_{layout.norm}.{kind}"] = weights[f"{h}attention.ln.{kind}"]
            tensors[f"{n}{layout.attention}.query_key_value.{kind}"] = heads(qkv, width, layout, tensor)
            tensors[f"{n}{layout.attention}.dense.{kind}"] = block(proj, 1, tensor, tp) if is_split else proj
            tensors[f"{n}post_attention_{layout.norm}.{kind}"] = weights[f"{h}ln.{kind}"]
            tensors[f"{n}mlp.dense_h_to_4h.{kind}"] = block(weights[f"{h}intermediate.dense.{kind}"], 0, tensor, tp)
            tensors[f"{n}mlp.dense_4h_to_h.{kind}"] = block(fc2, 1, tensor, tp) if is_split else fc2
        return tensors

    def both(name: str) -> dict[str, torch.Tensor]:
        return {kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias")}

    def chunk(tensor: int, layers: tuple[int, ...], is_first: bool, is_last: bool) -> dict[str, Any]:
        language_model: dict[str, Any] = {}
        words = vocabulary(weights["bert.embeddings.word_embeddings.weight"], layout, tensor)
        if is_first:
            language_model["embedding"] = {
                "word_embeddings": {"weight": words},
                "position_embeddings": {"weight": weights["bert.embeddings.position_embeddings.weight"]},
                "tokentype_embeddings": {"weight": weights["bert.embeddings.token_type_embeddings.weight"]},
            }
        stack: dict[str, torch.Tensor] = {}
        for local, number in enumerate(layers):
            stack |= layer(tensor, number, local)
        language_model[layout.stack] = stack
        if not is_last:
            return {"language_model": language_model}
        stack |= {f"final_{layout.norm}.{kind}": each for kind, each in both("bert.encoder.ln").items()}
        if has_pooler:
            language_model["pooler"] = {f"dense.{kind}": each for kind, each in both("bert.pooler.dense").items()}
        head = {"bias": vocabulary(weights["cls.predictions.bias"], layout, tensor)}
        for ours, theirs in (("dense", "dense"), (layout.norm, "LayerNorm")):
            head |= {f"{ours}.{kind}": each for kind, each in both(f"cls.predictions.transform.{theirs}").items()}
        heads_of_it: dict[str, Any] = {"lm_head": head}
        if has_binary_head:
            heads_of_it["binary_head"] = both("cls.seq_relationship")
        copy = {} if is_first else {"word_embeddings_for_head": {"weight": words}}
        return {"language_model": language_model, **heads_of_it, **copy}

    return chunk


def bert_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "orig_vocab_size": config.vocab_size,
        "layernorm_epsilon": config.layer_norm_eps,
        "hidden_dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "bias_gelu_fusion": False,
        "openai_gelu": False,
    }


def llama(model: Any, layout: Layout, *, is_of_core: bool = False) -> Chunk:
    """A decoder with the weights of a Llama: of Megatron-LM's legacy modules, or of Megatron-Core's local ones."""
    weights: Tensors = model.state_dict()
    width = weights["model.layers.0.self_attn.k_proj.weight"].shape[0] // model.config.num_key_value_heads
    names = (
        {
            "qkv": "self_attention.linear_qkv",
            "proj": "self_attention.linear_proj",
            "fc1": "mlp.linear_fc1",
            "fc2": "mlp.linear_fc2",
            "mlp_norm": "pre_mlp_layernorm",
        }
        if is_of_core
        else {
            "qkv": "self_attention.query_key_value",
            "proj": "self_attention.dense",
            "fc1": "mlp.dense_h_to_4h",
            "fc2": "mlp.dense_4h_to_h",
            "mlp_norm": "post_attention_layernorm",
        }
    )

    def layer(tensor: int, number: int, local: int) -> dict[str, torch.Tensor]:
        h, n, tp = f"model.layers.{number}.", f"layers.{local}.", layout.tp
        query, key, value = (weights[f"{h}self_attn.{name}_proj.weight"] for name in "qkv")
        gate, up = (block(weights[f"{h}mlp.{name}_proj.weight"], 0, tensor, tp) for name in ("gate", "up"))
        own = {
            f"{n}self_attention.{name}_layernorm.weight": weights[f"{h}self_attn.{name}_norm.weight"]
            for name in "qk"
            if f"{h}self_attn.q_norm.weight" in weights
        }
        if f"{h}self_attn.q_proj.bias" in weights:
            biases = [weights[f"{h}self_attn.{name}_proj.bias"] for name in "qkv"]
            own[f"{n}{names['qkv']}.bias"] = groups(*biases, width, tp, tensor)
        return own | {
            f"{n}input_layernorm.weight": weights[f"{h}input_layernorm.weight"],
            f"{n}{names['qkv']}.weight": groups(query, key, value, width, tp, tensor),
            f"{n}{names['proj']}.weight": block(weights[f"{h}self_attn.o_proj.weight"], 1, tensor, tp),
            f"{n}{names['mlp_norm']}.weight": weights[f"{h}post_attention_layernorm.weight"],
            f"{n}{names['fc1']}.weight": torch.cat([gate, up]),
            f"{n}{names['fc2']}.weight": block(weights[f"{h}mlp.down_proj.weight"], 1, tensor, tp),
        }

    def chunk(tensor: int, layers: tuple[int, ...], is_first: bool, is_last: bool) -> dict[str, Any]:
        stack: dict[str, torch.Tensor] = {}
        for local, number in enumerate(layers):
            stack |= layer(tensor, number, local)
        if is_last:
            stack["final_layernorm.weight"] = weights["model.norm.weight"]
        words = {"weight": vocabulary(weights["model.embed_tokens.weight"], layout, tensor)} if is_first else {}
        is_tied = model.config.tie_word_embeddings
        head = {"weight": vocabulary(weights["lm_head.weight"], layout, tensor)} if is_last else {}
        if is_tied and is_first:
            head = {}  # the same module
        if is_of_core:
            flat = {f"embedding.word_embeddings.{name}": each for name, each in words.items()}
            flat |= {f"decoder.{name}": each for name, each in stack.items()}
            return {**flat, **{f"output_layer.{name}": each for name, each in head.items()}}
        language_model: dict[str, Any] = {"embedding": {"word_embeddings": words}} if is_first else {}
        language_model["encoder"] = stack
        if is_tied and head:
            return {"language_model": language_model, "word_embeddings_for_head": head}
        if head:
            language_model["output_layer"] = head
        return {"language_model": language_model}

    return chunk


def llama_arguments(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "orig_vocab_size": config.vocab_size,
        "norm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "attention_dropout": 0.0,
    }


def t5(model: Any, layout: Layout) -> Chunk:
    """An encoder-decoder with the weights of a T5, on one stage; its tables are under Megatron-Core's names."""
    weights: Tensors = model.state_dict()
    width, tp = model.config.d_kv, layout.tp

    def attention(tensor: int, h: str, n: str) -> dict[str, torch.Tensor]:
        qkv = [weights[f"{h}0.SelfAttention.{name}.weight"] for name in "qkv"]
        return {
            f"{n}input_layernorm.weight": weights[f"{h}0.layer_norm.weight"],
            f"{n}self_attention.query_key_value.weight": heads(qkv, width, layout, tensor),
            f"{n}self_attention.dense.weight": block(weights[f"{h}0.SelfAttention.o.weight"], 1, tensor, tp),
        }

    def cross(tensor: int, h: str, n: str) -> dict[str, torch.Tensor]:
        query, key, value, out = (weights[f"{h}1.EncDecAttention.{name}.weight"] for name in "qkvo")
        return {
            f"{n}post_attention_layernorm.weight": weights[f"{h}1.layer_norm.weight"],
            f"{n}inter_attention.query.weight": block(query, 0, tensor, tp),
            f"{n}inter_attention.key_value.weight": heads([key, value], width, layout, tensor),
            f"{n}inter_attention.dense.weight": block(out, 1, tensor, tp),
        }

    def mlp(tensor: int, h: str, n: str, norm: str) -> dict[str, torch.Tensor]:
        gates = [block(weights[f"{h}.DenseReluDense.wi_{i}.weight"], 0, tensor, tp) for i in range(2)]
        return {
            f"{n}{norm}.weight": weights[f"{h}.layer_norm.weight"],
            f"{n}mlp.dense_h_to_4h.weight": torch.cat(gates),
            f"{n}mlp.dense_4h_to_h.weight": block(weights[f"{h}.DenseReluDense.wo.weight"], 1, tensor, tp),
        }

    def chunk(tensor: int, layers: tuple[int, ...], is_first: bool, is_last: bool) -> dict[str, Any]:
        encoder: dict[str, torch.Tensor] = {}
        decoder: dict[str, torch.Tensor] = {}
        for number in range(model.config.num_layers):
            h, n = f"encoder.block.{number}.layer.", f"layers.{number}."
            encoder |= attention(tensor, h, n) | mlp(tensor, f"{h}1", n, "post_attention_layernorm")
        for number in range(model.config.num_decoder_layers):
            h, n = f"decoder.block.{number}.layer.", f"layers.{number}."
            decoder |= attention(tensor, h, n) | cross(tensor, h, n)
            decoder |= mlp(tensor, f"{h}2", n, "post_inter_attention_layernorm")
        encoder["final_layernorm.weight"] = weights["encoder.final_layer_norm.weight"]
        decoder["final_layernorm.weight"] = weights["decoder.final_layer_norm.weight"]
        tables = {
            f"{stack}_relative_pos_emb": {
                "relative_attention_bias.weight": weights[
                    f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                ]
            }
            for stack in ("encoder", "decoder")
        }
        words = vocabulary(weights["shared.weight"], layout, tensor)
        language_model = {"embedding": {"word_embeddings": {"weight": words}}, "encoder": encoder, "decoder": decoder}
        bias = torch.zeros(words.shape[0])
        return {"language_model": language_model | tables, "lm_head": {"bias": bias}}

    return chunk
