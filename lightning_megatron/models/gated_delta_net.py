"""Gated delta net: a layer's attention as a recurrence over tokens, with a state of fixed size.

Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), as in Qwen3-Next (Qwen Team 2025). One projection makes queries,
keys, values, output gates, rates and decays; a causal convolution mixes the first three over a few tokens; the gated
delta rule computes the outputs, which are normalized, gated and projected.

Modules have the names of megatron-core 0.16.1, ssm/gated_delta_net.py. Its own ``GatedDeltaNet`` is not used: it needs
flash-linear-attention, so a GPU, ignores padding and documents, and has no state for generation. The rows of its
projection are ordered by what they are, and split in checkpoints (``in_proj.weight.query`` and so on); here they are
ordered by key head, as those of queries, keys and values are in attention, so that tp splits them as in any linear.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.ops.attention import MASK_CACHE
from lightning_megatron.engine.ops.causal_convolution import CausalConvolution, convolve
from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.gated_delta_rule import gated_delta_rule
from lightning_megatron.engine.ops.gated_norm import GatedNorm
from lightning_megatron.engine.ops.key_value_cache import RecurrentCache
from lightning_megatron.models.config import LinearAttention

DECAYS = "self_attention.A_log"
"""End of the name of the logarithms of the heads' decay rates in checkpoints."""
STEPS = "self_attention.dt_bias"
"""End of the name of what is added to the tokens' decays."""
_SPLIT = ("A_log", "dt_bias")
"""Parameters of the layer itself, which have a number for each value head."""


