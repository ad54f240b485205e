"""Transformer layers of GPT, BERT and T5: Megatron module specs, layer variants, and the layer stack of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.ops.attention import SDPAttention
from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.context import ContextParallelAttention
from lightning_megatron.engine.ops.experts import GroupedExperts, clamped_swiglu
from lightning_megatron.engine.ops.key_value_cache import LatentCache
from lightning_megatron.engine.ops.norms import BiasDropoutAdd, Norm, NormOfAllHeads
from lightning_megatron.engine.ops.random_state import forked
from lightning_megatron.engine.ops.recompute import RecomputedOutput
from lightning_megatron.engine.ops.router import Router
from lightning_megatron.engine.ops.xielu import XIELU
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gated_delta_net import GatedDeltaNet
from lightning_megatron.models.latent_attention import LatentSelfAttention

CHECKPOINT_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Checkpoint names of norms: those of Transformer Engine, which fuses a norm into the linear after it."""
LATENT_CHECKPOINT_NAMES = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""The same of the norms of latents."""
LINEAR_CHECKPOINT_NAMES = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
"""The same in layers with linear attention."""

_MASK_TYPES = {
    "gpt": AttnMaskType.causal,
    "bert": AttnMaskType.padding,
    "t5": AttnMaskType.no_mask,  # the bias contains padding and causal masks
}


def layer_spec(
    model: ModelConfig,
    config: TransformerConfig,
    number: int = 0,
    *,
    has_cross_attention: bool = False,
) -> ModuleSpec:
    """Spec of one layer: self-attention, cross-attention in T5's decoder, and MLP.

    Args:
        model: The model's config.
        config: Megatron's config of it.
        number: Global layer number, from 0; some families have two types of layers.
        has_cross_attention: Whether the layer attends to an encoder, too.
    """
    cross: dict[str, Any] = {}
    if has_cross_attention:
        cross["pre_cross_attn_layernorm"] = Norm
        cross["cross_attn_bda"] = BiasDropoutAdd
        cross["cross_attention"] = ModuleSpec(
            module=CrossAttention,
            params={"attn_mask_type": AttnMaskType.padding},
            submodules=CrossAttentionSubmodules(
                linear_q=ColumnParallelLinear,
                linear_kv=ColumnParallelLinear,
                core_attention=_attention_class(config),
                linear_proj=RowParallelLinear,
            ),
        )
    fc2 = _output_linear(
        model,
        has_bias=model.add_bias_linear,
        input_dropout=model.activation_dropout,
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=_MLPInputLinear, linear_fc2=fc2),
    )
    names = dict(CHECKPOINT_NAMES)
    if model.latent_attention is not None:
        del names["input_layernorm."]  # several linears read it
        names |= LATENT_CHECKPOINT_NAMES
    if model.has_linear_attention(number):
        names |= LINEAR_CHECKPOINT_NAMES
    if model.has_experts(number):
        del names["pre_mlp_layernorm."]  # not followed by a linear to fuse it into
        mlp = _experts(model)
    residual = {"multiplier": model.residual_multiplier}
    return ModuleSpec(
        module=_layer_class(model),
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_spec(model) if model.pre_norms else IdentityOp,
            self_attention=_self_attention(model, config, number),
            self_attn_bda=ModuleSpec(
                BiasDropoutAdd,
                params={"probability": model.attention_output_dropout, **residual},
            ),
            **cross,
            pre_mlp_layernorm=norm_spec(model) if model.has_mlp_norm else IdentityOp,
            mlp=mlp,
            mlp_bda=ModuleSpec(BiasDropoutAdd, params=residual),
            sharded_state_dict_keys_map=names,
        ),
    )


def _layer_class(model: ModelConfig) -> type[TransformerLayer]:
    kind: type[TransformerLayer] = TransformerLayer
    if model.architecture == "t5":
        kind = BiasedTransformerLayer
    elif model.parallel_attention:
        kind = ParallelTransformerLayer
    elif model.activation == "xielu":
        kind = XIELULayer
    assert model.activation != "xielu" or kind is XIELULayer
    return kind


def _experts(model: ModelConfig) -> ModuleSpec:
    experts = model.experts
    assert experts is not None
    linears = MLPSubmodules(linear_fc1=_MLPInputLinear, linear_fc2=RowParallelLinear)
    shared = None
    if experts.shared_ffn_hidden_size:
        shared = ModuleSpec(module=SharedExpertMLP, submodules=linears)
    activation = None
    if experts.swiglu_limit is not None:
        activation = partial(
            clamped_swiglu,
            alpha=experts.swiglu_alpha,
            limit=experts.swiglu_limit,
        )
    router = partial(
        Router,
        has_bias=experts.add_bias,
        has_selection_bias=experts.has_selection_bias,
        min_topk_sum=experts.min_topk_sum,
    )
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=router,
            experts=ModuleSpec(
                module=GroupedExperts,
                params={"has_biases": experts.add_bias, "activation": activation},
            ),
            shared_experts=shared,
        ),
    )


def norm_spec(model: ModelConfig) -> ModuleSpec:
    """Spec of a norm over the hidden states."""
    return ModuleSpec(module=Norm, params={"has_bias": model.norm_bias})


def _latent_attention(model: ModelConfig, config: TransformerConfig, layer: int) -> ModuleSpec:
    factor = 1.0
    if model.rope_scaling is not None:
        factor = model.rope_scaling.attention_factor
    return ModuleSpec(
        module=LatentSelfAttention,
        params={
            "attn_mask_type": _MASK_TYPES[model.architecture],
            "latent": model.latent_attention,
            "attention_factor": factor,
        },
        submodules=SelfAttentionSubmodules(
            linear_qkv=None,
            core_attention=_core_attention(model, config, layer),
            linear_proj=_output_linear(model, has_bias=model.has_attention_output_bias),
        ),
    )


def _self_attention(model: ModelConfig, config: TransformerConfig, layer: int) -> ModuleSpec:
    if model.has_linear_attention(layer):
        return ModuleSpec(module=GatedDeltaNet, params={"linear": model.linear_attention})
    if model.latent_attention is not None:
        return _latent_attention(model, config, layer)
    module: type[SelfAttention] = SelfAttention
    params: dict[str, Any] = {"attn_mask_type": _MASK_TYPES[model.architecture]}
    factor = 1.0
    if model.rope_scaling is not None:
        factor = model.rope_scaling.attention_factor
    if model.attention_output_gate:
        module = GatedAttention
    width = model.rotary_width
    if layer in model.no_rope_layers:
        width = 0
    scales_part = factor != 1.0 and width < model.kv_channels
    differs = model.rotary_base_of_windows is not None or scales_part
    if differs and model.position_embedding_type == "rope":
        module = PartialRotaryAttention
        params["width"] = width
        params["uses_second_angles"] = model.has_window(layer)
        params["factor"] = factor
    if model.query_scaling_beta:
        assert module is SelfAttention
        module = ScaledQueryAttention
    q_norm: Any = None
    k_norm: Any = None
    if model.qk_layernorm_after_rotary:
        module = NormAfterRotaryAttention
        # megatron-core 0.19, transformer/attention.py, wants norms for ``qk_layernorm``, which the tp group needs.
        q_norm = k_norm = IdentityOp
    elif model.qk_layernorm:
        q_norm = _head_norm(model, model.num_attention_heads)
        k_norm = _head_norm(model, model.num_query_groups)
    return ModuleSpec(
        module=module,
        params=params,
        submodules=SelfAttentionSubmodules(
            linear_qkv=partial(_linear_qkv, model.add_qkv_bias),
            core_attention=_core_attention(model, config, layer),
            linear_proj=_output_linear(model, has_bias=model.has_attention_output_bias),
            q_layernorm=q_norm,
            k_layernorm=k_norm,
        ),
    )


def _head_norm(model: ModelConfig, num_heads: int) -> ModuleSpec:
    """Spec of the norm of queries or of keys, which have ``num_heads`` heads."""
    if model.qk_layernorm_of_all_heads:
        return ModuleSpec(module=NormOfAllHeads, params={"num_heads": num_heads})
    return norm_spec(model)


def _output_linear(
    model: ModelConfig,
    *,
    has_bias: bool,
    input_dropout: float = 0.0,
) -> ModuleSpec:
    params = {"has_bias": has_bias, "has_norm": model.post_norms, "input_dropout": input_dropout}
    return ModuleSpec(module=OutputLinear, params=params)


def _linear_qkv(has_bias: bool, *args: Any, **kwargs: Any) -> ColumnParallelLinear:
    # megatron-core 0.16.1, transformer/attention.py: add_bias_linear adds a bias to the QKV projection, too.
    return ColumnParallelLinear(*args, **{**kwargs, "bias": has_bias})


def _attention_class(config: TransformerConfig) -> type[SDPAttention]:
    if config.context_parallel_size > 1:
        return ContextParallelAttention
    return SDPAttention


def _core_attention(
    model: ModelConfig, config: TransformerConfig, layer: int
) -> Callable[..., SDPAttention]:
    options: dict[str, Any] = {"softcap": model.attention_softcap}
    if model.position_embedding_type == "alibi":
        options["alibi"] = "falcon" if model.alibi_scaled else "bloom"
    if model.has_window(layer):
        options["sliding_window"] = model.sliding_window
    if model.latent_attention is not None:
        options["cache_class"] = LatentCache
    options["has_sinks"] = model.attention_sinks
    return partial(_attention_class(config), **options)


def block_spec(
    model: ModelConfig,
    config: TransformerConfig,
    vp_stage: int | None,
    *,
    has_cross_attention: bool = False,
) -> TransformerBlockSubmodules:
    """Specs of the layers that ``config`` assigns to one chunk; arguments as for ``layer_spec``."""
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage))
    layers = [
        layer_spec(model, config, number, has_cross_attention=has_cross_attention)
        for number in numbers
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_spec(model))


class LayerStack(TransformerBlock):
    """The layers of one chunk and, after the last layer of the model, the final norm."""

    _padding_mask: Tensor | None = None
    """Of the forward pass with recomputation that is running."""

    @override
    def _build_layers(self) -> None:
        """Build the layers, and tell each residual addition which norm reads its sum, so that both can be fused."""
        super()._build_layers()
        recompute = self.config.recompute_granularity
        if recompute == "selective" and self.config.recompute_modules != ["core_attn"]:
            return  # the norms are recomputed from their inputs
        following = [layer.input_layernorm for layer in self.layers[1:]]
        following.append(self.final_layernorm)
        # Not strict: a chunk may have no layer.
        for layer, next_norm in zip(self.layers, following, strict=False):
            if not isinstance(layer, ParallelTransformerLayer):
                before_mlp = layer.self_attn_bda
                if isinstance(layer.cross_attn_bda, BiasDropoutAdd):
                    layer.self_attn_bda.norm = layer.pre_cross_attn_layernorm
                    before_mlp = layer.cross_attn_bda
                before_mlp.norm = _norm_or_none(layer.pre_mlp_layernorm)
            # A layer that is recomputed must not compute the norm of the next one.
            if recompute != "full":
                layer.mlp_bda.norm = _norm_or_none(next_norm)

    @override
    def _get_layer(self, layer_number: int) -> Any:
        """Return a layer, or the identity past the last one, where megatron-core 0.16.1 extends the last group.

        Later versions end the last recomputed group with the last layer (transformer/transformer_block.py).
        """
        if layer_number >= len(self.layers):
            return _identity_layer
        layer = self.layers[layer_number]
        if self._padding_mask is None:
            return layer
        return partial(_layer_with_padding, layer, self._padding_mask)

    @override
    def _checkpointed_forward(
        self,
        *args: Any,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward pass with recomputation, whose layers all know the padding.

        In megatron-core 0.16.1 those that ``recompute_method="block"`` does not recompute have none, and the load of
        their experts counts it.
        """
        self._padding_mask = padding_mask
        try:
            return super()._checkpointed_forward(*args, padding_mask=padding_mask, **kwargs)
        finally:
            # What is recomputed later gets that of its own microbatch.
            self._padding_mask = None


