"""Model config in Megatron's vocabulary, independent of the parallel layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from lightning_megatron.errors import ConfigError, require_choice, require_divides, require_number

Activation = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu", "xielu"]
Architecture = Literal["gpt", "bert", "t5"]
PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "relative"]
Positions: TypeAlias = Literal["absolute", "rotary", "alibi"]
AttentionHeads: TypeAlias = Literal["multihead", "multiquery"]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
LANGUAGE_MODELING = ("causal_lm", "seq2seq_lm", "masked_lm", "pretraining")
"""Tasks whose head has an output layer, with a logit for each token of the vocabulary."""
CLASSIFICATION = ("sequence_classification", "token_classification")
"""Tasks whose head has logits (or regression values) for labels, of each row or of each token."""
_LARGEST_SIZE = 2**40
"""Largest size of a layer; the sizes of all weights together are compared with the memory."""
_MAX_PROJECTION_ROWS = 1 << 22
"""Maximum rows of all query heads: conversions hold an index for each."""
_MAX_EXPERTS = 200_000
"""Maximum number of experts of all layers, each of which has tensors of its own in files."""
_MAX_LORA_RANK = 1 << 16
_MAX_VOCABULARY_MULTIPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than in pretraining.

    The fields are those of Hugging Face's ``rope_parameters``; see ``models/rotary.py``.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "longrope", "llama3"] = "llama3"
    """Scaling method."""
    factor: float = 8.0
    """Ratio of the extended context length to the original one."""
    original_max_position_embeddings: int = 8192
    """Context length in pretraining, in tokens."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than ``original_max_position / low_freq_factor`` are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than ``original_max_position / high_freq_factor`` are kept."""
    attention_factor: float = 1.0
    """yarn, longrope: multiplier of sines and cosines (derived from ``factor`` if the config does not set it)."""
    beta_fast: float = 32.0
    """yarn: pairs with more rotations than this over the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer rotations than this over the original context have it divided by ``factor``."""
    truncate: bool = True
    """yarn: whether the bounds of the interpolation range are rounded to whole pairs."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency for sequences up to the original context length."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each pair's frequency for longer sequences."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the sequence length."""
        return self.rope_type in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA adapters of frozen linear layers, by Megatron's module names; the user-facing class is ``LoRA``."""

    rank: int
    """Rank r of an adapter."""
    alpha: float
    """Adapter outputs are scaled by alpha / r."""
    linears: tuple[tuple[str, tuple[bool, ...]], ...]
    """Each adapted linear, by its checkpoint name without the layer number, and which of its fused matrices (queries,
    keys, values; gate, up) have an adapter; one entry for a linear that fuses none, and for routed experts, whose gate
    and up have one adapter together."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Linears with another rank, by the same names; their scale is that of the others."""

    def __post_init__(self) -> None:
        """Check the ranks.

        Raises:
            ConfigError: If one is out of range.
        """
        for rank in (self.rank, *dict(self.ranks).values()):
            _require_at_most("lora rank", rank, _MAX_LORA_RANK)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Adapters:
        """Adapters as a checkpoint describes them, where tuples are lists."""
        linears = tuple((name, tuple(parts)) for name, parts in fields["linears"])
        ranks = tuple((name, rank) for name, rank in fields.get("ranks", ()))
        return cls(**{**fields, "linears": linears, "ranks": ranks})

    @property
    def scale(self) -> float:
        """Factor of the output of each adapter."""
        return self.alpha / self.rank

    def rank_of(self, linear: str) -> int:
        """Rank of the adapters of a linear."""
        return dict(self.ranks).get(linear, self.rank)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts (MoE): a router sends each token to its top-k experts (Shazeer et al. 2017, arXiv 1701.06538).

    No token is dropped. Router logits and probabilities are fp32.
    """

    num_experts: int
    """Experts per layer."""
    topk: int
    """Experts per token."""
    ffn_hidden_size: int
    """Width of one expert's MLP."""
    shared_ffn_hidden_size: int = 0
    """Width of the shared expert, applied to every token; 0 for none."""
    has_shared_gate: bool = True
    """Whether the shared expert's output is scaled by its sigmoid gate (Qwen 2)."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits: over all experts, or of each (DeepSeek-V3)."""
    has_selection_bias: bool = False
    """Whether experts are selected by score plus a bias, which training updates by their load (Wang et al. 2024)."""
    num_groups: int = 1
    """Groups of experts; each counts with the sum of its two largest scores (DeepSeek-V3)."""
    topk_groups: int = 1
    """Groups per token, from which its experts are selected."""
    scaling_factor: float = 1.0
    """Factor of the top-k probabilities, after their normalization."""
    normalizes_topk: bool = True
    """Whether a token's top-k probabilities are divided by their sum."""
    min_topk_sum: float = 0.0
    """Smallest divisor in that normalization (ERNIE 4.5)."""
    add_bias: bool = False
    """Whether the router and both linears of each expert have biases (gpt-oss)."""
    swiglu_limit: float | None = None
    """If set, the experts compute (up + 1) * gate * sigmoid(swiglu_alpha * gate), with the gate at most, and up within
    plus and minus, this limit (gpt-oss); None for the model's activation."""
    swiglu_alpha: float = 1.702
    """For ``swiglu_limit``: factor of the gate in the sigmoid."""
    dense_layers: tuple[int, ...] = ()
    """Layers (from 0) with a dense MLP instead of experts."""
    load_balancing_loss_coef: float = 0.0
    """Coefficient of the auxiliary load-balancing loss; see ``engine/ops/router.py``."""

    def __post_init__(self) -> None:
        """Check the fields against each other.

        Raises:
            ConfigError: If a size is not positive, or ``topk`` does not fit the other fields.
        """
        for name in ("num_experts", "topk", "ffn_hidden_size"):
            require_number(name, getattr(self, name), at_least=1, at_most=_LARGEST_SIZE)
        if self.topk > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok: expected at most num_experts={self.num_experts}, got {self.topk}; correct the "
                "model's config"
            )
        self._check_groups()
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ConfigError(
                f"swiglu_limit={self.swiglu_limit}: expected a positive number; correct the model's config"
            )
        if self.topk == 1 and self.normalizes_topk:
            raise ConfigError(
                "num_experts_per_tok=1: expected at least 2 where the probabilities of the chosen experts are "
                "normalized, as one would always be 1 and the router learn nothing; use norm_topk_prob=False, or more"
            )

    def _check_groups(self) -> None:
        require_number("topk_group", self.topk_groups, at_least=1, at_most=self.num_groups)
        require_divides("n_group", self.num_groups, "num_experts", self.num_experts)
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            raise ConfigError(
                f"n_group={self.num_groups}: expected groups of at least 2 of {self.num_experts} experts, as a group "
                "counts with its two largest scores; use fewer groups"
            )
        if self.topk > self.topk_groups * size:
            raise ConfigError(
                f"num_experts_per_tok={self.topk}: expected at most topk_group x experts of a group = "
                f"{self.topk_groups} x {size}; correct the model's config"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one latent vector of a token holds the keys and values of all heads.

    DeepSeek-AI 2024, DeepSeek-V2 (arXiv 2405.04434), section 2.1. The names are Megatron-Core's.
    """

    kv_lora_rank: int
    """Width of the latent of keys and values."""
    q_lora_rank: int | None
    """Width of the latent of queries; None: queries are computed from the hidden states."""
    qk_head_dim: int
    """Dimensions of a head's queries and keys without positions; they come first."""
    qk_pos_emb_head_dim: int
    """Dimensions of a head's queries and keys with rotary positions; all heads have the same keys in them."""
    v_head_dim: int
    """Dimensions of a head's values."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of latents."""
    add_bias: bool = False
    """Whether the projections from hidden states to latents have biases."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: If one is not positive, or the rotated dimensions are no pairs.
        """
        for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
            require_number(name, getattr(self, name), at_least=1, at_most=_LARGEST_SIZE)
        if self.q_lora_rank is not None:
            require_number("q_lora_rank", self.q_lora_rank, at_least=1, at_most=_LARGEST_SIZE)
        if self.qk_pos_emb_head_dim % 2:
            raise ConfigError(
                f"qk_pos_emb_head_dim={self.qk_pos_emb_head_dim}: expected an even number, as rotary positions rotate "
                "pairs of dimensions; correct qk_rope_head_dim"
            )

    @property
    def cached_width(self) -> int:
        """Numbers of a token that generation caches in each layer: the latent, and the rotated keys."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta net: layers whose attention is a recurrence over tokens with a state of fixed size.

    Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464). The names are Megatron-Core's, without ``linear_``.
    """

    layers: tuple[int, ...]
    """Layers (from 0) that have it; the others have softmax attention."""
    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    """Heads of values; consecutive ones share a head of queries and keys."""
    key_head_dim: int
    """Dimensions of a head's queries and keys."""
    value_head_dim: int
    """Dimensions of a head's values."""
    conv_kernel_dim: int
    """Tokens, itself included, that the causal convolution of queries, keys and values sees."""

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: If one is not positive, or value heads cannot share key heads evenly.
        """
        for name in (
            "num_key_heads",
            "num_value_heads",
            "key_head_dim",
            "value_head_dim",
            "conv_kernel_dim",
        ):
            require_number(f"linear_{name}", getattr(self, name), at_least=1, at_most=_LARGEST_SIZE)
        require_divides(
            "linear_num_key_heads",
            self.num_key_heads,
            "linear_num_value_heads",
            self.num_value_heads,
        )
        _require_at_most("rows of linear attention", sum(self.sizes), _MAX_PROJECTION_ROWS)

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        """Dimensions of the keys of all heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Dimensions of the values of all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_size + self.value_size

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the six matrices that are one projection: queries, keys, values, output gates, betas and decays."""
        heads = self.num_value_heads
        return (self.key_size, self.key_size, self.value_size, self.value_size, heads, heads)

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state in a layer: a matrix for each value head."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture and hyperparameters of a GPT, BERT or T5 model, the same for every parallel layout."""

    family: str
    """Hugging Face ``model_type``, e.g. ``gpt2``."""
    architecture: Architecture = "gpt"
    """Decoder-only, encoder-only, or encoder-decoder."""
    task: str = "causal_lm"
    """Task of the head; a key of the family's ``architectures``."""
    num_layers: int
    """Transformer layers; T5: encoder layers."""
    num_decoder_layers: int = 0
    """T5: decoder layers."""
    hidden_size: int
    """Hidden size h."""
    ffn_hidden_size: int
    """Intermediate size of the MLP (of each branch if gated)."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key/value heads: equal to ``num_attention_heads`` for MHA, fewer for GQA, 1 for MQA."""
    kv_channels: int
    """Head dimension; with ``latent_attention`` that of queries and keys."""
    vocab_size: int
    """Vocabulary size without padding."""
    max_position_embeddings: int
    """Maximum sequence length, in tokens."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Type of all norms."""
    layernorm_epsilon: float = 1e-5
    """Epsilon added to the variance in norms."""
    activation: Activation = "gelu"
    """Activation function of the MLP; ``xielu`` has parameters in each layer (Apertus)."""
    gated_linear_unit: bool = False
    """Whether the MLP multiplies a gate branch with an up branch (SwiGLU if ``activation`` is silu)."""
    add_bias_linear: bool = True
    """Whether the MLP has biases, and the attention output projection unless ``add_attention_output_bias`` is set."""
    add_qkv_bias: bool = True
    """Whether the query, key and value projections have biases."""
    add_attention_output_bias: bool | None = None
    """Whether the attention output projection has a bias; None: use ``add_bias_linear``."""
    norm_bias: bool = True
    """Whether LayerNorms have a bias (False for Cohere)."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight (Gemma)."""
    pre_norms: bool = True
    """Whether the inputs of attention and MLP are normalized (False for OLMo 2)."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before the residual addition (Gemma 2, OLMo 2, GLM-4)."""
    qk_layernorm: bool = False
    """Whether each head's queries and keys are normalized before the rotary embedding (Qwen 3)."""
    qk_layernorm_of_all_heads: bool = False
    """For ``qk_layernorm``: whether one norm spans all heads (OLMo 2), instead of each head."""
    qk_layernorm_after_rotary: bool = False
    """For ``qk_layernorm``: whether the norms come after the rotary embedding (Hunyuan)."""
    embedding_layernorm: bool = False
    """Whether the embeddings are normalized (Bloom)."""
    parallel_attention: bool = False
    """Whether attention and MLP both read the layer's input, with one residual addition for both (Falcon)."""
    parallel_attention_norms: Literal[1, 2] = 1
    """For ``parallel_attention``: 1 if attention and MLP share an input norm, 2 if each has its own."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """Type of position embedding."""
    rotary_base: float = 10000.0
    """Theta of rotary embeddings."""
    rotary_base_of_windows: float | None = None
    """Theta in sliding-window layers, whose frequencies are not scaled (Gemma 3); None: use ``rotary_base``."""
    rotary_percent: float = 1.0
    """Fraction of each head's dimensions, counted from the first, that is rotated (GPT-NeoX)."""
    rotary_interleaved: bool = False
    """Whether rotated pairs are adjacent dimensions (Cohere, GLM-4), instead of one from each half."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers (from 0) without rotary embedding (SmolLM 3)."""
    position_offset: int = 0
    """Learned positions: table rows before that of position 0; if not 0, default positions skip padding (OPT)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None for none."""
    query_scaling_beta: float = 0.0
    """Rotary positions: queries are multiplied by 1 + beta * log(1 + floor(position / query_scaling_length)), so that
    attention stays sharp in long contexts (Llama 4, Ministral 3); 0 for no multiplier."""
    query_scaling_length: int = 1
    """For ``query_scaling_beta``: tokens from one value of the multiplier to the next."""
    alibi_scaled: bool = False
    """ALiBi: whether the bias is scaled with the scores and rounded to bf16 (Falcon), or neither (Bloom)."""
    relative_attention_num_buckets: int = 32
    """T5: buckets of relative positions, the rows of the bias table."""
    relative_attention_max_distance: int = 128
    """T5: longer distances share one bucket."""
    softmax_scale: float | None = None
    """Multiplier of attention scores; None for 1 / sqrt(kv_channels)."""
    latent_attention: LatentAttention | None = None
    """GPT: keys and values from latent vectors; None for projections of their own."""
    linear_attention: LinearAttention | None = None
    """GPT: gated delta nets in some layers in place of attention (Qwen3-Next); None for none."""
    attention_output_gate: bool = False
    """Whether the output of each head's attention is multiplied by the sigmoid of a gate (Qwen3-Next)."""
    attention_sinks: bool = False
    """GPT: whether each head has a learned score, of no key, in the denominator of its softmax (gpt-oss)."""
    attention_softcap: float | None = None
    """Attention scores x become cap * tanh(x / cap) before masking (Gemma 2); None for no cap."""
    logits_softcap: float | None = None
    """Logits x become cap * tanh(x / cap) (Gemma 2); None for no cap."""
    embedding_multiplier: float = 1.0
    """Multiplier of the embeddings (Gemma, Granite)."""
    residual_multiplier: float = 1.0
    """Multiplier of attention and MLP outputs before the residual addition (Granite)."""
    logits_multiplier: float = 1.0
    """Multiplier of logits, before ``logits_softcap`` (Granite, Cohere)."""
    sliding_window: int | None = None
    """Number of tokens, itself included, that a token attends to; None for all previous ones."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers (from 0) with the sliding window; None for all."""
    experts: Experts | None = None
    """GPT: mixture of experts; None for dense MLPs."""
    num_tokentypes: int = 0
    """BERT: number of token types; 0 for no token type embedding."""
    num_labels: int = 2
    """Classification: output size of the head."""
    problem_type: ProblemType | None = None
    """Sequence classification: selects the loss; None: infer it from ``num_labels`` and the labels' dtype, as Hugging
    Face does."""
    classifier_bias: bool = True
    """Classification: whether the head has a bias (False for sequences in decoders)."""
    scale_decoder_outputs: bool = False
    """T5: whether the decoder's output is multiplied by 1 / sqrt(hidden_size) before the head."""
    decoder_start_token_id: int = 0
    """T5: first token of the decoder's input."""
    pad_token_id: int = 0
    """T5: padding token, which replaces ignored labels in the decoder's input. BERT: token whose embedding gets no
    gradient from look-ups, as in Hugging Face; -1 for none."""
    share_embeddings_and_output_weights: bool = True
    """Whether input embedding and output layer are tied."""
    embedding_dropout: float = 0.0
    """Dropout probability after the embeddings."""
    hidden_dropout: float = 0.0
    """Dropout probability after each attention and MLP block."""
    attention_output_dropout: float | None = None
    """Dropout probability after each attention block; None: use ``hidden_dropout`` (Falcon: ``attention_dropout``)."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights."""
    activation_dropout: float = 0.0
    """Dropout probability inside the MLP, after its activation (T5)."""
    classifier_dropout: float = 0.0
    """Dropout probability before a classification head."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    scaled_residual_init: bool = True
    """Whether the output projections of attention and MLP have a std smaller by sqrt(2 * num_layers) (GPT-2)."""
    make_vocab_size_divisible_by: int = 128
    """The padded vocabulary is a multiple of this times tp."""
    lora: Adapters | None = None
    """LoRA adapters, trained with all other weights but a classification head frozen; None to train all weights."""
    lora_dropout: float = 0.0
    """Dropout probability of the adapters' inputs."""

    def __post_init__(self) -> None:
        """Check the constraints that hold in any layout.

        Raises:
            ConfigError: If a size is not positive, a probability is out of range, or the heads do not fit together.
        """
        if isinstance(self.lora, Mapping):  # from a checkpoint
            object.__setattr__(self, "lora", Adapters.of_fields(self.lora))
        sizes = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "kv_channels",
            "vocab_size",
        )
        for name in sizes:
            require_number(name, getattr(self, name), at_least=1, at_most=_LARGEST_SIZE)
        self._check_counts()
        self._check_sinks()
        self._check_query_scaling()
        self._check_latent_attention()
        self._check_linear_attention()
        for name in (
            f"{of}_dropout"
            for of in ("embedding", "hidden", "attention", "activation", "classifier")
        ):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(
                    f"{name}={value}: expected a probability below 1; correct the model's config"
                )
        for name in ("init_method_std", "layernorm_epsilon", "rotary_base"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"{name}={value}: expected a finite number, at least 0; correct the model's config"
                )
        require_divides(
            "num_query_groups",
            self.num_query_groups,
            "num_attention_heads",
            self.num_attention_heads,
        )
        if self.position_embedding_type == "rope" and (
            self.rotary_width % 2 != 0 or self.rotary_width < 2
        ):
            raise ConfigError(
                f"kv_channels={self.kv_channels} x rotary_percent={self.rotary_percent} = {self.rotary_width} is odd "
                "or 0, and rotary positions rotate pairs of dimensions; use an even width"
            )
        for name in ("attention_softcap", "logits_softcap"):
            cap = getattr(self, name)
            if cap is not None and cap <= 0:
                raise ConfigError(
                    f"{name}={cap} must be positive; correct the model's config, or use null for none"
                )

    def _check_sinks(self) -> None:
        """Check that the attention of a model with sinks is one that has them.

        Raises:
            ConfigError: If its positions are ALiBi.
        """
        if self.attention_sinks and self.position_embedding_type == "alibi":
            raise ConfigError(
                f"position_embedding_type='alibi': expected 'rotary' or 'absolute' for a {self.family} model, whose "
                "attention has sinks; use one of them"
            )

    def _check_query_scaling(self) -> None:
        """Check the multiplier of queries.

        Raises:
            ConfigError: If it is not a number for each position, or there are no rotary positions.
        """
        require_number("llama_4_scaling_beta", self.query_scaling_beta)
        require_number("original_max_position_embeddings", self.query_scaling_length, at_least=1)
        if self.query_scaling_beta and self.position_embedding_type != "rope":
            raise ConfigError(
                f"llama_4_scaling_beta={self.query_scaling_beta}: expected a {self.family} model with rotary positions;"
                " use 0"
            )

    def _check_latent_attention(self) -> None:
        """Check that the other fields are those of a model with latent attention.

        Raises:
            ConfigError: If its positions are not rotary, or heads share keys.
        """
        if self.latent_attention is None:
            return
        if self.position_embedding_type != "rope":
            raise ConfigError(
                f"position_embedding_type={self.position_embedding_type!r}: expected 'rotary' for a {self.family} "
                "model, whose attention is latent; leave it out"
            )
        if self.num_query_groups != self.num_attention_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_query_groups}: expected num_attention_heads="
                f"{self.num_attention_heads} in latent attention, whose heads have keys of their own; correct it"
            )

    def _check_linear_attention(self) -> None:
        """Check that the other fields are those of a model with linear attention or gates.

        Raises:
            ConfigError: If its other layers have no rotary positions.
        """
        has_any = self.linear_attention is not None or self.attention_output_gate
        if has_any and self.position_embedding_type != "rope":
            raise ConfigError(
                f"position_embedding_type={self.position_embedding_type!r}: expected 'rotary' for a {self.family} "
                "model, whose attention is linear or has gates; leave it out"
            )

    def _check_counts(self) -> None:
        """Check products of sizes for which something is built before there is a weight.

        Raises:
            ConfigError: If one is larger than in any model.
        """
        rows = self.num_attention_heads * self.kv_channels
        _require_at_most("num_attention_heads x kv_channels", rows, _MAX_PROJECTION_ROWS)
        multiple = self.make_vocab_size_divisible_by
        _require_at_most("make_vocab_size_divisible_by", multiple, _MAX_VOCABULARY_MULTIPLE)
        if self.experts is not None:
            experts = self.num_layers * self.experts.num_experts
            _require_at_most("num_layers x num_experts", experts, _MAX_EXPERTS)

    @property
    def rotary_width(self) -> int:
        """Number of rotated dimensions of a head."""
        if self.latent_attention is not None:
            return self.latent_attention.qk_pos_emb_head_dim
        return int(self.kv_channels * self.rotary_percent)

    @property
    def value_width(self) -> int:
        """Dimensions of a head's values."""
        if self.latent_attention is not None:
            return self.latent_attention.v_head_dim
        return self.kv_channels

    @property
    def has_mlp_norm(self) -> bool:
        """Whether the MLP has an input norm of its own."""
        return self.pre_norms and not (
            self.parallel_attention and self.parallel_attention_norms == 1
        )

    def has_window(self, layer: int) -> bool:
        """Whether a layer (from 0) has sliding-window attention."""
        return self.sliding_window is not None and layer in (self.sliding_window_layers or (layer,))

    def has_linear_attention(self, layer: int) -> bool:
        """Whether a layer (from 0) has a gated delta net in place of attention."""
        return self.linear_attention is not None and layer in self.linear_attention.layers

    @property
    def query_rows(self) -> int:
        """Outputs of the projection to queries, and to their gates if there are any."""
        return (1 + self.attention_output_gate) * self.num_attention_heads * self.kv_channels

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts instead of an MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def layers_with(self, linear: str) -> int:
        """How many layers have a linear, by its checkpoint name without the layer number."""
        if self.architecture == "t5" and linear.startswith("decoder."):
            return self.num_decoder_layers
        if ".mlp." not in linear:
            of_linear_attention = linear.endswith((".in_proj", ".out_proj"))
            layers = range(self.num_layers)
            return sum(self.has_linear_attention(layer) == of_linear_attention for layer in layers)
        num_mixtures = sum(self.has_experts(layer) for layer in range(self.num_layers))
        if ".mlp.experts." in linear or ".mlp.shared_experts." in linear:
            return num_mixtures
        return self.num_layers - num_mixtures

    def mlp_width(self, layer: int) -> int:
        """Intermediate size of a layer's (from 0) MLP, or of all experts that a token goes through in it."""
        if self.experts is None or not self.has_experts(layer):
            return self.ffn_hidden_size
        return (
            self.experts.topk * self.experts.ffn_hidden_size + self.experts.shared_ffn_hidden_size
        )

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        if self.add_attention_output_bias is None:
            return self.add_bias_linear
        return self.add_attention_output_bias

    @cached_property
    def has_position_table(self) -> bool:
        """Whether positions are learned embeddings, which limit the sequence length."""
        return self.position_embedding_type == "learned_absolute" and self.architecture != "t5"

    @property
    def has_output_layer(self) -> bool:
        """Whether the model has a vocabulary output layer, not another head instead."""
        return self.task in LANGUAGE_MODELING

    @property
    def trains_head_with_lora(self) -> bool:
        """Whether adapters are trained together with the head, in full: that of a classification."""
        return self.lora is not None and not self.has_output_layer

    @property
    def has_pooler(self) -> bool:
        """Whether a BERT has a pooler."""
        return self.architecture == "bert" and self.task in (
            "pretraining",
            "sequence_classification",
        )

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary size padded to a multiple of ``make_vocab_size_divisible_by * tp``.

        The embedding is sharded evenly over tp; the logits of padding are -inf, and its rows never get a gradient.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, for checkpoints and error messages."""
        fields = asdict(self)
        if self.lora is not None and not self.lora.ranks:
            # As in checkpoints from before there were other ranks, with which this is compared.
            del fields["lora"]["ranks"]
        return fields


def _require_at_most(name: str, value: int, largest: int) -> None:
    """Check that a size or count, which a file may give, is not beyond all models.

    Raises:
        ConfigError: If it is larger than ``largest``.
    """
    if value > largest:
        raise ConfigError(f"{name}={value}: expected at most {largest}; correct the model's config")


_POSITIONS: dict[str, PositionEmbedding] = {
    "absolute": "learned_absolute",
    "rotary": "rope",
    "alibi": "alibi",
}


def with_variant(
    model: ModelConfig,
    position_embedding_type: str | None,
    attention_head_type: str | None,
) -> ModelConfig:
    """Replace position embedding and attention heads of ``model`` by variants that its Hugging Face config cannot set.

    Args:
        model: A GPT.
        position_embedding_type: ``absolute`` (learned), ``rotary`` or ``alibi``; None keeps the model's.
        attention_head_type: ``multihead`` (one key/value head per query head) or ``multiquery`` (one for all query
            heads); None keeps the model's.

    Raises:
        ConfigError: If a name is unknown, the model is no GPT, or the head dimension does not allow rotary positions.
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
        model = replace(model, position_embedding_type=positions)
        if positions != "rope":
            model = replace(model, rope_scaling=None, query_scaling_beta=0.0)
    if attention_head_type is not None:
        groups = {"multihead": model.num_attention_heads, "multiquery": 1}
        require_choice("attention_head_type", attention_head_type, groups)
        model = replace(model, num_query_groups=groups[attention_head_type])
    return model


def variant_of(model: ModelConfig, stored: Mapping[str, Any]) -> ModelConfig:
    """Apply the position embedding and attention heads of a checkpoint to ``model``.

    Args:
        model: Built from a Hugging Face config.
        stored: A saved ``ModelConfig.to_dict()``, or Megatron-LM's arguments, which use the same names.
    """
    if model.architecture != "gpt":
        return model
    stored_type = stored.get("position_embedding_type")
    positions = next((key for key, name in _POSITIONS.items() if name == stored_type), None)
    heads = {1: "multiquery", model.num_attention_heads: "multihead"}.get(
        stored.get("num_query_groups", 0)
    )
    return with_variant(model, positions, heads)
