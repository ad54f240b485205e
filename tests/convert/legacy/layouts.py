"""Write Megatron-LM checkpoints of any layout from Hugging Face weights, shard by shard.

An independent implementation that uses nothing of the package: names, row orders, directories and pickles.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Stages = tuple[tuple[tuple[int, ...], ...], ...]
"""Global layer numbers per pipeline stage and model chunk."""

FIRST_RELEASES = {".encoder.": ".transformer.", "self_attention.": "attention."}
"""Parts of tensor names that the first releases spelled differently; likewise below for other writers."""
LAST_RELEASES = {"layernorm.": "norm."}
TRANSFORMER_ENGINE = {
    "input_layernorm.": "self_attention.layernorm_qkv.layer_norm_",
    "self_attention.query_key_value.": "self_attention.layernorm_qkv.",
    "self_attention.dense.": "self_attention.proj.",
    "post_attention_layernorm.": "layernorm_mlp.layer_norm_",
    "mlp.dense_h_to_4h.": "layernorm_mlp.fc1_",
    "mlp.dense_4h_to_h.": "layernorm_mlp.fc2_",
    "final_layernorm.": "final_norm.",
}
MEGATRON_CORE = {
    "language_model.encoder.": "decoder.",
    "language_model.": "",
    "query_key_value": "linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "word_embeddings_for_head": "output_layer",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout and format of a checkpoint."""

    stages: Stages
    version: float | None = 3.0
    """``checkpoint_version``; None omits it, as the first releases did."""
    tp: int = 1
    names: Mapping[str, str] = field(default_factory=dict)
    """Replacements in the usual tensor names."""
    padding: int = 3
    """Rows of vocabulary padding, on the last rank."""
    padding_is_zero: bool = False
    """Otherwise padding repeats the last row, which a reader must drop."""
    dtype: torch.dtype = torch.float32
    is_zip: bool = True
    """Torch's format since 1.6."""
    arguments: Mapping[str, Any] | None = field(default_factory=dict)
    """Additional arguments; None omits all arguments."""


def even(layers: int, pp: int = 1) -> Stages:
    """Equal stages of one chunk."""
    each = layers // pp
    return tuple((tuple(range(stage * each, (stage + 1) * each)),) for stage in range(pp))


Entry = tuple[str, str, list[Tensor]]
"""Megatron-LM's name, how tensor parallelism shards it, and the Hugging Face tensors it is made of."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model under Megatron-LM's names."""

    first: list[Entry]
    """Entries before the layers."""
    layer: Callable[[int], Iterable[Entry]]
    """Entries of a layer, by its global number."""
    last: list[Entry]
    """Entries after the layers."""
    words: Tensor
    is_tied: bool
    width: int
    """Size of an attention head."""
    arguments: dict[str, Any]


def write(
    root: Path,
    layout: Layout,
    model: Model,
    iteration: int = 40,
) -> Path:
    """Write the tracker file, and the iteration's directory with a directory and file per rank; returns the latter."""
    folder = root / f"iter_{iteration:07d}"
    pp = len(layout.stages)
    num_chunks = len(layout.stages[0])
    for stage, chunks in enumerate(layout.stages):
        for rank in range(layout.tp):
            state: dict[str, Any] = {"iteration": iteration}
            if layout.version is not None:
                state["checkpoint_version"] = layout.version
            if layout.arguments is not None:
                sizes = {
                    "tensor_model_parallel_size": layout.tp,
                    "pipeline_model_parallel_size": pp,
                }
                more = {**sizes, "consumed_train_samples": 640, **layout.arguments}
                state["args"] = Namespace(**{**model.arguments, **more})
            for number, layers in enumerate(chunks):
                is_first = stage + number == 0
                is_last = stage == pp - 1 and number == num_chunks - 1
                entries = _entries(model, layers, is_first, is_last)
                state["model" if num_chunks == 1 else f"model{number}"] = _nested(
                    entries, layout, rank, model.width
                )
            moments = {
                0: {
                    "step": 40,
                    "exp_avg": torch.ones(3),
                    "exp_avg_sq": torch.ones(3),
                }
            }
            state["optimizer"] = {
                "optimizer": {"state": moments},
                "fp32_from_fp16_params": [[torch.ones(3)]],
            }
            name = f"mp_rank_{rank:02d}" + ("" if pp == 1 else f"_{stage:03d}")
            (folder / name).mkdir(parents=True)
            file = folder / name / "model_optim_rng.pt"
            torch.save(state, file, _use_new_zipfile_serialization=layout.is_zip)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def _entries(
    model: Model, layers: tuple[int, ...], is_first: bool, is_last: bool
) -> Iterator[Entry]:
    if is_first:
        yield "language_model.embedding.word_embeddings.weight", "vocabulary", [model.words]
        yield from model.first
    for local, number in enumerate(layers):
        for name, how, tensors in model.layer(number):
            yield f"language_model.encoder.layers.{local}.{name}", how, tensors
    if is_last:
        yield from model.last
        if model.is_tied and not is_first:
            yield "word_embeddings_for_head.weight", "vocabulary", [model.words]


