"""How does a layer work whose attention and MLP read the same input, and are added to it together?

Wang and Komatsuzaki 2021, GPT-J; Almazrouei et al. 2023, Falcon (arXiv 2311.16867): ``x + attention(norm(x)) +
mlp(norm(x))``, one dropout on the sum. megatron-core 0.16.1 knows only one after the other.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import ConfigError


class ParallelTransformerLayer(TransformerLayer):
    """A decoder layer with both blocks side by side.

    With ``pre_mlp_layernorm`` left out the MLP reads what ``input_layernorm`` gives to the attention (Falcon 7B); else
    each block has a norm of its own (Falcon 40B).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what Megatron-Core passes to its own layer.

        Raises:
            ConfigError: If parts of the layer are to be recomputed that this one does not recompute.
        """
        super().__init__(*args, **kwargs)
        modules = set(self.config.recompute_modules or ()) - {"core_attn"}
        if self.config.recompute_granularity == "selective" and modules:
            raise ConfigError(
                f"recompute_modules={sorted(self.config.recompute_modules)} is not supported by a layer with parallel "
                "attention and MLP; use ['core_attn'], or recompute='full'"
            )

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.

        Args:
            hidden_states: [s, b, h]; under sequence parallelism [s/tp, b, h].
            attention_mask: As the core attention takes it.
            context: Passed through.
            rotary_pos_emb: Angles, [s, 1 or b, 1, kv_channels].
            attention_bias: Added to the scores.
            others: What Megatron-Core passes for inference and for layers of other kinds; None in training.

        Returns:
            Of ``hidden_states``' shape, and ``context``.
        """
        attention_input = self.input_layernorm(hidden_states)
        attended, attention_output_bias = self.self_attention(
            attention_input,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            inference_context=others.get("inference_context"),
            packed_seq_params=others.get("packed_seq_params"),
        )
        shares_norm = isinstance(self.pre_mlp_layernorm, IdentityOp)
        transformed, mlp_output_bias = self.mlp(
            attention_input if shares_norm else self.pre_mlp_layernorm(hidden_states)
        )
        biases = [bias for bias in (attention_output_bias, mlp_output_bias) if bias is not None]
        summed = (attended + transformed, sum(biases[1:], start=biases[0]) if biases else None)
        return self._forward_post_mlp(summed, hidden_states), context