def _identity_layer(
    hidden_states: Tensor,
    context: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    return hidden_states, context


def _layer_with_padding(
    layer: Any,
    mask: Tensor,
    *,
    padding_mask: Tensor | None,
    **inputs: Any,
) -> Any:
    """Call a layer with the padding of all layers, whether it was given or not."""
    del padding_mask
    return layer(padding_mask=mask, **inputs)


def _norm_or_none(module: Any) -> Norm | None:
    return module if isinstance(module, Norm) else None


class _MLPInputLinear(ColumnParallelLinear):
    """First linear of an MLP. It adds its bias itself: with PyTorch's GELU this is faster than a fused bias-GELU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "skip_bias_add": False})


class OutputLinear(RowParallelLinear):
    """Output projection of attention or MLP, [s or s/tp, b, h], with an optional norm of its output.

    T5 applies dropout to the input of the MLP's projection.
    """

    def __init__(
        self,
        *args: Any,
        has_bias: bool,
        has_norm: bool,
        input_dropout: float,
        **kwargs: Any,
    ) -> None:
        """Create the linear; ``ModuleSpec.params`` has the arguments that differ between attention and MLP.

        Args:
            args: Megatron's.
            has_bias: Overrides ``add_bias_linear``, Megatron's one switch for attention and MLP.
            has_norm: Whether to normalize the output; ``post_layernorm`` is its name in Megatron-Bridge's Gemma.
            input_dropout: Dropout probability of the input.
            kwargs: Megatron's.
        """
        super().__init__(*args, **{**kwargs, "bias": has_bias})
        if has_norm:
            self.post_layernorm = Norm(self.config, self.output_size, self.config.layernorm_epsilon)
            # After the adapters' hook, which is part of the linear.
            self.register_forward_hook(_normalize_output)
        self.input_dropout = input_dropout
        # Each rank has different columns. With sequence parallelism the entire layer already runs in the RNG fork.
        self.forks_rng: bool = (
            self.config.tensor_model_parallel_size > 1 and not self.config.sequence_parallel
        )
        if input_dropout > 0.0:
            # Not in forward: adapters read the same input.
            self.register_forward_pre_hook(self._drop_input)

    def _drop_input(
        self,
        linear: Any,
        inputs: tuple[Tensor],
    ) -> tuple[Tensor]:
        """Apply dropout to the input, [s, b, ffn/tp]."""
        if not self.training:
            return inputs
        with forked(self.forks_rng):
            return (F.dropout(inputs[0], self.input_dropout),)


def _normalize_output(
    linear: Any,
    args: Any,
    output: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, None]:
    x, bias = output
    if bias is not None:
        x = x + bias
    return linear.post_layernorm(x), None


class GatedAttention(SelfAttention):
    """Self-attention whose output may be multiplied by the sigmoid of a gate of the same token (Qwen3-Next)."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's; the gate, if there is one, is of the same heads as the query, [s, b, n/tp, hn].

        With more ranks than key/value heads, megatron-core 0.16.1 returns the gates of all heads of a group.
        """
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        if not self.config.attention_output_gate:
            return tensors
        query, key, value, gate = tensors
        shards = gate.shape[2] // query.shape[2]
        own = self.pg_collection.tp.rank() % shards
        return query, key, value, gate.chunk(shards, dim=2)[own]

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply the output, [s, b, n/tp * hn], by its gate, [s, b, n/tp, hn].

        Megatron's is compiled on CPUs, too, by each process, for a minute.
        """
        gated: Tensor = compiled_for(x, _gated)(x, gate.flatten(2))
        return gated


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x * torch.sigmoid(gate.float())).to(x.dtype)


