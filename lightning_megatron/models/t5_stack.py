"""What does a chunk hold of one of T5's two stacks, and how does it run it? Layers, a relative-bias table, a norm.

Not Megatron-Core's ``TransformerBlock`` (megatron-core 0.16.1, transformer/transformer_block.py), which cuts layers
evenly, and whose recomputation walks through the graph of a trainable attention bias once per layer.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layer_specs import CHECKPOINT_NAMES, self_attention_spec
from lightning_megatron.models.relative_bias import RelativeBias


class DroppedInputLinear(RowParallelLinear):
    """The MLP's second matrix, before which T5 drops activations."""

    def __init__(self, *args: Any, input_dropout: float, **kwargs: Any) -> None:
        """Take Megatron's arguments, and the probability for ``ModuleSpec.params``."""
        super().__init__(*args, **kwargs)
        self.input_dropout = input_dropout
        # Each rank has other columns. With sequence parallelism the whole layer already runs in the fork.
        self.forks_rng: bool = self.config.tensor_model_parallel_size > 1 and not self.config.sequence_parallel

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, ffn/tp] to [s or s/tp, b, h], and the bias, which is None."""
        if self.training and self.input_dropout > 0.0:
            with get_cuda_rng_tracker().fork() if self.forks_rng else contextlib.nullcontext():
                input_ = F.dropout(input_, self.input_dropout)
        output: tuple[Tensor, Tensor | None] = super().forward(input_)
        return output


def t5_layer_spec(model: ModelConfig, *, is_decoder: bool) -> ModuleSpec:
    """One pre-norm layer: self-attention with an added bias, in the decoder cross-attention, then the MLP."""
    cross = ModuleSpec(
        module=CrossAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=CrossAttentionSubmodules(
            linear_q=ColumnParallelLinear,
            linear_kv=ColumnParallelLinear,
            core_attention=SDPAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    fc2 = ModuleSpec(module=DroppedInputLinear, params={"input_dropout": model.activation_dropout})
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            # Padding and causality are in the bias already.
            self_attention=self_attention_spec(AttnMaskType.no_mask),
            self_attn_bda=get_bias_dropout_add,
            pre_cross_attn_layernorm=Norm if is_decoder else IdentityOp,
            cross_attention=cross if is_decoder else IdentityOp,
            cross_attn_bda=get_bias_dropout_add if is_decoder else IdentityFuncOp,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=fc2)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(CHECKPOINT_NAMES),
        ),
    )


class T5Stack(MegatronModule):
    """Some neighbouring layers of the encoder or of the decoder, and what belongs to them."""

    def __init__(
        self, model: ModelConfig, config: TransformerConfig, numbers: range, *, is_decoder: bool, has_final_norm: bool
    ) -> None:
        """Create the layers.

        Args:
            model: The description.
            config: The same in the engine's words.
            numbers: Which layers of the whole stack, from 0; may be empty.
            is_decoder: Which of the two stacks.
            has_final_norm: Whether the stack's last norm stands here.
        """
        super().__init__(config=config)
        self.numbers = numbers
        self.num_layers_of_all_chunks = model.num_decoder_layers if is_decoder else model.num_layers
        spec = t5_layer_spec(model, is_decoder=is_decoder)
        self.layers = torch.nn.ModuleList([_layer(spec, config, number) for number in numbers])
        self.relative_bias: RelativeBias | None = None
        if numbers:
            self.relative_bias = RelativeBias(
                config,
                model.relative_attention_num_buckets,
                model.relative_attention_max_distance,
                bidirectional=not is_decoder,
            )
        self.final_layernorm: Norm | None = None
        if has_final_norm:
            self.final_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        *,
        num_recomputed: int = 0,
    ) -> Tensor:
        """Run the layers, and the final norm with its dropout if it is here.

        Args:
            hidden: [s or s/tp, b, h].
            attention_mask: [b, s], 0 where a token is padding; None if none is.
            context: What the encoder returned, [s_enc or s_enc/tp, b, h]; for the decoder.
            context_mask: [b, s_enc], as ``attention_mask``.
            num_recomputed: For recomputation by ``block``: so many of the first layers.
        """
        # With sequence parallelism each rank drops numbers of its own, as in Megatron's TransformerBlock.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext():
            if self.relative_bias is not None:
                shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
                length = hidden.shape[0] * shards
                bias = self.relative_bias(self._num_cached() + length, attention_mask, length)
                for first, last, recomputed in self._groups(num_recomputed):
                    inputs = (hidden, bias, context, context_mask)
                    run = self._runner(first, last)
                    hidden = checkpoint(run, False, *inputs) if recomputed else run(*inputs)
            if self.final_layernorm is not None:
                hidden = F.dropout(self.final_layernorm(hidden), self.config.hidden_dropout, self.training)
        return hidden

    def _num_cached(self) -> int:
        """How many tokens the layers have read before, whose keys and values they keep while text is generated."""
        cache = self.layers[0].self_attention.core_attention.kv_cache  # type: ignore[union-attr]
        return 0 if cache is None else cache.length  # type: ignore[return-value, union-attr]

    def _groups(self, num_recomputed: int) -> list[tuple[int, int, bool]]:
        """The layers in groups (first, one after the last), and whether a group is recomputed as a whole."""
        config, count = self.config, len(self.layers)
        if not self.training or config.recompute_granularity != "full":
            return [(0, count, False)]
        if config.recompute_method == "block":
            return [(i, i + 1, i < num_recomputed) for i in range(count)]
        size = config.recompute_num_layers
        return [(i, min(i + size, count), True) for i in range(0, count, size)]

    def _runner(self, first: int, last: int) -> Any:
        def run(hidden: Tensor, bias: Tensor, context: Tensor | None, context_mask: Tensor | None) -> Tensor:
            # The bias is an argument: the graph of one in a closure would be walked once per group, freed by the first.
            for layer in self.layers[first:last]:
                hidden, _ = layer(hidden, context=context, context_mask=context_mask, attention_bias=bias)
            return hidden

        return run

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Layers stacked along a new first axis by their numbers, as Megatron-Core's, and one writer of the table."""
        state: ShardedStateDict = {}
        for local, (number, layer) in enumerate(zip(self.numbers, self.layers, strict=True)):
            place = f"{prefix}layers.{local}."
            offsets = [(0, number, self.num_layers_of_all_chunks)]
            part = layer.sharded_state_dict(place, offsets, metadata)  # type: ignore[operator]
            replace_prefix_for_sharding(part, place, f"{prefix}layers.")
            state.update(part)
        if self.relative_bias is not None:
            table = self.relative_bias.sharded_state_dict(f"{prefix}relative_bias.", (), metadata)
            for tensor in table.values():
                tensor.replica_id = (0 if 0 in self.numbers else 1 + self.numbers[0], *tensor.replica_id[1:])
            # Megatron-Core's own T5 has the table beside the stack.
            stack = prefix.removesuffix(".")
            replace_prefix_for_sharding(
                table, f"{prefix}relative_bias.", f"{stack}_relative_pos_emb.relative_attention_bias."
            )
            state.update(table)
        if self.final_layernorm is not None:
            norm = f"{prefix}final_layernorm."
            tp_group = parallel_state.get_tensor_model_parallel_group()
            state.update(sharded_state_dict_default(self.final_layernorm, norm, (), metadata, tp_group))
        return state


def _layer(spec: ModuleSpec, config: TransformerConfig, number: int) -> TransformerLayer:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # The layer adds where an even cut would put this stage; with an interleaved schedule it must be told which.
    vp_stage = None if config.virtual_pipeline_model_parallel_size is None else 0
    offset = get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
    return build_module(spec, config=config, layer_number=number + 1 - offset, pg_collection=groups, vp_stage=vp_stage)
