"""Build a model: this rank's chunks and their initial weights.

Initial weights are the same on every layout, from one seed: each is drawn whole, from a generator seeded with the run's
seed and the weight's global name, and every rank keeps its slice. So tp, pp, vpp and dp change nothing: a run can be
compared with one rank from its first step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from functools import partial

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from lightning_megatron.engine.adapter_names import is_adapter
from lightning_megatron.models.bert import BertChunk
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import GPTChunk
from lightning_megatron.models.lora import add_adapters
from lightning_megatron.models.t5 import t5_chunks
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config

_VOCAB_ROWS = ("word_embeddings.weight", "output_layer.weight")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


def build_chunks(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """This rank's model chunks (one per virtual stage), on ``settings.device``, weights not yet filled.

    Every rank must call, after the process groups exist.

    Raises:
        ConfigError: If the model cannot be split as ``settings.parallel`` says.
    """
    if model.architecture == "t5":
        chunk_of = t5_chunks(model, settings)
    else:
        chunk_class = BertChunk if model.architecture == "bert" else GPTChunk
        chunk_of = partial(chunk_class, model, transformer_config(model, settings))
    stages: list[int | None] = list(range(settings.parallel.vpp)) if settings.parallel.vpp else [None]
    chunks = torch.nn.ModuleList([chunk_of(stage).to(settings.device) for stage in stages])
    for chunk in chunks:
        add_adapters(chunk, model)
    return chunks


@torch.no_grad()
def initialize_weights(
    chunks: Iterable[torch.nn.Module], model: ModelConfig, seed: int, only: Collection[str] | None = None
) -> None:
    """Fill the matrices with normal numbers and the biases with zeros; norms keep their ones.

    Of adapters A is uniform in +-1 / sqrt(in), as torch's linears and ``peft``'s begin, and B zero.

    Args:
        chunks: This rank's unwrapped model chunks.
        model: The description that they were built from.
        seed: The run's seed.
        only: Megatron's keys of the weights to fill, those that no file had; None for all.
    """
    for chunk in chunks:
        state = chunk.sharded_state_dict()  # type: ignore[operator]
        apply_factories(state)
        for shard in nested_values(state):
            if isinstance(shard, ShardedTensor) and (only is None or shard.key in only):
                _fill(shard, model, seed)


def _fill(shard: ShardedTensor, model: ModelConfig, seed: int) -> None:
    layer_axes = shard.prepend_axis_num
    global_shape = list(shard.global_shape)[layer_axes:]
    if len(global_shape) < 2:
        if shard.key.endswith("bias"):
            shard.data.zero_()
        elif model.architecture == "t5":
            shard.data.fill_(model.init_method_std)  # initializer_factor scales norms, too
        return
    layer = tuple(shard.global_offset)[:layer_axes]
    if shard.key.endswith(_VOCAB_ROWS):
        # Drawn without its padding, which depends on tp.
        global_shape[0] = model.vocab_size
    std = model.init_method_std
    if model.scaled_residual_init and shard.key.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.num_layers)
    digest = hashlib.sha256(f"{seed}/{shard.key}/{layer}".encode()).digest()
    generator = torch.Generator(device=shard.data.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    whole = torch.empty(global_shape, dtype=torch.float32, device=shard.data.device)
    if is_adapter(shard.key):
        bound = global_shape[1] ** -0.5 if shard.key.endswith(".A") else 0.0
        whole.uniform_(-bound, bound, generator=generator)
    else:
        whole.normal_(0.0, std, generator=generator)
        if model.architecture == "t5":
            whole *= torch.as_tensor(_t5_scale(shard.key, model), device=whole.device)
    part = whole[shard.global_slice()[layer_axes:]]
    shard.data.zero_()[tuple(map(slice, part.shape))] = part  # rows past it pad the vocabulary


def _t5_scale(key: str, model: ModelConfig) -> float | torch.Tensor:
    """Standard deviation of a matrix, in units of ``initializer_factor``: scores are not scaled.

    Source: transformers 5.23, models/t5/modeling_t5.py, ``_init_weights`` (after mesh-tensorflow): everything is
    multiplied by ``initializer_factor``, which is ``ModelConfig.init_method_std`` here.

    Args:
        key: Its name in Megatron's checkpoints.
        model: The description.

    Returns:
        A number; for queries, keys and values in one matrix [rows, 1], fp32, on the CPU.
    """
    into_hidden: float = model.hidden_size**-0.5
    # Scores are multiplied by 1, so queries start smaller instead.
    of_queries: float = (model.hidden_size * model.kv_channels) ** -0.5
    if key.endswith("linear_qkv.weight"):
        of_head = torch.tensor([of_queries, into_hidden, into_hidden]).repeat_interleave(model.kv_channels)
        return of_head.repeat(model.num_attention_heads)[:, None]
    scales = {
        "linear_q.weight": of_queries,
        "linear_proj.weight": float((model.num_attention_heads * model.kv_channels) ** -0.5),
        "linear_fc2.weight": float(model.ffn_hidden_size**-0.5),
        **dict.fromkeys(_VOCAB_ROWS, 1.0),
    }
    return next((scale for name, scale in scales.items() if key.endswith(name)), into_hidden)