class PartialRotaryAttention(GatedAttention):
    """Self-attention with rotary embedding that differs between layers or covers only part of a head.

    Gemma 3 has two thetas. Phi-4-mini rotates three quarters of a head with LongRoPE, whose attention factor is part of
    the softmax scale (``rotary.rope_softmax_scale``): the dimensions that are not rotated, all of a head in SmolLM 3's
    layers without rotary embedding, are divided by it.
    """

    def __init__(
        self,
        *args: Any,
        width: int,
        uses_second_angles: bool,
        factor: float,
        **kwargs: Any,
    ) -> None:
        """Create the attention; ``ModuleSpec.params`` has the arguments that are not Megatron's.

        Args:
            args: Megatron's.
            width: Rotated dimensions of a head; 0 in a layer without rotary embedding.
            uses_second_angles: Whether to use the second set of angles, if there are two.
            factor: Attention factor, the multiplier of sines and cosines.
            kwargs: Megatron's.
        """
        super().__init__(*args, **kwargs)
        self.rotary_width = width
        self.factor = factor
        self.uses_second_angles = uses_second_angles

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call Megatron's; ``rotary_pos_emb``: angles [s, 1 or b, 1, rotary_width], or twice the width for two sets."""
        if rotary_pos_emb is not None and rotary_pos_emb.shape[-1] > self.rotary_width:
            rotary_pos_emb = rotary_pos_emb.chunk(2, dim=-1)[self.uses_second_angles]
        output: tuple[Tensor, Tensor | None] = super().forward(
            *args, rotary_pos_emb=rotary_pos_emb, **kwargs
        )
        return output

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's, with ``factor`` undone in queries and keys, [s, b, n/tp, hn], where not rotated."""
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        if self.factor == 1.0 or self.rotary_width == self.hidden_size_per_attention_head:
            return tensors
        query, key, *rest = tensors
        return (self._unscale_unrotated(query), self._unscale_unrotated(key), *rest)

    def _unscale_unrotated(self, x: Tensor) -> Tensor:
        rotated = x[..., : self.rotary_width]
        unrotated = x[..., self.rotary_width :] / self.factor
        return torch.cat((rotated, unrotated), dim=-1)


