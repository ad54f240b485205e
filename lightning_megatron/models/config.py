"""What does one model look like, in Megatron's words and independent of any layout?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_megatron.errors import ConfigError, require_divides

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency scaling of rotary embeddings (Llama 3.1 reference code, ``apply_scaling``)."""

    factor: float = 8.0
    """How much longer the context is than the original."""
    low_freq_factor: float = 1.0
    """Wavelengths longer than ``original_max_position / low_freq_factor`` are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """Wavelengths shorter than ``original_max_position / high_freq_factor`` are kept."""
    original_max_position_embeddings: int = 8192
    """Context length of the first training, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the mathematics of a GPT-like model; the same for every parallel layout."""

    family: str
    """Hugging Face ``model_type`` that this model was described by, e.g. ``gpt2``."""
    num_layers: int
    """Transformer layers."""
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
    """Biases of the output projection and of the MLP."""
    add_qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """How positions enter."""
    rotary_base: float = 10000.0
    """Theta of rotary embeddings."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 scaling of the rotary frequencies; None leaves them."""
    share_embeddings_and_output_weights: bool = True
    """Whether the output layer uses the input embedding."""
    embedding_dropout: float = 0.0
    """Probability after the embeddings."""
    hidden_dropout: float = 0.0
    """Probability after each attention and MLP block."""
    attention_dropout: float = 0.0
    """Probability on the attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of the random initial weights."""
    scaled_residual_init: bool = True
    """Whether matrices that write into the residual stream start sqrt(2 * num_layers) times smaller (GPT-2)."""
    make_vocab_size_divisible_by: int = 128
    """The padded vocabulary is a multiple of this times tp."""

    def __post_init__(self) -> None:
        """Check the rules that hold in any layout.

        Raises:
            ConfigError: If a size is not positive, or the heads do not fit together.
        """
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1; correct the model's config")
        require_divides("num_query_groups", self.num_query_groups, "num_attention_heads", self.num_attention_heads)

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding over all ranks: the smallest multiple of ``make_vocab_size_divisible_by * tp``.

        The engine splits the embedding evenly over tp; rows past ``vocab_size`` never win and never get a gradient.
        """
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints and error messages."""
        return asdict(self)
