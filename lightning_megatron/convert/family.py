"""Hugging Face model families: mapping of their configs to ``ModelConfig`` and of their weights to Megatron's.

A family is data, with one module in ``families/`` per group of similar ones. This module has what they share: config
fields, names in a stack of layers, rotary embeddings. A ``Rule`` maps one Megatron tensor to Hugging Face tensors: a
concatenation along the first axis, a permutation of rows, or a transposition. Rules work in both directions, for
weights and gradients, and for any slice, so that a rank reads only its own rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.adapter_names import ADAPTER_SUFFIX
from lightning_megatron.models.config import Activation, Adapters, ModelConfig, RopeScaling
from lightning_megatron.models.rotary import scaled_frequencies

LAYER = "{layer}"
"""Placeholder for the layer index (from 0) in Hugging Face names."""
EXPERT = "{expert}"
"""Placeholder for the expert index (from 0) in Hugging Face names."""
POSITIONS = "embedding.position_embeddings.weight"
"""Megatron's learned position embeddings."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron's tensors with one row per token of the vocabulary, and vocabulary padding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """Mapping of one Megatron tensor (of every layer, if it is in a layer) to Hugging Face tensors."""

    megatron: str
    """Key in Megatron's sharded state dict without layer index, e.g. ``decoder.layers.mlp.linear_fc1.weight``."""
    hugging_face: tuple[str, ...]
    """Names with ``LAYER`` and ``EXPERT`` placeholders, of the tensors to concatenate along the first axis. An empty
    name stands for zeros that no file stores."""
    rows: tuple[int, ...] = ()
    """Rows of each Hugging Face tensor; empty if there is only one."""
    order: torch.Tensor | None = None
    """[rows], int64: ``order[i]`` is the row of the concatenation that is Megatron's row i; None: the same order."""
    transposed: bool = False
    """Whether Hugging Face stores the transposed weight (GPT-2's Conv1D)."""

    def names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """Hugging Face names in one layer, of one expert."""
        return tuple(
            name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
            for name in self.hugging_face
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face names without ``.weight``."""
        return tuple(name.removesuffix(".weight") for name in self.hugging_face)

    def tensors(
        self, shape: tuple[int, ...], layer: int | None, expert: int | None
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the Hugging Face tensors that form a Megatron tensor of ``shape``."""
        rows = self.rows or (shape[0],)
        assert sum(rows) == shape[0], f"{self.megatron} has {shape[0]} rows, its rule {sum(rows)}"
        shapes = [(length, *shape[1:]) for length in rows]
        named = zip(self.names(layer, expert), shapes, strict=True)
        return {name: size[::-1] if self.transposed else size for name, size in named if name}


def qkv_order(num_attention_heads: int, num_query_groups: int, kv_channels: int) -> torch.Tensor:
    """Row permutation from [all queries, all keys, all values] to Megatron's fused QKV, grouped by query group.

    In Megatron's order each group has its queries, then its key, then its value. Cross-attention, which has no queries
    here (0 heads), has each head's key, then its value.

    Returns:
        [(heads + 2 * groups) * kv_channels], int64, for ``Rule.order``.
    """
    per_group = num_attention_heads // num_query_groups
    queries = torch.arange(num_attention_heads).view(num_query_groups, per_group)
    keys = num_attention_heads + torch.arange(num_query_groups)[:, None]
    values = keys + num_query_groups
    heads = torch.cat([queries, keys, values], dim=1).flatten()
    return (heads[:, None] * kv_channels + torch.arange(kv_channels)).flatten()


_LINEAR = re.compile(r"\w+\.layers\.\w+\.linear_\w+")


def linear_rules(rules: Sequence[Rule]) -> dict[str, Rule]:
    """Weight rules of the linear layers of attention and MLPs (not of experts), by Megatron's module name."""
    named = {
        rule.megatron.removesuffix(".weight"): rule
        for rule in rules
        if rule.megatron.endswith(".weight")
    }
    return {name: rule for name, rule in named.items() if _LINEAR.fullmatch(name)}


def adapter_rules(rules: Sequence[Rule], adapters: Adapters) -> list[Rule]:
    """Rules of the adapter weights, with the names in ``peft``'s files.

    For a linear layer that fuses several matrices, A concatenates their A along the first axis; B is split and ordered
    as the rows of the weight, and is zero for a matrix without adapter.
    """
    linears, lora = linear_rules(rules), []
    for name, parts in adapters.linears:
        rule = linears[name]
        modules = [f"base_model.model.{module}" for module in rule.modules]
        adapted = tuple(f"{module}.lora_A.weight" for module in itertools.compress(modules, parts))
        rows = (adapters.rank,) * len(adapted)
        lora.append(Rule(megatron=f"{name}{ADAPTER_SUFFIX}.A", hugging_face=adapted, rows=rows))
        named = zip(modules, parts, strict=True)
        matrices = tuple(f"{module}.lora_B.weight" if has_one else "" for module, has_one in named)
        lora.append(
            Rule(
                megatron=f"{name}{ADAPTER_SUFFIX}.B",
                hugging_face=matrices,
                rows=rule.rows,
                order=rule.order,
            )
        )
    return lora


# ---- families -------------------------------------------------------------------------------------------------------

Fields: TypeAlias = Mapping[str, Any]
"""Some fields of a ``ModelConfig``."""
LLAMA: Fields = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
"""Fields in which Llama differs from GPT-2, besides rotary embeddings."""

_FIELD_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size ffn_hidden_size ffn_dim d_ff",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads num_attention_heads",
    "vocab_size": "vocab_size",
    "num_tokentypes": "type_vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon",
    "activation": "hidden_act activation_function activation",
    "add_qkv_bias": "attention_bias use_qkv_bias qkv_bias use_bias enable_bias bias",
    "add_attention_output_bias": "attention_bias",
    "add_bias_linear": "mlp_bias use_bias enable_bias bias",
    "parallel_attention": "use_parallel_residual parallel_attn",
    "sliding_window": "sliding_window",
    "softmax_scale": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_multiplier": "logit_scale",
    "attention_softcap": "attn_logit_softcapping",
    "logits_softcap": "final_logit_softcapping",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    "embedding_dropout": "embd_pdrop embedding_dropout",
    "hidden_dropout": "hidden_dropout hidden_dropout_prob resid_pdrop residual_dropout dropout",
    "attention_dropout": "attention_dropout attn_pdrop attention_probs_dropout_prob",
    "init_method_std": "initializer_range init_std initializer_factor",
}
"""Fields of a ``ModelConfig``, and their common names in Hugging Face configs; the first that a config has is used."""


