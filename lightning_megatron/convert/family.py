"""Model families of Hugging Face in Megatron's words: what a config describes, and which weight is which.

A family is data, one module in ``families/`` for those that are alike; here is what they share: the fields that most
configs have, the names in a stack of layers, rotary positions. Its rules work in both directions, for weights and for
gradients, and for any slice: a rank reads only the rows that it holds. Two namings disagree on a concatenation along
the first axis, an order of rows, or a transposition.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from lightning_megatron.engine.adapter_names import ADAPTER_SUFFIX
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import Activation, Adapters, ModelConfig, RopeScaling
from lightning_megatron.models.rotary import scaled_frequencies

LAYER = "{layer}"
"""Stands for the layer's number (from 0) in Hugging Face's names."""
EXPERT = "{expert}"
"""Stands for the expert's number (from 0) there."""
POSITIONS = "embedding.position_embeddings.weight"
"""The table of learned positions."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron's tensors with a row for each token, and with rows that pad the vocabulary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One tensor (of every layer, if its name says so) in both namings."""

    megatron: str
    """Key in Megatron's sharded checkpoints without the layer's number: ``decoder.layers.mlp.linear_fc1.weight``."""
    hugging_face: tuple[str, ...]
    """Names, with ``LAYER`` where the number stands; concatenated along the first axis they are Megatron's tensor. An
    empty one is of zeros, which no file has."""
    rows: tuple[int, ...] = ()
    """Rows of each of several tensors; empty for one, which has all."""
    order: torch.Tensor | None = None
    """[rows], int64: which row of the concatenation is Megatron's i-th row; None if they are the same."""
    transposed: bool = False
    """Whether Hugging Face keeps the matrix transposed (GPT-2's Conv1D)."""

    def names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """The Hugging Face names in one layer, of one expert."""
        return tuple(name.replace(LAYER, str(layer)).replace(EXPERT, str(expert)) for name in self.hugging_face)

    @property
    def modules(self) -> tuple[str, ...]:
        """The Hugging Face names without ``.weight``."""
        return tuple(name.removesuffix(".weight") for name in self.hugging_face)

    def tensors(self, shape: tuple[int, ...], layer: int | None, expert: int | None) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the Hugging Face tensors that make a Megatron tensor of ``shape``."""
        rows = self.rows or (shape[0],)
        assert sum(rows) == shape[0], f"{self.megatron} has {shape[0]} rows, its rule {sum(rows)}"
        shapes = [(length, *shape[1:]) for length in rows]
        named = zip(self.names(layer, expert), shapes, strict=True)
        return {name: each[::-1] if self.transposed else each for name, each in named if name}


def qkv_order(num_attention_heads: int, num_query_groups: int, kv_channels: int) -> torch.Tensor:
    """From all queries, all keys, all values to Megatron's order: each group's queries, then its key, then its value.

    Cross-attention has no queries there: each head's key, then its value.

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
    """The rule of the weight of each linear of attention and MLPs, not of experts, by its name in Megatron."""
    named = {rule.megatron.removesuffix(".weight"): rule for rule in rules if rule.megatron.endswith(".weight")}
    return {name: rule for name, rule in named.items() if _LINEAR.fullmatch(name)}


def adapter_rules(rules: Sequence[Rule], adapters: Adapters) -> list[Rule]:
    """The weights of adapters, in the names of ``peft``'s files.

    A of a linear that fuses several matrices is theirs, one below the other; B is cut and ordered as its rows are, and
    those of a matrix without an adapter are zero.
    """
    linears, made = linear_rules(rules), []
    for name, parts in adapters.linears:
        rule = linears[name]
        modules = [f"base_model.model.{each}" for each in rule.modules]
        adapted = tuple(f"{module}.lora_A.weight" for module in itertools.compress(modules, parts))
        rows = (adapters.rank,) * len(adapted)
        made.append(Rule(megatron=f"{name}{ADAPTER_SUFFIX}.A", hugging_face=adapted, rows=rows))
        named = zip(modules, parts, strict=True)
        matrices = tuple(f"{module}.lora_B.weight" if has_one else "" for module, has_one in named)
        made.append(Rule(megatron=f"{name}{ADAPTER_SUFFIX}.B", hugging_face=matrices, rows=rule.rows, order=rule.order))
    return made


# ---- families -------------------------------------------------------------------------------------------------------

