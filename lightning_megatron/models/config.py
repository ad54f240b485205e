"""Description of a model in Megatron's words, independent of any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from lightning_megatron.errors import ConfigError, require_choice, require_divides, require_number

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
Architecture = Literal["gpt", "bert", "t5"]
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "relative"]
Positions: TypeAlias = Literal["absolute", "rotary", "alibi"]
AttentionHeads: TypeAlias = Literal["multihead", "multiquery"]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed for contexts longer than those of the first training.

    The fields are those of Hugging Face's ``rope_parameters``; ``models/rotary.py`` names each method's source.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "longrope", "llama3"] = "llama3"
    """Which method."""
    factor: float = 8.0
    """How much longer the context is than the original."""
    original_max_position_embeddings: int = 8192
    """Context length of the first training, in tokens."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than ``original_max_position / low_freq_factor`` are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than ``original_max_position / high_freq_factor`` are kept."""
    attention_factor: float = 1.0
    """yarn, longrope: what sines and cosines are multiplied by (derived from ``factor`` where the config is silent)."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context are kept."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this over the original context are divided by ``factor``."""
    truncate: bool = True
    """yarn: whether the borders of the blend are rounded to whole pairs."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency for sequences within the original context."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same for longer sequences."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies are others in longer sequences."""
        return self.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters (LoRA) beside frozen linears, in the engine's words; users write ``LoRA``."""

    rank: int
    """Width r between the two matrices of an adapter."""
    alpha: float
    """What adapters give is multiplied by alpha / r."""
    linears: tuple[tuple[str, tuple[bool, ...]], ...]
    """Each adapted linear, as checkpoints name it without a layer's number, and which of the matrices that it fuses
    (queries, keys, values; gate, up) have an adapter; one entry for a linear that fuses none."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts: a router sends each token to the best few of many MLPs (Shazeer et al. 2017, 1701.06538).

    No token is dropped. The router's logits and probabilities are fp32.
    """

    num_experts: int
    """MLPs of a layer."""
    topk: int
    """How many of them a token goes through."""
    ffn_hidden_size: int
    """Width of each one."""
    shared_ffn_hidden_size: int = 0
    """Width of an MLP that all tokens go through, too, times a sigmoid of its own gate (Qwen 2); 0 for none."""
    normalizes_topk: bool = True
    """Whether the probabilities of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers (from 0) that have an ordinary MLP instead."""
    load_balancing_loss_coef: float = 0.0
    """What the auxiliary loss is multiplied by before it is added; see ``engine/fillers/experts.py``."""

    def __post_init__(self) -> None:
        """Check the numbers against each other.

        Raises:
            ConfigError: If a size is not positive, or a token shall go through more experts than there are.
        """
        for name in ("num_experts", "topk", "ffn_hidden_size"):
            require_number(name, getattr(self, name), at_least=1)
        if self.topk > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok: expected at most num_experts={self.num_experts}, got {self.topk}; correct the "
                "model's config"
            )
        if self.topk == 1 and self.normalizes_topk:
            raise ConfigError(
                "num_experts_per_tok=1: expected at least 2 where the probabilities of the chosen experts are "
                "normalized, as one would always be 1 and the router learn nothing; use norm_topk_prob=False, or more"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the mathematics of a GPT, BERT or T5; the same for every parallel layout."""

    family: str
    """Hugging Face ``model_type`` that this model was described by, e.g. ``gpt2``."""
    architecture: Architecture = "gpt"
    """Decoder only, encoder only, or encoder and decoder."""
    task: str = "causal_lm"
    """What the head is for; one of the keys of the family's ``architectures``."""
    num_layers: int
    """Transformer layers; for T5 those of the encoder."""
    num_decoder_layers: int = 0
    """T5: layers of the decoder."""
    hidden_size: int
    """Width h of the residual stream."""
    ffn_hidden_size: int
    """Width of the MLP (of one of the two branches if gated)."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key/value heads: equal to ``num_attention_heads`` for MHA, fewer for GQA, 1 for MQA."""
    kv_channels: int
    """Width of one head."""
    vocab_size: int
    """True vocabulary, without padding."""
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of every norm."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance."""
    activation: Activation = "gelu"
    """Non-linearity of the MLP."""
    gated_linear_unit: bool = False
    """Whether the MLP multiplies a gate branch with an up branch (SwiGLU if ``activation`` is silu)."""
    add_bias_linear: bool = True
    """Biases of the MLP, and of the attention's output projection unless ``add_attention_output_bias`` is set."""
    add_qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    add_attention_output_bias: bool | None = None
    """Bias of the attention's output projection; None: as ``add_bias_linear``."""
    norm_bias: bool = True
    """Whether LayerNorms have a bias (not Cohere's)."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight (Gemma)."""
    pre_norms: bool = True
    """Whether attention and MLP read a normalized input (not OLMo 2's)."""
    post_norms: bool = False
    """Whether what attention and MLP return is normalized before it is added (Gemma 2, OLMo 2, GLM-4)."""
    qk_layernorm: bool = False
    """Whether each head's queries and keys are normalized before positions enter (Qwen 3)."""
    qk_layernorm_of_all_heads: bool = False
    """For ``qk_layernorm``: whether all heads are normalized as one (OLMo 2), not each alone."""
    embedding_layernorm: bool = False
    """Whether the embeddings are normalized (Bloom)."""
    parallel_attention: bool = False
    """Whether attention and MLP both read the layer's input and are added to it together (Falcon)."""
    parallel_attention_norms: Literal[1, 2] = 1
    """For ``parallel_attention``: whether both read the same normalized input, or each has a norm of its own."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """How positions enter."""
    rotary_base: float = 10000.0
    """Theta of rotary embeddings."""
    rotary_base_of_windows: float | None = None
    """Theta in layers with a sliding window, whose frequencies are not scaled; None: as in the others (Gemma 3)."""
    rotary_percent: float = 1.0
    """Share of each head, from its first number on, that is rotated (GPT-NeoX)."""
    rotary_interleaved: bool = False
    """Whether neighbours are the pairs that turn (Cohere, GLM-4), not the halves of what is rotated."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers (from 0) that rotate nothing (SmolLM 3)."""
    position_offset: int = 0
    """Learned positions: rows before that of position 0; if any, positions count tokens, not padding (OPT)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None leaves them."""
    alibi_scaled: bool = False
    """ALiBi: whether the bias is scaled with the scores and rounded to bf16 (Falcon), or neither (Bloom)."""
    relative_attention_num_buckets: int = 32
    """T5: rows of the table of relative positions."""
    relative_attention_max_distance: int = 128
    """T5: distances from here on share one row."""
    softmax_scale: float | None = None
    """What scores are multiplied by; None for 1 / sqrt(kv_channels)."""
    attention_softcap: float | None = None
    """Scores x become cap * tanh(x / cap) before masks (Gemma 2); None leaves them."""
    logits_softcap: float | None = None
    """The same for logits (Gemma 2)."""
    embedding_multiplier: float = 1.0
    """What embeddings are multiplied by (Gemma, Granite)."""
    residual_multiplier: float = 1.0
    """What the outputs of attention and MLP are multiplied by before they are added (Granite)."""
    logits_multiplier: float = 1.0
    """What logits are multiplied by, before their cap (Granite, Cohere)."""
    sliding_window: int | None = None
    """How many tokens back, itself included, a token sees; None for all."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers (from 0) with the window; None for all."""
    experts: Experts | None = None
    """GPT: the experts in place of MLPs; None for none."""
    num_tokentypes: int = 0
    """BERT: kinds of segments; 0 for no such embedding."""
    num_labels: int = 2
    """Classification: width of the head."""
    problem_type: ProblemType | None = None
    """Sequence classification: which loss; None: as Hugging Face tells it from ``num_labels`` and the labels' dtype."""
    scale_decoder_outputs: bool = False
    """T5: whether the decoder's output is multiplied by 1 / sqrt(hidden_size) before the head."""
    decoder_start_token_id: int = 0
    """T5: the token that stands before the first target."""
    pad_token_id: int = 0
    """T5: what stands for ignored labels in the decoder's input. BERT: the token whose embedding does not learn where
    it is looked up, as in Hugging Face; -1 for none."""
    share_embeddings_and_output_weights: bool = True
    """Whether the output layer uses the input embedding."""
    embedding_dropout: float = 0.0
    """Probability after the embeddings."""
    hidden_dropout: float = 0.0
    """Probability after each attention and MLP block."""
    attention_output_dropout: float | None = None
    """Probability after each attention block; None: ``hidden_dropout`` (Falcon uses that of the attention weights)."""
    attention_dropout: float = 0.0
    """Probability on the attention weights."""
    activation_dropout: float = 0.0
    """Probability inside the MLP, after its non-linearity (T5)."""
    classifier_dropout: float = 0.0
    """Probability before a classification head."""
    init_method_std: float = 0.02
    """Standard deviation of the random initial weights."""
    scaled_residual_init: bool = True
    """Whether matrices that write into the residual stream start sqrt(2 * num_layers) times smaller (GPT-2)."""
    make_vocab_size_divisible_by: int = 128
    """The padded vocabulary is a multiple of this times tp."""
    lora: Adapters | None = None
    """What is trained instead of the weights, which are frozen; None: the weights."""
    lora_dropout: float = 0.0
    """Probability on what adapters read."""

    def __post_init__(self) -> None:
        """Check the rules that hold in any layout.

        Raises:
            ConfigError: If a size is not positive, a probability is none, or the heads do not fit together.
        """
        if isinstance(self.lora, Mapping):  # of a checkpoint
            linears = tuple((name, tuple(parts)) for name, parts in self.lora["linears"])
            object.__setattr__(self, "lora", Adapters(**{**self.lora, "linears": linears}))
        sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "vocab_size")
        for name in sizes:
            require_number(name, getattr(self, name), at_least=1)
        for name in (f"{of}_dropout" for of in ("embedding", "hidden", "attention", "activation", "classifier")):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value}: expected a probability below 1; correct the model's config")
        if not 0 <= self.init_method_std < math.inf:
            raise ConfigError(
                f"init_method_std={self.init_method_std}: expected a finite number, at least 0; correct the model's"
                " config"
            )
        require_divides("num_query_groups", self.num_query_groups, "num_attention_heads", self.num_attention_heads)
        if self.position_embedding_type == "rope" and (self.rotary_width % 2 != 0 or self.rotary_width < 2):
            raise ConfigError(
                f"kv_channels={self.kv_channels} x rotary_percent={self.rotary_percent} = {self.rotary_width} is odd "
                "or 0, and rotary positions turn pairs of numbers; use an even width"
            )
        for name in ("attention_softcap", "logits_softcap"):
            if (cap := getattr(self, name)) is not None and cap <= 0:
                raise ConfigError(f"{name}={cap} must be positive; correct the model's config, or use null for none")

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that are rotated."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def has_mlp_norm(self) -> bool:
        """Whether the MLP's input is normalized for it alone."""
        return self.pre_norms and not (self.parallel_attention and self.parallel_attention_norms == 1)

    def has_window(self, layer: int) -> bool:
        """Whether a layer (from 0) sees ``sliding_window`` tokens only."""
        return self.sliding_window is not None and layer in (self.sliding_window_layers or (layer,))

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def mlp_width(self, layer: int) -> int:
        """How many numbers a token has inside the MLP of a layer (from 0), or inside all of its experts there."""
        if self.experts is None or not self.has_experts(layer):
            return self.ffn_hidden_size
        return self.experts.topk * self.experts.ffn_hidden_size + self.experts.shared_ffn_hidden_size

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.add_bias_linear if self.add_attention_output_bias is None else self.add_attention_output_bias

    @cached_property
    def has_position_table(self) -> bool:
        """Whether positions are rows of an embedding, so that rows cannot be longer than it."""
        return self.position_embedding_type == "learned_absolute" and self.architecture != "t5"

    @property
    def has_output_layer(self) -> bool:
        """Whether the model predicts tokens; a BERT may have another head instead."""
        return self.architecture != "bert" or self.task in ("pretraining", "masked_lm")

    @property
    def has_pooler(self) -> bool:
        """Whether a BERT's head reads a summary of the whole row."""
        return self.architecture == "bert" and self.task in ("pretraining", "sequence_classification")

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding over all ranks: the smallest multiple of ``make_vocab_size_divisible_by * tp``.

        The engine splits the embedding evenly over tp; rows past ``vocab_size`` never win and never get a gradient.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints and error messages."""
        return asdict(self)


_POSITIONS: dict[str, PositionEmbedding] = {"absolute": "learned_absolute", "rotary": "rope", "alibi": "alibi"}


def with_variant(
    model: ModelConfig, position_embedding_type: str | None, attention_head_type: str | None
) -> ModelConfig:
    """``model`` with other positions and heads, as no Hugging Face config describes them.

    Args:
        model: A GPT.
        position_embedding_type: ``absolute`` (learned), ``rotary`` or ``alibi``; None keeps the model's.
        attention_head_type: ``multihead`` (each query head has a key and value of its own) or ``multiquery`` (all share
            one); None keeps the model's.

    Raises:
        ConfigError: If a name is unknown, the model is no GPT, or its heads cannot be rotated.
    """
    if position_embedding_type is None and attention_head_type is None:
        return model
    if model.architecture != "gpt":
        raise ConfigError(
            f"position_embedding_type and attention_head_type are for GPTs, and {model.family} is a "
            f"{model.architecture.upper()}; leave them out"
        )
    if position_embedding_type is not None:
        require_choice("position_embedding_type", position_embedding_type, _POSITIONS)
        positions = _POSITIONS[position_embedding_type]
        # The scaling of rotary frequencies is nobody else's.
        scaling = model.rope_scaling if positions == "rope" else None
        model = replace(model, position_embedding_type=positions, rope_scaling=scaling)
    if attention_head_type is not None:
        groups = {"multihead": model.num_attention_heads, "multiquery": 1}
        require_choice("attention_head_type", attention_head_type, groups)
        model = replace(model, num_query_groups=groups[attention_head_type])
    return model


def variant_of(model: ModelConfig, stored: Mapping[str, Any]) -> ModelConfig:
    """``model`` as the variant that a checkpoint says it holds.

    Args:
        model: As its Hugging Face config describes it.
        stored: A saved ``ModelConfig.to_dict()``, or Megatron-LM's arguments, which use the same names.
    """
    if model.architecture != "gpt":
        return model
    positions = next((ours for ours, name in _POSITIONS.items() if name == stored.get("position_embedding_type")), None)
    heads = {1: "multiquery", model.num_attention_heads: "multihead"}.get(stored.get("num_query_groups", 0))
    return with_variant(model, positions, heads)