def _nested(
    entries: Iterator[Entry],
    layout: Layout,
    rank: int,
    width: int,
) -> dict[str, Any]:
    """One rank's shards, nested as in Megatron-LM: ["language_model"]["encoder"]["layers.0.input_layernorm.weight"]."""
    model: dict[str, Any] = {}
    for name, how, tensors in entries:
        for usual, other in layout.names.items():
            name = name.replace(usual, other)
        *outer, last = name.split(
            ".", 3 if ".embedding." in name else 2 if name.startswith("language_model") else 1
        )
        inner = model
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[last] = (
            _shard(
                how,
                tensors,
                layout,
                rank,
                width,
            )
            .to(layout.dtype)
            .clone()
        )
    return model


def load(file: Path) -> dict[str, Any]:
    """Load one rank's file with torch's loader for tensors and plain data."""
    with torch.serialization.safe_globals([Namespace]):
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def flat(
    nested: Mapping[str, Any],
    before: str = "",
) -> dict[str, Tensor]:
    """Flatten nested dictionaries of tensors; names are joined with dots."""
    tensors: dict[str, Tensor] = {}
    for name, value in nested.items():
        tensors |= (
            flat(value, f"{before}{name}.")
            if isinstance(value, Mapping)
            else {before + name: value}
        )
    return tensors


# ---- shards ---------------------------------------------------------------------------------------------------------


def _block(
    tensor: Tensor,
    axis: int,
    rank: int,
    tp: int,
) -> Tensor:
    """The rank's equal part along an axis."""
    size = tensor.shape[axis] // tp
    return tensor.narrow(axis, rank * size, size)