Fields: TypeAlias = Mapping[str, Any]
"""Some of a ``ModelConfig``."""
LLAMA: Fields = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
}
"""How Llama's mathematics differ from GPT-2's, besides rotary positions."""

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
"""Fields of a ``ModelConfig``, and what Hugging Face configs call them: the first that a config has."""


def has_field(hf: Any, name: str) -> bool:
    """Whether the class of a Hugging Face config object has a field; its models read no other key of a file."""
    return name in hf.__dataclass_fields__ or name in hf.attribute_map


def config_field_names(hf: Any) -> dict[str, str]:
    """Fields of a ``ModelConfig`` that a Hugging Face config object has under a usual name, and that name."""
    names = {ours: [name for name in theirs.split() if has_field(hf, name)] for ours, theirs in _FIELD_NAMES.items()}
    return {ours: found[0] for ours, found in names.items() if found}


@dataclass(frozen=True, kw_only=True)
class DecoderNames:
    """Hugging Face's names in a stack of layers, without ``.weight``, of which the model says which exist."""

    base: str = "model."
    """What the names of the headless model begin with, in files of a model with a head."""
    embedding: str = "embed_tokens"
    positions: str = "position_embeddings"
    """Of a variant (models/config.py), where no model of the family has learned ones."""
    embedding_norm: str = ""
    final_norm: str = "norm"
    layer: str = f"layers.{LAYER}."
    """What the following names begin with."""
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one."""
    is_megatron_order: bool = False
    """Whether one matrix has each group's queries, key and value together, not all queries, all keys, all values."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    post_attention_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one matrix."""
    fc2: str = "mlp.down_proj"
    post_mlp_norm: str = "post_feedforward_layernorm"
    experts: str = "mlp"
    """The block of experts, with a number and gate, up and down of each below it."""
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    output: str = "lm_head"
    """In files; transformers 5 calls it lm_head when it has read them."""
    is_transposed: bool = False
    """Whether the layers' matrices are kept transposed."""