class ScaledQueryAttention(SelfAttention):
    """Self-attention whose queries are multiplied by a number that grows with their position (Ministral 3)."""

    def forward(
        self,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call Megatron's; ``rotary_pos_emb``: angles and the multiplier, [s, 1 or b, 1, rotary_width + 1]."""
        assert rotary_pos_emb is not None
        self._multiplier = rotary_pos_emb[..., -1:]
        output: tuple[Tensor, Tensor | None] = super().forward(
            *args, rotary_pos_emb=rotary_pos_emb[..., :-1], **kwargs
        )
        return output

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's, with queries, [s, b, n/tp, hn], multiplied."""
        # Before the rotation, which commutes with it: recomputing the core attention alone sees its inputs only.
        query, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return (query * self._multiplier.to(query.dtype), *rest)


class NormAfterRotaryAttention(SelfAttention):
    """Self-attention that normalizes each head's queries and keys after the rotary embedding (Hunyuan).

    Attributes:
        rotated_q_layernorm: Norm of queries.
        rotated_k_layernorm: Norm of keys. Megatron sums the gradients of both over tp, by the ends of their names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the attention; arguments are Megatron-Core's."""
        super().__init__(*args, **kwargs)
        width = self.hidden_size_per_attention_head
        epsilon = self.config.layernorm_epsilon
        self.rotated_q_layernorm = Norm(self.config, width, epsilon)
        self.rotated_k_layernorm = Norm(self.config, width, epsilon)
        # Before the exchange of context parallelism, and before keys are cached in generation.
        self.core_attention.register_forward_pre_hook(self._normalize)

    def _normalize(self, core_attention: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Normalize queries, [sq, b, np, hn], and keys, [sk, b, ng, hn], of the core attention's inputs."""
        query, key, *rest = inputs
        return (self.rotated_q_layernorm(query), self.rotated_k_layernorm(key), *rest)


class BiasedTransformerLayer(TransformerLayer):
    """A layer whose attention mask is an additive bias of the scores, which includes masked keys.

    Recomputation in megatron-core (0.16.1 to 0.19) passes masks as arguments but captures a bias in a closure: with a
    learned bias, each group of layers would run backward through the same graph, which the first one frees.
    """

    @override
    def forward(
        self,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Call Megatron's; ``attention_mask``: [b or 1, np, sq, sk], added to the scores."""
        output: tuple[Tensor, Tensor | None] = super().forward(
            *args, **{**kwargs, "attention_bias": attention_mask}
        )
        return output


class XIELULayer(TransformerLayer):
    """A layer whose MLP has xIELU as activation function, which has parameters of its own (Apertus)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the layer; arguments are Megatron-Core's."""
        super().__init__(*args, **kwargs)
        # Not a subclass of MLP: TransformerLayer of megatron-core 0.16.1 knows by its class what to pass.
        assert isinstance(self.mlp, MLP)
        self.mlp.activation_func = XIELU(self.config)


class ParallelTransformerLayer(TransformerLayer):
    """A decoder layer whose attention and MLP run in parallel, with one residual addition and dropout for both.

    Wang and Komatsuzaki 2021, GPT-J; Almazrouei et al. 2023, Falcon (arXiv 2311.16867): ``x + attention(norm(x)) +
    mlp(norm(x))``. megatron-core 0.16.1 supports only sequential blocks.

    Without ``pre_mlp_layernorm`` attention and MLP share ``input_layernorm`` (Falcon 7B); otherwise each has its own
    norm (Falcon 40B).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the layer; arguments are Megatron-Core's."""
        super().__init__(*args, **kwargs)
        self.recompute_pre_mlp_layernorm = False  # ``forward`` recomputes both norms itself

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            hidden_states: [s, b, h]; under sequence parallelism [s/tp, b, h].
            attention_mask: Passed to the core attention.
            context: Returned unchanged.
            rotary_pos_emb: Angles, [s, 1 or b, 1, kv_channels].
            attention_bias: Added to the scores.
            kwargs: Megatron-Core's arguments for inference and for other types of layers; None in training.

        Returns:
            Hidden states of the same shape, and ``context``.
        """
        attention_norm = RecomputedOutput()
        attention_input = attention_norm.checkpoint(self.input_layernorm, hidden_states)
        attention_output, proj_bias = self.self_attention(
            attention_input,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            inference_context=kwargs.get("inference_context"),
            packed_seq_params=kwargs.get("packed_seq_params"),
        )
        norms = [attention_norm]
        mlp_input = attention_input
        if not isinstance(self.pre_mlp_layernorm, IdentityOp):
            mlp_norm = RecomputedOutput()
            norms.append(mlp_norm)
            mlp_input = mlp_norm.checkpoint(self.pre_mlp_layernorm, hidden_states)
        mlp_output, mlp_bias = self.mlp(mlp_input)
        output = attention_output + mlp_output
        bias = mlp_bias
        if proj_bias is not None:
            bias = proj_bias if mlp_bias is None else proj_bias + mlp_bias
        if self.recompute_input_layernorm:
            for norm in norms:
                norm.discard_output_and_register_recompute(output)
        return self._forward_post_mlp((output, bias), hidden_states), context