class GatedDeltaNet(MegatronModule):
    """A layer's linear attention.

    Attributes:
        in_proj: Queries, keys, values, output gates, rates and decays of each key head in turn.
        conv1d: Convolution of queries, keys and values of each key head in turn.
        A_log: [hv/tp], logarithms of the decay rates.
        dt_bias: [hv/tp], added to the decays of tokens.
        out_norm: Norm and gate of the outputs of heads.
        out_proj: Projection of the outputs.
        kv_cache: State of generation; set for a pass.
    """

    cache_class = RecurrentCache
    is_cross = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        linear: LinearAttention,
        pg_collection: ProcessGroupCollection,
        cp_comm_type: str | None = None,
        name: str | None = None,
    ) -> None:
        """Create the layer; ``ModuleSpec.params`` has ``linear``.

        Args:
            config: The model's config.
            layer_number: From 1.
            linear: Sizes of heads and convolution.
            pg_collection: Has the tp group.
            cp_comm_type: Unused; rows are not split.
            name: Unused; megatron-core 0.19 gives attention its name in the model.
        """
        del cp_comm_type, name
        super().__init__(config=config)
        self.layer_number = layer_number
        self.linear = linear
        self.tp_group = pg_collection.tp
        tp = config.tensor_model_parallel_size
        options: dict[str, Any] = {"config": config, "bias": False}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(linear.sizes),
            init_method=config.init_method,
            gather_output=False,
            tp_group=self.tp_group,
            **options,
        )
        self.conv1d = CausalConvolution(linear.conv_size // tp, linear.conv_kernel_dim, config)
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        new = partial(torch.zeros, linear.num_value_heads // tp, dtype=config.params_dtype)
        self.A_log = torch.nn.Parameter(new(device=device))
        self.dt_bias = torch.nn.Parameter(new(device=device))
        for name in _SPLIT:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)
        self.out_norm = GatedNorm(linear.value_head_dim, config)
        self.out_proj = RowParallelLinear(
            linear.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp_group,
            **options,
        )
        self.kv_cache: RecurrentCache | None = None
        self.checkpoints: bool = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute linear attention. Collective over the tp group.

        Args:
            hidden_states: [s or s/tp, b, h].
            attention_mask: Segment ids, [b, s], 0 for padding; None for one segment. In generation those of all
                tokens, cached ones included.
            kwargs: Arguments of other kinds of attention: positions, and Megatron-Core's for inference.

        Returns:
            Hidden states of the same shape, and None for no bias.
        """
        projected, _ = self.in_proj(hidden_states)
        heads = projected.unflatten(2, (-1, sum(self.linear.sizes) // self.linear.num_key_heads))
        if self.kv_cache is not None:
            attended = self._attend_cached(heads, attention_mask)
        elif self.checkpoints and self.training:
            attended = checkpoint(self._attend, False, heads, attention_mask)
        else:
            attended = self._attend(heads, attention_mask)
        output: tuple[Tensor, Tensor | None] = self.out_proj(attended)
        return output

    def _attend(self, heads: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Outputs of this rank's heads, [s, b, hv/tp * dv].

        Args:
            heads: [s, b, hk/tp, ...], what ``in_proj`` makes for each key head.
            attention_mask: As for ``forward``.
        """
        rows = _Rows(None, None)
        if attention_mask is not None:
            rows = MASK_CACHE.get(attention_mask, "recurrence", _rows_of)
        inputs = self._inputs(heads, rows, None)
        attended, _ = gated_delta_rule(*inputs, documents=rows.documents)
        return self._normalize(attended, heads)

    def _attend_cached(self, heads: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The same from the cached state on, which is updated; a row is one document."""
        cache = self.kv_cache
        assert cache is not None
        is_token = None
        # A single new token is never padding.
        if attention_mask is not None and len(heads) > 1:
            is_token = (attention_mask[:, -len(heads) :] != 0).mT
        before, state = cache.states()
        mixed = heads[..., : self._mixed_width]
        if is_token is not None:
            mixed = mixed * is_token[..., None, None]
        inputs = self._inputs(heads, _Rows(is_token, None), before)
        attended, state = gated_delta_rule(*inputs, state=state)
        cache.update(mixed, self.linear.conv_kernel_dim - 1, state)
        return self._normalize(attended, heads)

    @property
    def _mixed_width(self) -> int:
        """Channels of a key head that are convolved."""
        return self.linear.conv_size // self.linear.num_key_heads

    def _inputs(
        self,
        heads: Tensor,
        rows: _Rows,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the gated delta rule: queries, keys, values, decays and rates."""
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = compiled_for(heads, _rule_inputs)(
            heads,
            self.conv1d.weight,
            self.A_log,
            self.dt_bias,
            self._widths,
            rows,
            before,
        )
        return inputs

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Dimensions of a head's keys and of its values, and value heads of a key head."""
        linear = self.linear
        return linear.key_head_dim, linear.value_head_dim, linear.values_per_key

    def _normalize(self, attended: Tensor, heads: Tensor) -> Tensor:
        """Normalize and gate outputs, [s, b, hv/tp, dv]: [s, b, hv/tp * dv]."""
        start = self._mixed_width
        gates = heads[..., start : start + self.linear.value_size // self.linear.num_key_heads]
        normalized: Tensor = self.out_norm(attended, gates.reshape(attended.shape))
        return normalized.flatten(2)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Return the sharded state dict, by the names of Megatron's layer."""
        state: dict[str, Any] = {}
        for name in _SPLIT:
            state[f"{prefix}{name}"] = make_tp_sharded_tensor_for_checkpoint(
                getattr(self, name),
                f"{prefix}{name}",
                prepend_offsets=sharded_offsets,
            )
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module,
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=tp_group or self.tp_group,
            )
        return state


class _Rows(NamedTuple):
    """What the recurrence needs of an attention mask."""

    is_token: Tensor | None
    """[s, b], bool, False for padding; None for no padding."""
    documents: Tensor | None
    """[s, b], int64: runs of the same segment, whose tokens do not see earlier ones; None for one."""


def _rows_of(segments: Tensor) -> _Rows:
    """Padding and documents of rows, [b, s]; padding belongs to the segment before it, through which states decay."""
    is_token = segments != 0
    places = torch.arange(segments.shape[1], device=segments.device)
    last_token = torch.where(is_token, places, 0).cummax(-1).values
    filled = segments.gather(-1, last_token)
    begins = torch.ne(filled, torch.roll(filled, 1, -1))
    begins[:, 0] = False
    return _Rows(is_token.mT.contiguous(), begins.cumsum(-1).mT.contiguous())


def _rule_inputs(
    heads: Tensor,
    conv_weight: Tensor,
    log_rates: Tensor,
    biases: Tensor,
    widths: tuple[int, int, int],
    rows: _Rows,
    before: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the gated delta rule: queries, keys, values, logarithms of decays, and rates.

    Hidden states of padding are zeros, as in transformers; here their projections are.

    Args:
        heads: [s, b, hk/tp, ...]: queries, keys, values, output gates, rates and decays of each key head.
        conv_weight: [channels/tp, 1, k].
        log_rates: [hv/tp].
        biases: [hv/tp].
        widths: Dimensions of a head's keys and of its values, and value heads of a key head.
        rows: Padding and documents.
        before: [k - 1, b, hk/tp, ...], values of channels before the first token; None for zeros.
    """
    keys, values, repeats = widths
    channels = 2 * keys + repeats * values
    mixed = heads[..., :channels]
    scalars = heads[..., channels + repeats * values :].float()
    if rows.is_token is not None:
        mixed = mixed * rows.is_token[..., None, None]
        scalars = scalars * rows.is_token[..., None, None]
    weight = conv_weight.view(heads.shape[2], channels, -1)
    convolved = convolve(mixed, weight, rows.documents, before)
    query, key, value = convolved.split((keys, keys, repeats * values), dim=-1)
    of_rates, of_decays = scalars.split(repeats, dim=-1)
    steps = F.softplus(of_decays.flatten(2) + biases.float())
    log_decay = -log_rates.float().exp() * steps
    return (
        query.contiguous(),
        key.contiguous(),
        value.unflatten(-1, (repeats, values)).flatten(2, 3).contiguous(),
        log_decay,
        of_rates.flatten(2).sigmoid(),
    )