@dataclass(frozen=True, eq=False)
class Family:
    """One Hugging Face ``model_type`` in Megatron's words.

    A field of the description is what ``always`` says, unless the config has it under a usual name, unless ``own`` says
    it. ``pad_token_id`` has no usual name: Hugging Face does not train that row of the input embedding, we do where the
    token stands in a sentence. Padding is told by the mask, and where it is, no row gets a gradient.
    """

    model_type: str
    """As in ``config.json``."""
    architectures: Mapping[str, str]
    """Each task and the Hugging Face class that has its head; the first one is meant where nothing is said."""
    defaults: Fields
    """What all models of the family have, beside defaults."""
    custom_fields: Callable[[Any], Fields] = lambda hf_config: {}
    """What a Hugging Face config object of this type says in a way of its own."""
    names: DecoderNames = DecoderNames()
    """What the weights are called there."""
    rules: Callable[[DecoderNames, ModelConfig], Sequence[Rule]] = lambda names, model: decoder_rules(names, model)
    """How each weight of a described model is named and laid out there and here, its head's included."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config fields that change the result, and the values that are honoured; any other value is refused by name."""
    partial_rotary: bool = False
    """As for ``read_rope``."""

    def describe(self, hf: Any) -> ModelConfig:
        """From a Hugging Face config object of this type to Megatron's description.

        Raises:
            ConfigError: If something in it cannot be computed.
        """
        own = dict(self.custom_fields(hf))
        if has_field(hf, "rope_parameters") and "position_embedding_type" not in own:
            base, scaling = read_rope(hf, hf.rope_parameters, partial_rotary=self.partial_rotary)
            own |= {"position_embedding_type": "rope", "rotary_base": base, "rope_scaling": scaling}
            if self.partial_rotary:
                own["rotary_percent"] = float((hf.rope_parameters or {}).get("partial_rotary_factor") or 1.0)
        if has_field(hf, "layer_types") and "sliding_window" not in own:
            own |= window_fields(hf)
        fields = {"scaled_residual_init": False, "kv_channels": head_dim(hf), **self.defaults}
        for ours, theirs in config_field_names(hf).items():
            if ours not in own:
                fields[ours] = activation(getattr(hf, theirs)) if ours == "activation" else getattr(hf, theirs)
        return ModelConfig(family=self.model_type, **{**fields, **own})

    def task_of(self, hf_config: Any, task: str | None = None) -> str:
        """``task`` if it is given, else what the config's ``architectures`` says, else the family's first one.

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
        """Describe ``hf_config``.

        Args:
            hf_config: A Hugging Face config object of this type.
            task: Which head; None for the one that the config names.

        Raises:
            ConfigError: If a field has a value that this family cannot honour, or there is no such task.
        """
        for name, honoured in self.required.items():
            value = getattr(hf_config, name, honoured[0])
            if value not in honoured:
                choices = " or ".join(repr(v) for v in honoured)
                raise ConfigError(
                    f"{name}={value!r} of this {self.model_type} config changes the result and is not supported; "
                    f"use {name}={choices}"
                )
        try:
            return replace(self.describe(hf_config), task=self.task_of(hf_config, task))
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            # Not all fields of a config.json have been checked by transformers.
            raise ConfigError(f"the {self.model_type} config is invalid ({error}); correct it") from error


def causal_lm(name: str) -> Mapping[str, str]:
    """The ``architectures`` of a decoder whose classes begin with ``name``."""
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
    """Megatron's name of a Hugging Face activation.

    Raises:
        ConfigError: If there is none.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def head_dim(hf: Any) -> int:
    """Numbers of a head: what a config says, else an equal share of the hidden size.

    Raises:
        ConfigError: If there are no equal shares.
    """
    if width := getattr(hf, "head_dim", None):
        return int(width)
    require_divides("num_attention_heads", hf.num_attention_heads, "hidden_size", hf.hidden_size)
    return int(hf.hidden_size // hf.num_attention_heads)


def window_fields(hf: Any) -> dict[str, Any]:
    """Which layers see how far back, from ``layer_types``, as fields of a ``ModelConfig``.

    Raises:
        ConfigError: If a layer is of an unknown type, or has a window of unknown width.
    """
    unknown = sorted(set(hf.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(
            f"layer_types has {unknown[0]!r}, which is not supported; use 'full_attention' or 'sliding_attention'"
        )
    windowed = tuple(i for i, kind in enumerate(hf.layer_types) if kind == "sliding_attention")
    if windowed and not hf.sliding_window:  # Qwen 2 MoE's is 0 where it is not used
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
    """A matrix and, if it has one, its bias; the arguments are those of ``Rule``, names without ``.weight``."""
    weights, biases = (tuple(f"{name}.{kind}" for name in hugging_face) for kind in ("weight", "bias"))
    rules = [Rule(megatron=megatron + ".weight", hugging_face=weights, rows=rows, order=order, transposed=transposed)]
    if has_bias:
        rules.append(Rule(megatron=megatron + ".bias", hugging_face=biases, rows=rows, order=order))
    return rules


def norm(megatron: str, hugging_face: str, model: ModelConfig) -> list[Rule]:
    """A norm's weight and, for most LayerNorms, its bias; ``megatron`` ends where ``weight`` begins."""
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" and model.norm_bias else ("weight",)
    return [Rule(megatron=megatron + kind, hugging_face=(f"{hugging_face}.{kind}",)) for kind in kinds]


def output_layer(model: ModelConfig, name: str = "lm_head") -> list[Rule]:
    """The output layer, if it is not the embedding."""
    if model.share_embeddings_and_output_weights:
        return []
    return [Rule(megatron="output_layer.weight", hugging_face=(f"{name}.weight",))]


def stack_rules(names: DecoderNames, model: ModelConfig, stack: str = "decoder") -> list[Rule]:
    """The layers of a stack, ``encoder`` or ``decoder``, and its final norm."""
    hf, transposed = names.base + names.layer, names.is_transposed
    attention, mlp = f"{stack}.layers.self_attention.", f"{stack}.layers.mlp."
    queries, keys = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    order = qkv_order(model.num_attention_heads, model.num_query_groups, model.kv_channels)

    def fused(parts: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, Any]:
        return {"hugging_face": tuple(hf + part for part in parts), "rows": rows if len(parts) > 1 else ()}

    qkv, fc1 = fused(names.qkv, (queries, keys, keys)), fused(names.fc1, (model.ffn_hidden_size,) * 2)
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
        *linear(attention + "linear_qkv", has_bias=model.add_qkv_bias, transposed=transposed, **qkv),
        *linear(attention + "linear_proj", (hf + names.proj,), model.has_attention_output_bias, transposed=transposed),
        *linear(mlp + "linear_fc1", has_bias=model.add_bias_linear, transposed=transposed, **fc1),
        *linear(mlp + "linear_fc2", (hf + names.fc2,), model.add_bias_linear, transposed=transposed),
    ]
    for megatron, (exists, hugging_face) in norms.items():
        rules += norm(f"{stack}.layers.{megatron}", hf + hugging_face, model) if exists else []
    return rules


def decoder_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """All weights of a decoder."""
    rules = [*linear("embedding.word_embeddings", (names.base + names.embedding,)), *stack_rules(names, model)]
    rules += output_layer(model, names.output)
    if model.embedding_layernorm:
        rules += norm("embedding.norm.", names.base + names.embedding_norm, model)
    if model.position_embedding_type == "learned_absolute":
        rules += linear(POSITIONS.removesuffix(".weight"), (names.base + names.positions,))
    return rules + _expert_rules(names, model)


def _expert_rules(names: DecoderNames, model: ModelConfig) -> list[Rule]:
    """The layers with experts instead of an MLP, whose norm is by itself."""
    experts, layers, hf = model.experts, "decoder.layers.", names.base + names.layer
    if experts is None:
        return []
    block, mlp = hf + names.experts, layers + "mlp."
    gate, up, down = (f"{block}.experts.{EXPERT}.{name}" for name in names.expert)
    rules = [
        *norm(layers + "pre_mlp_layernorm.", hf + names.mlp_norm, model),
        *linear(mlp + "router", (f"{block}.gate",)),
        *linear(mlp + "experts.experts.linear_fc1", (gate, up), rows=(experts.ffn_hidden_size,) * 2),
        *linear(mlp + "experts.experts.linear_fc2", (down,)),
    ]
    if width := experts.shared_ffn_hidden_size:
        shared = f"{block}.shared_expert"
        fc1 = (f"{shared}.gate_proj", f"{shared}.up_proj")
        rules += linear(mlp + "shared_experts.linear_fc1", fc1, rows=(width, width))
        rules += linear(mlp + "shared_experts.linear_fc2", (f"{shared}.down_proj",))
        rules.append(Rule(megatron=mlp + "shared_experts.gate_weight", hugging_face=(f"{shared}_gate.weight",)))
    return rules


# ---- rotary positions -----------------------------------------------------------------------------------------------

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
"""Some type of Hugging Face's reads them. A type that does not read one ignores it, and so do we."""


def read_rope(
    hf: Any, rope_parameters: Mapping[str, Any] | None, *, partial_rotary: bool = False
) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling of the frequencies.

    Args:
        hf: A Hugging Face config object, which has checked that a type's own keys are there.
        rope_parameters: Those of the config, or of one kind of its layers.
        partial_rotary: Whether Hugging Face's model of the family reads ``partial_rotary_factor``.

    Raises:
        ConfigError: If a key or the type is not honoured, or longrope's factors do not fit the head.
    """
    # Hugging Face takes null for absent, except that a null ``truncate`` is false.
    rope = {k: v for k, v in (rope_parameters or {}).items() if v is not None or k == "truncate"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ConfigError(f"rope_type={kind!r} of rope_parameters is not supported; use one of {', '.join(_TYPES)}")
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
    return base, None if kind == "default" else _scaling(hf, kind, rope, int(head_dim(hf) * percent), base)


def _scaling(hf: Any, kind: Any, rope: Mapping[str, Any], width: int, base: float) -> RopeScaling:
    # The config's own length is what dynamic scaling starts from, whatever else the parameters say.
    longest = hf.max_position_embeddings
    original = longest if kind == "dynamic" else int(rope.get("original_max_position_embeddings", longest))
    factor = float(rope.get("factor", longest / original))
    fields: dict[str, Any] = {}
    if kind == "llama3":
        fields = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        fields = {name: tuple(float(x) for x in rope[name]) for name in ("short_factor", "long_factor")}
        if any(len(factors) != width // 2 for factors in fields.values()):
            raise ConfigError(
                f"short_factor and long_factor of rope_parameters: expected {width // 2} numbers, one for each pair of "
                f"a head, got {' and '.join(str(len(factors)) for factors in fields.values())}; correct them"
            )
    elif kind == "yarn":
        # Hugging Face takes 0 for absent, too.
        fields = {"beta_fast": float(rope.get("beta_fast") or 32), "beta_slow": float(rope.get("beta_slow") or 1)}
        fields["truncate"] = bool(rope.get("truncate", True))
    given = {**rope, **fields, "rope_type": kind, "factor": factor}
    fields["attention_factor"] = float(scaled_frequencies(given, width, base, original)[1])
    return RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **fields)