def _shard(
    how: str,
    tensors: list[Tensor],
    layout: Layout,
    rank: int,
    width: int,
) -> Tensor:
    """A rank's shard of a tensor."""
    first = tensors[0]
    tp = layout.tp
    if how == "whole":
        return first
    if how == "columns":
        return _block(first, 1, rank, tp)
    if how == "rows":  # also the two matrices of a gated layer
        return torch.cat([_block(tensor, 0, rank, tp) for tensor in tensors])
    if how == "vocabulary":
        rows = len(first) + layout.padding
        rows += -rows % tp
        padding = first[-1:].expand(rows - len(first), *first.shape[1:])
        return _block(
            torch.cat([first, padding * (0 if layout.padding_is_zero else 1)]),
            0,
            rank,
            tp,
        )
    if how == "groups":  # per query group: its queries, its key, its value
        num_groups = len(tensors[1]) // width
        groups = range(rank * num_groups // tp, (rank + 1) * num_groups // tp)
        return torch.cat(
            [_block(tensor, 0, group, num_groups) for group in groups for tensor in tensors]
        )
    # Queries, keys and values of the rank's heads.
    parts = [
        _block(
            each.reshape(-1, width, *each.shape[1:]),
            0,
            rank,
            tp,
        )
        for each in tensors
    ]
    # Order by version: [kind, head, width] (0), [head, width, kind] (1), [head, kind, width] (2 and later).
    ordered = torch.stack(
        parts,
        dim=0 if not layout.version else 2 if layout.version == 1.0 else 1,
    )
    return ordered.reshape(-1, *first.shape[1:])


# ---- models ---------------------------------------------------------------------------------------------------------


def _both(
    weights: Mapping[str, Tensor],
    ours: str,
    theirs: str,
) -> list[Entry]:
    """Entries of a weight and its bias, as far as they exist, which are not sharded."""
    names = ((f"{ours}.{kind}", f"{theirs}.{kind}") for kind in ("weight", "bias"))
    return [(our, "whole", [weights[their]]) for our, their in names if their in weights]


def _layer(
    weights: Mapping[str, Tensor],
    h: str,
    names: str,
    *,
    qkv: str,
    transposed: bool = False,
) -> list[Entry]:
    """Entries of a layer; ``names``: both norms, query-key-value, attention output, and the MLP's two matrices."""
    norm, mlp_norm, queries, proj, fc1, fc2 = names.split()
    entries = [
        *_both(weights, "input_layernorm", h + norm),
        *_both(weights, "post_attention_layernorm", h + mlp_norm),
    ]
    for kind in ("weight", "bias"):
        second = "columns" if kind == "weight" else "whole"
        for ours, how, theirs in (
            ("self_attention.query_key_value", qkv, queries),
            ("self_attention.dense", second, proj),
            ("mlp.dense_h_to_4h", "rows", fc1),
            ("mlp.dense_4h_to_h", second, fc2),
        ):
            parts = [
                weights[f"{h}{name}.{kind}"]
                for name in theirs.split(",")
                if f"{h}{name}.{kind}" in weights
            ]
            if transposed:  # GPT-2's Conv1D: transposed, with fused queries, keys and values
                parts = [part.t() for part in parts]
                parts = list(parts[0].chunk(3)) if how == qkv else parts
            entries += [(f"{ours}.{kind}", how, parts)] if parts else []
    return entries


def gpt2(model: Any) -> Model:
    """Describe a GPT-2 as Megatron-LM's GPT."""
    weights = model.state_dict()
    config = model.config
    names = "ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
    positions = weights["transformer.wpe.weight"]
    return Model(
        first=[("language_model.embedding.position_embeddings.weight", "whole", [positions])],
        layer=lambda number: _layer(
            weights, f"transformer.h.{number}.", names, qkv="heads", transposed=True
        ),
        last=_both(weights, "language_model.encoder.final_layernorm", "transformer.ln_f"),
        words=weights["transformer.wte.weight"],
        is_tied=True,
        width=config.n_embd // config.n_head,
        arguments={
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
        },
    )


def bert(
    model: Any,
    *,
    has_pooler: bool = True,
    has_binary_head: bool = True,
) -> Model:
    """Describe a Megatron-BERT for pre-training as Megatron-LM's BERT."""
    weights = model.state_dict()
    config = model.config
    qkv = ",".join(f"attention.self.{name}" for name in ("query", "key", "value"))
    names = f"attention.ln ln {qkv} attention.output.dense intermediate.dense output.dense"
    tables = [
        (
            f"language_model.embedding.{ours}_embeddings.weight",
            "whole",
            [weights[f"bert.embeddings.{theirs}.weight"]],
        )
        for ours, theirs in (
            ("position", "position_embeddings"),
            ("tokentype", "token_type_embeddings"),
        )
    ]
    return Model(
        first=tables,
        layer=lambda number: _layer(weights, f"bert.encoder.layer.{number}.", names, qkv="heads"),
        last=[
            *_both(weights, "language_model.encoder.final_layernorm", "bert.encoder.ln"),
            *(
                _both(weights, "language_model.pooler.dense", "bert.pooler.dense")
                if has_pooler
                else []
            ),
            ("lm_head.bias", "vocabulary", [weights["cls.predictions.bias"]]),
            *_both(weights, "lm_head.dense", "cls.predictions.transform.dense"),
            *_both(weights, "lm_head.layernorm", "cls.predictions.transform.LayerNorm"),
            *(_both(weights, "binary_head", "cls.seq_relationship") if has_binary_head else []),
        ],
        words=weights["bert.embeddings.word_embeddings.weight"],
        is_tied=True,
        width=config.hidden_size // config.num_attention_heads,
        arguments={
            "num_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "hidden_size": config.hidden_size,
            "max_position_embeddings": config.max_position_embeddings,
            "orig_vocab_size": config.vocab_size,
            "layernorm_epsilon": config.layer_norm_eps,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "bias_gelu_fusion": False,
            "openai_gelu": False,
        },
    )


def llama(model: Any) -> Model:
    """Describe a Llama as Megatron-LM's decoder."""
    weights = model.state_dict()
    config = model.config
    qkv = ",".join(f"self_attn.{name}_proj" for name in "qkv")
    names = f"input_layernorm post_attention_layernorm {qkv} self_attn.o_proj mlp.gate_proj,mlp.up_proj mlp.down_proj"

    def layer(number: int) -> list[Entry]:
        h = f"model.layers.{number}."
        norms = [
            _both(weights, f"self_attention.{each}_layernorm", f"{h}self_attn.{each}_norm")
            for each in "qk"
        ]
        return [
            *norms[0],
            *norms[1],
            *_layer(weights, h, names, qkv="groups"),
        ]

    is_tied = config.tie_word_embeddings
    head = (
        []
        if is_tied
        else [("language_model.output_layer.weight", "vocabulary", [weights["lm_head.weight"]])]
    )
    return Model(
        first=[],
        layer=layer,
        last=[
            (
                "language_model.encoder.final_layernorm.weight",
                "whole",
                [weights["model.norm.weight"]],
            ),
            *head,
        ],
        words=weights["model.embed_tokens.weight"],
        is_tied=is_tied,
        width=len(weights["model.layers.0.self_attn.k_proj.weight"]) // config.num_key_value_heads,
        arguments={
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
            "untie_embeddings_and_output_weights": not is_tied,
            "attention_dropout": 0.0,
        },
    )
