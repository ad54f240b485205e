"""Build a model: this rank's chunks and their initial weights.

Initial weights depend on the seed only, not on the layout: every rank samples the full weight from a generator seeded
with the run's seed and the weight's global name, and keeps its shard. A run with any tp, pp, vpp and dp can be compared
with a single-rank run from the first step.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable
from functools import partial

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from lightning_megatron.engine.ops.sinks import SINKS
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.adapter_names import is_adapter
from lightning_megatron.models.bert import BertChunk
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gated_delta_net import DECAYS, STEPS
from lightning_megatron.models.gpt import GPTChunk
from lightning_megatron.models.lora import add_adapters, without_layer
from lightning_megatron.models.t5 import t5_chunks
from lightning_megatron.models.transformer_config import transformer_config

_VOCAB_WEIGHTS = ("word_embeddings.weight", "output_layer.weight")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "self_attention.out_proj.weight")
_DECAY_RATES = (0.01, 16.0)
"""Range of the initial decay rates of linear attention; the lower end is above 0, whose logarithm is infinite."""


def build_chunks(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """Create this rank's model chunks (one per virtual stage) on ``settings.device``, with uninitialized weights.

    Every rank must call it, once the process groups exist.

    Raises:
        ConfigError: If the model does not support ``settings``, or a weight is larger than any memory.
    """
    if model.architecture == "t5":
        create_chunk = t5_chunks(model, settings)
    else:
        chunk_class = BertChunk if model.architecture == "bert" else GPTChunk
        create_chunk = partial(chunk_class, model, transformer_config(model, settings))
    vpp = settings.parallel.vpp
    stages: Iterable[int | None] = [None]
    if vpp is not None:
        stages = range(vpp)
    try:
        chunks = torch.nn.ModuleList()
        for stage in stages:
            chunks.append(create_chunk(stage).to(settings.device))
        for chunk in chunks:
            add_adapters(chunk, model)
    except RuntimeError as error:
        if not re.search(
            "can't allocate memory|Storage size calculation overflowed|must be .* positive",
            str(error),
        ):
            raise
        raise ConfigError(
            f"this model cannot be built ({error}); correct the sizes in its config"
        ) from error
    return chunks


@torch.no_grad()
def initialize_weights(
    chunks: Iterable[torch.nn.Module],
    model: ModelConfig,
    seed: int,
    only: Collection[str] | None = None,
) -> None:
    """Initialize matrices and sinks from a normal distribution, biases with zeros; norms keep their ones.

    Of linear attention, biases of decays are 1 and their rates uniform, as in Mamba 2 and transformers.
    LoRA's A is uniform in +-1 / sqrt(in), as in ``torch.nn.Linear`` and ``peft``, and B is zero.

    Args:
        chunks: This rank's unwrapped model chunks.
        model: Config that they were built from.
        seed: The run's seed.
        only: Checkpoint keys of the weights to initialize, without layer numbers: those missing in the loaded files;
            None for all.
    """
    for chunk in chunks:
        state = chunk.sharded_state_dict()  # type: ignore[operator]
        apply_factories(state)
        for shard in nested_values(state):
            if not isinstance(shard, ShardedTensor):
                continue
            # Layers that differ, as those with and without experts, have keys with numbers.
            if only is None or without_layer(shard.key) in only:
                _initialize(shard, model, seed)


def _initialize(shard: ShardedTensor, model: ModelConfig, seed: int) -> None:
    layer_axes = shard.prepend_axis_num
    global_shape = list(shard.global_shape)[layer_axes:]
    is_vector = len(global_shape) < 2
    if shard.key.endswith(STEPS):
        shard.data.fill_(1.0)
        return
    if is_vector and not shard.key.endswith((SINKS, DECAYS)):
        if shard.key.endswith("bias"):
            shard.data.zero_()
        elif model.architecture == "t5":
            shard.data.fill_(model.init_method_std)  # initializer_factor scales norms, too
        return
    layer = tuple(shard.global_offset)[:layer_axes]
    if shard.key.endswith(_VOCAB_WEIGHTS):
        # Sampled without vocabulary padding, which depends on tp.
        global_shape[0] = model.vocab_size
    std = model.init_method_std
    if model.scaled_residual_init and shard.key.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.num_layers)
    digest = hashlib.sha256(f"{seed}/{shard.key}/{layer}".encode()).digest()
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    full = torch.empty(global_shape, dtype=torch.float32, device=shard.data.device)
    if is_adapter(shard.key):
        bound = global_shape[1] ** -0.5 if shard.key.endswith(".A") else 0.0
        full.uniform_(-bound, bound, generator=generator)
    elif shard.key.endswith(DECAYS):
        full.uniform_(*_DECAY_RATES, generator=generator).log_()
    else:
        full.normal_(0.0, std, generator=generator)
        if model.architecture == "t5":
            full *= torch.as_tensor(_t5_std(shard.key, model), device=full.device)
    values = full[shard.global_slice()[layer_axes:]]
    # The remaining rows are vocabulary padding.
    shard.data.zero_()[tuple(map(slice, values.shape))] = values


def _t5_std(key: str, model: ModelConfig) -> float | torch.Tensor:
    """Standard deviation of a T5 matrix, in units of ``initializer_factor``.

    Source: transformers 5.23, models/t5/modeling_t5.py, ``_init_weights`` (after mesh-tensorflow): everything is
    multiplied by ``initializer_factor``, which is ``ModelConfig.init_method_std`` here.

    Args:
        key: The matrix's name in Megatron's checkpoints.
        model: The model's config.

    Returns:
        A scalar; for the fused QKV matrix one value per row, [rows, 1], fp32, on the CPU.
    """
    default: float = model.hidden_size**-0.5
    # T5's softmax scale is 1; the std of queries is smaller instead.
    query: float = (model.hidden_size * model.kv_channels) ** -0.5
    if key.endswith("linear_qkv.weight"):
        of_parts = torch.tensor([query, default, default])
        of_head = of_parts.repeat_interleave(model.kv_channels)
        return of_head.repeat(model.num_attention_heads)[:, None]
    stds = {
        "linear_q.weight": query,
        "linear_proj.weight": float((model.num_attention_heads * model.kv_channels) ** -0.5),
        "linear_fc2.weight": float(model.ffn_hidden_size**-0.5),
        **dict.fromkeys(_VOCAB_WEIGHTS, 1.0),
    }
    for name, std in stds.items():
        if key.endswith(name):
            return std
    return default