def has_field(hf: Any, name: str) -> bool:
    """Whether the class of a Hugging Face config object has a field; its models read no other keys of a file."""
    return name in hf.__dataclass_fields__ or name in hf.attribute_map


def config_field_names(hf: Any) -> dict[str, str]:
    """Fields of a ``ModelConfig`` that a Hugging Face config object has under a common name, and that name."""
    found = {
        ours: [name for name in names.split() if has_field(hf, name)]
        for ours, names in _FIELD_NAMES.items()
    }
    return {ours: names[0] for ours, names in found.items() if names}


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Hugging Face's module names in a stack of layers; the model config decides which of them exist."""

    base: str = "model."
    """Prefix of the headless model's names in files of a model with a head."""
    embedding: str = "embed_tokens"
    positions: str = "position_embeddings"
    """Learned position embeddings; in most families only variants (models/config.py) have them."""
    embedding_norm: str = ""
    final_norm: str = "norm"
    layer: str = f"layers.{LAYER}."
    """Prefix of the names below."""
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one fused matrix."""
    is_megatron_order: bool = False
    """Whether a fused matrix is in Megatron's order, by query group, not all queries, all keys, all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    post_attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one fused or ungated matrix."""
    fc2: str = "mlp.down_proj"
    post_mlp_norm: str = "post_feedforward_layernorm"
    experts: str = "mlp"
    """Module of the mixture of experts, which has the router ``gate`` and ``experts.N``."""
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of each expert."""
    output: str = "lm_head"
    """Output layer in files; transformers 5 renames it to lm_head when reading them."""
    is_transposed: bool = False
    """Whether the matrices of the layers are stored transposed."""


@dataclass(frozen=True, eq=False)
class Family:
    """Mapping of one Hugging Face ``model_type`` to Megatron.

    Fields of the ``ModelConfig`` come from ``custom_fields``, else from the config under a common name, else from
    ``defaults``. ``pad_token_id`` has no common name: Hugging Face never trains that row of the input embedding; here
    the row is trained where the token is part of a sentence, and padding is excluded by the attention mask.
    """

    model_type: str
    """``model_type`` in ``config.json``."""
    architectures: Mapping[str, str]
    """Hugging Face class with the head of each task; the first task is the default."""
    defaults: Fields
    """Fields of all models of the family, unless the config says otherwise."""
    custom_fields: Callable[[Any], Fields] = lambda hf_config: {}
    """Fields computed from a Hugging Face config object of this type; they override all others."""
    names: DecoderNames = DecoderNames()
    """Hugging Face's names of the weights."""
    rules: Callable[[DecoderNames, ModelConfig], Sequence[Rule]] = lambda names, model: (
        decoder_rules(names, model)
    )
    """Returns the rules of all weights of a model, including its head."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config fields that change the result, and their supported values; any other value raises."""
    partial_rotary: bool = False
    """See ``read_rope``."""

    def describe(self, hf: Any) -> ModelConfig:
        """Build the ``ModelConfig`` of a Hugging Face config object of this type, without its task.

        Raises:
            ConfigError: If the config has an unsupported value.
        """
        custom = dict(self.custom_fields(hf))
        if has_field(hf, "rope_parameters") and "position_embedding_type" not in custom:
            base, scaling = read_rope(hf, hf.rope_parameters, partial_rotary=self.partial_rotary)
            custom |= {
                "position_embedding_type": "rope",
                "rotary_base": base,
                "rope_scaling": scaling,
            }
            if self.partial_rotary:
                custom["rotary_percent"] = float(
                    (hf.rope_parameters or {}).get("partial_rotary_factor") or 1.0
                )
        if has_field(hf, "layer_types") and "sliding_window" not in custom:
            custom |= window_fields(hf)
        fields = {"scaled_residual_init": False, "kv_channels": head_dim(hf), **self.defaults}
        for ours, name in config_field_names(hf).items():
            if ours not in custom:
                fields[ours] = (
                    activation(getattr(hf, name)) if ours == "activation" else getattr(hf, name)
                )
        return ModelConfig(family=self.model_type, **{**fields, **custom})

    def task_of(self, hf_config: Any, task: str | None = None) -> str:
        """The task: ``task`` if given, else that of the config's ``architectures``, else the family's first one.

        Raises:
            ConfigError: If this family has no such task.
        """
        named = task or (getattr(hf_config, "architectures", None) or [None])[0]
        if task is None and (named is None or str(named).endswith("Model")):
            return next(iter(self.architectures))
        for known, architecture in self.architectures.items():
            if named in (known, architecture):
                return known
        raise ConfigError(
            f"{'architectures' if task is None else 'task'}={named!r} is unknown to {self.model_type} models; choose "
            f"from {', '.join(self.architectures)}, in config.json {', '.join(self.architectures.values())}"
        )

    def model_config(self, hf_config: Any, task: str | None = None) -> ModelConfig:
        """Convert a Hugging Face config object to a ``ModelConfig``, checking all fields.

        Args:
            hf_config: A Hugging Face config object of this type.
            task: Task of the head; None: that of the config.

        Raises:
            ConfigError: If a field has a value that this family does not support, or there is no such task.
        """
        for name, supported in self.required.items():
            value = getattr(hf_config, name, supported[0])
            if value not in supported:
                choices = " or ".join(repr(v) for v in supported)
                raise ConfigError(
                    f"{name}={value!r} of this {self.model_type} config changes the result and is not supported; "
                    f"use {name}={choices}"
                )
        try:
            return replace(self.describe(hf_config), task=self.task_of(hf_config, task))
        except (
            ArithmeticError,
            AttributeError,
            IndexError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(error, ConfigError):
                raise
            # transformers does not validate all fields of a config.json.
            raise ConfigError(
                f"the {self.model_type} config is invalid ({error}); correct it"
            ) from error


def causal_lm(name: str) -> Mapping[str, str]:
    """``Family.architectures`` of a decoder whose Hugging Face class is ``{name}ForCausalLM``."""
    return {"causal_lm": f"{name}ForCausalLM"}


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation(name: str) -> Activation:
    """Megatron's name of a Hugging Face activation function.

    Raises:
        ConfigError: If it is not supported.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


_MAX_HEAD_DIM = 1 << 16


def head_dim(hf: Any) -> int:
    """Size of an attention head: the config's ``head_dim``, else hidden_size / num_attention_heads.

    Raises:
        ConfigError: If num_attention_heads does not divide hidden_size, or heads are too large.
    """
    if width := getattr(hf, "head_dim", None):
        if width > _MAX_HEAD_DIM:  # rotary frequencies are computed for every pair of dimensions
            raise ConfigError(
                f"head_dim={width}: expected at most {_MAX_HEAD_DIM}; correct the model's config"
            )
        return int(width)
    require_divides("num_attention_heads", hf.num_attention_heads, "hidden_size", hf.hidden_size)
    return int(hf.hidden_size // hf.num_attention_heads)


def window_fields(hf: Any) -> dict[str, Any]:
    """Sliding window and its layers from ``layer_types``, as fields of a ``ModelConfig``.

    Raises:
        ConfigError: If a layer type is unknown, or the size of the window is not set.
    """
    unknown = sorted(set(hf.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"layer_types has {unknown[0]!r}, which is not supported; use 'full_attention' or 'sliding_attention'"
        )
    windowed = tuple(i for i, kind in enumerate(hf.layer_types) if kind == "sliding_attention")
    if windowed and not hf.sliding_window:  # Qwen 2 MoE sets 0 if it is not used
        raise ConfigError(
            "layer_types has 'sliding_attention', but use_sliding_window is not True and sliding_window is not set; "
            "set both, or use 'full_attention'"
        )
    return {
        "sliding_window": hf.sliding_window if windowed else None,
        "sliding_window_layers": windowed or None,
    }


# ---- rules ----------------------------------------------------------------------------------------------------------


def linear(
    megatron: str,
    hugging_face: tuple[str, ...],
    has_bias: bool = False,
    *,
    rows: tuple[int, ...] = (),
    order: torch.Tensor | None = None,
    transposed: bool = False,
) -> list[Rule]:
    """Rules of a linear layer: weight and, if ``has_bias``, bias; arguments as in ``Rule``, without ``.weight``."""
    weights, biases = (
        tuple(f"{name}.{kind}" for name in hugging_face) for kind in ("weight", "bias")
    )
    rules = [
        Rule(
            megatron=megatron + ".weight",
            hugging_face=weights,
            rows=rows,
            order=order,
            transposed=transposed,
        )
    ]
    if has_bias:
        rules.append(Rule(megatron=megatron + ".bias", hugging_face=biases, rows=rows, order=order))
    return rules


def norm(megatron: str, hugging_face: str, model: ModelConfig) -> list[Rule]:
    """Rules of a norm: weight and, for most LayerNorms, bias; ``megatron`` is the name up to ``weight``."""
    kinds = (
        ("weight", "bias")
        if model.normalization == "LayerNorm" and model.norm_bias
        else ("weight",)
    )
    return [
        Rule(megatron=megatron + kind, hugging_face=(f"{hugging_face}.{kind}",)) for kind in kinds
    ]


def output_layer(model: ModelConfig, name: str = "lm_head") -> list[Rule]:
    """Rule of the output layer; none if it is tied to the embedding."""
    if model.share_embeddings_and_output_weights:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=(f"{name}.weight",))]


def stack_rules(names: DecoderNames, model: ModelConfig, stack: str = "decoder") -> list[Rule]:
    """Rules of a stack (``encoder`` or ``decoder``): attention and MLP of its layers, and its final norm."""
    hf, transposed = names.base + names.layer, names.is_transposed
    attention, mlp = f"{stack}.layers.self_attention.", f"{stack}.layers.mlp."
    queries, keys = (
        model.num_attention_heads * model.kv_channels,
        model.num_query_groups * model.kv_channels,
    )
    order = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)

    def fused(parts: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, Any]:
        return {
            "hugging_face": tuple(hf + part for part in parts),
            "rows": rows if len(parts) > 1 else (),
        }

    qkv, fc1 = (
        fused(names.qkv, (queries, keys, keys)),
        fused(names.fc1, (model.ffn_hidden_size,) * 2),
    )
    qkv["order"] = None if names.is_megatron_order else order
    norms = {
        "self_attention.linear_qkv.layer_norm_": (model.pre_norms, names.input_norm),
        "mlp.linear_fc1.layer_norm_": (model.has_mlp_norm, names.mlp_norm),
        "self_attention.q_layernorm.": (model.qk_layernorm, names.q_norm),
        "self_attention.k_layernorm.": (model.qk_layernorm, names.k_norm),
        "self_attention.linear_proj.post_layernorm.": (model.post_norms, names.post_attention_norm),
        "mlp.linear_fc2.post_layernorm.": (model.post_norms, names.post_mlp_norm),
    }
    rules = [
        *norm(f"{stack}.final_layernorm.", names.base + names.final_norm, model),
        *linear(
            attention + "linear_qkv", has_bias=model.add_qkv_bias, transposed=transposed, **qkv
        ),
        *linear(
            attention + "linear_proj",
            (hf + names.proj,),
            model.has_attention_output_bias,
            transposed=transposed,
        ),
        *linear(mlp + "linear_fc1", has_bias=model.add_bias_linear, transposed=transposed, **fc1),
        *linear(
            mlp + "linear_fc2", (hf + names.fc2,), model.add_bias_linear, transposed=transposed
        ),
    ]
    for megatron, (exists, hugging_face) in norms.items():
        rules += norm(f"{stack}.layers.{megatron}", hf + hugging_face, model) if exists else []
    return rules


def decoder_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """Rules of all weights of a decoder-only model."""
    rules = [
        *linear("embedding.word_embeddings", (names.base + names.embedding,)),
        *stack_rules(names, model),
    ]
    rules += output_layer(model, names.output)
    if model.embedding_layernorm:
        rules += norm("embedding.norm.", names.base + names.embedding_norm, model)
    if model.position_embedding_type == "learned_absolute":
        rules += linear(POSITIONS.removesuffix(".weight"), (names.base + names.positions,))
    return rules + _expert_rules(names, model)


def _expert_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """Rules of the layers with experts instead of an MLP; their norm is not fused into the first linear layer."""
    experts, layers, hf = model.experts, "decoder.layers.", names.base + names.layer
    if experts is None:
        return []
    block, mlp = hf + names.experts, layers + "mlp."
    gate, up, down = (f"{block}.experts.{EXPERT}.{name}" for name in names.expert)
    rules = [
        *norm(layers + "pre_mlp_layernorm.", hf + names.mlp_norm, model),
        *linear(mlp + "router", (f"{block}.gate",)),
        *linear(
            mlp + "experts.experts.linear_fc1", (gate, up), rows=(experts.ffn_hidden_size,) * 2
        ),
        *linear(mlp + "experts.experts.linear_fc2", (down,)),
    ]
    if width := experts.shared_ffn_hidden_size:
        shared = f"{block}.shared_expert"
        fc1 = (f"{shared}.gate_proj", f"{shared}.up_proj")
        rules += linear(mlp + "shared_experts.linear_fc1", fc1, rows=(width, width))
        rules += linear(mlp + "shared_experts.linear_fc2", (f"{shared}.down_proj",))
        rules.append(
            Rule(
                megatron=mlp + "shared_experts.gate_weight", hugging_face=(f"{shared}_gate.weight",)
            )
        )
    return rules


# ---- rotary embeddings ----------------------------------------------------------------------------------------------

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_KEYS = {
    *(
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    ),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
"""Keys read by any rope type of Hugging Face. A type ignores the keys of other types, here as there."""


def read_rope(
    hf: Any, rope_parameters: Mapping[str, Any] | None, *, partial_rotary: bool = False
) -> tuple[float, RopeScaling | None]:
    """Rotary base (theta) and frequency scaling of a Hugging Face config.

    Args:
        hf: A Hugging Face config object, which has validated that the required keys of the rope type exist.
        rope_parameters: ``rope_parameters`` of the config, or of one of its layer types.
        partial_rotary: Whether Hugging Face's model of the family reads ``partial_rotary_factor``.

    Raises:
        ConfigError: If a key or the type is not supported, or the number of longrope's factors does not fit the head.
    """
    # Hugging Face treats null as absent, except that a null ``truncate`` is false.
    rope = {k: v for k, v in (rope_parameters or {}).items() if v is not None or k == "truncate"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ConfigError(
            f"rope_type={kind!r} of rope_parameters is not supported; use one of {', '.join(_TYPES)}"
        )
    for name in sorted(set(rope) - _KEYS):
        raise ConfigError(
            f"{name}={rope[name]!r} of rope_parameters is not supported; the known keys are {', '.join(sorted(_KEYS))}"
        )
    percent = rope.get("partial_rotary_factor", 1.0)
    if percent != 1.0 and not partial_rotary:
        raise ConfigError(
            f"partial_rotary_factor={percent} of rope_parameters is not supported; Hugging Face's model of this family "
            "rotates whole heads, use 1.0"
        )
    base = float(rope.get("rope_theta", 10000.0))
    return base, None if kind == "default" else _scaling(
        hf, kind, rope, int(head_dim(hf) * percent), base
    )


def _scaling(hf: Any, kind: Any, rope: Mapping[str, Any], width: int, base: float) -> RopeScaling:
    # Dynamic scaling starts from max_position_embeddings and ignores original_max_position_embeddings.
    longest = hf.max_position_embeddings
    original = (
        longest if kind == "dynamic" else int(rope.get("original_max_position_embeddings", longest))
    )
    factor = float(rope.get("factor", longest / original))
    fields: dict[str, Any] = {}
    if kind == "llama3":
        fields = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        fields = {
            name: tuple(float(x) for x in rope[name]) for name in ("short_factor", "long_factor")
        }
        if any(len(factors) != width // 2 for factors in fields.values()):
            raise ConfigError(
                f"short_factor and long_factor of rope_parameters: expected {width // 2} values, one for each pair "
                f"of a head, got {' and '.join(str(len(factors)) for factors in fields.values())}; correct them"
            )
    elif kind == "yarn":
        # Hugging Face treats 0 as absent, too.
        fields = {
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
        }
        fields["truncate"] = bool(rope.get("truncate", True))
    parameters = {**rope, **fields, "rope_type": kind, "factor": factor}
    fields["attention_factor"] = float(scaled_frequencies(parameters, width, base, original)[1])
    return RopeScaling(
        rope_type=kind, factor=factor, original_max_position_embeddings=original, **fields
    )
