"""Whether a model can be split by a parallel layout; without torch and Megatron-Core, for commands that plan."""

from __future__ import annotations

from typing import Literal

from lightning_megatron.engine.parallel import UNEVEN_STAGES, ParallelConfig
from lightning_megatron.errors import ConfigError, divisors, require_divides
from lightning_megatron.models.config import ModelConfig


def check_layout(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise unless ``model`` can be split this way.

    Raises:
        ConfigError: If tp does not divide the heads, the key/value groups or the MLP, pp x vpp the layers, or cp
            the key/value heads with ``cp_comm_type="a2a"``.
    """
    tp = parallel.tp
    groups = model.num_query_groups
    comm_type_of(model, parallel)
    require_divides("tp", tp, "num_attention_heads", model.num_attention_heads)
    require_divides("tp", tp, "ffn_hidden_size", model.ffn_hidden_size)
    # With more ranks than groups, neighboring ranks hold the same key/value head.
    if groups % tp != 0 and tp % groups != 0:
        choices = [
            str(size)
            for size in divisors(model.num_attention_heads)
            if groups % size == 0 or size % groups == 0
        ]
        raise ConfigError(
            f"tp={tp} neither divides num_query_groups={groups} nor is a multiple of it; choose tp from "
            f"{', '.join(choices)}"
        )
    # With more ranks than groups, each keeps a slice of the rows, which may end within a head.
    rows = model.query_rows + 2 * groups * model.kv_channels
    require_divides("tp", tp, "(num_attention_heads + 2 * num_query_groups) * kv_channels", rows)
    _check_linear_attention(model, parallel)
    _check_split_of_experts(model, parallel)
    _check_stages(model, parallel)
    if parallel.uses_sequence_parallel:
        require_divides("tp", tp, "hidden_size", model.hidden_size)


def comm_type_of(model: ModelConfig, parallel: ParallelConfig) -> Literal["a2a", "all_gather"]:
    """Resolve ``cp_comm_type`` for ``model``: ``auto`` is ``a2a`` if tp x cp divides the key/value groups.

    Raises:
        ConfigError: If ``a2a`` is set and cp does not divide a rank's key/value heads.
    """
    groups = model.num_query_groups
    ranks = parallel.tp * parallel.cp
    if groups % ranks == 0:
        return "all_gather" if parallel.cp_comm_type == "all_gather" else "a2a"
    if parallel.cp_comm_type == "a2a" and parallel.cp > 1:
        raise ConfigError(
            f'cp_comm_type="a2a": expected num_query_groups={groups} to be a multiple of tp={parallel.tp} x '
            f"cp={parallel.cp} = {ranks}, got a rest of {groups % ranks}; use "
            'cp_comm_type="all_gather"'
        )
    return "all_gather"


def check_function(model: ModelConfig, parallel: ParallelConfig, function: str | None) -> None:
    """Raise unless the Trainer's ``function`` can run with this layout; ``check_layout`` has passed.

    Raises:
        ConfigError: If tp ranks would send the same token to an expert in training, or replicas that share experts
            would get different rows in prediction.
    """
    if function == "predict" and not parallel.ep_is_within_replica:
        raise ConfigError(
            f"ep={parallel.ep}: Trainer.predict gives replicas that share experts different rows; use ep=1, or generate"
        )
    sends_twice = parallel.tp > 1 and not parallel.sequence_parallel
    if function == "fit" and model.experts is not None and sends_twice:
        # megatron-core 0.16.1, transformer/moe/moe_layer.py, refuses this, too.
        raise ConfigError(
            f"tp={parallel.tp}: a model with experts is trained with sequence_parallel=True; set it, or use tp=1"
        )


def _check_linear_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise unless the heads of linear attention can be split over tp, and rows are not."""
    linear = model.linear_attention
    if linear is None:
        return
    require_divides("tp", parallel.tp, "linear_num_key_heads", linear.num_key_heads)
    if parallel.cp > 1:
        raise ConfigError(
            f"cp={parallel.cp}: expected 1 for a {model.family} model, whose layers with linear attention compute each "
            "token from a state that all tokens before it have made; use tp, or recompute, for long rows"
        )


def _check_split_of_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    experts = model.experts
    if experts is None:
        if parallel.ep > 1:
            raise ConfigError(
                f"ep={parallel.ep}: expected a model with experts, got {model.family} without; use ep=1"
            )
        return
    require_divides("ep", parallel.ep, "num_experts", experts.num_experts)
    shared = experts.shared_ffn_hidden_size
    if shared:
        require_divides("tp", parallel.tp, "shared_ffn_hidden_size", shared)


def _check_stages(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise unless the layers fill all pipeline stages."""
    if model.architecture == "t5":
        _check_joint_stack(model, parallel)
    elif any(getattr(parallel, name) is not None for name in UNEVEN_STAGES):
        parallel.layers_per_chunk(model.num_layers)
    else:
        stages = "pp" if parallel.vpp is None else "pp x vpp"
        count = parallel.pp * parallel.num_model_chunks
        require_divides(stages, count, "num_layers", model.num_layers)


def _check_joint_stack(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise unless a T5's layers, encoder and decoder as one stack that may be cut anywhere, fill all chunks."""
    for name in UNEVEN_STAGES:
        if getattr(parallel, name) is not None:
            raise ConfigError(
                f"{name}={getattr(parallel, name)}: a T5 is cut by cost already; leave it out, or cut by hand with "
                'transformer_config_overrides={"pipeline_model_parallel_layout": [...]}'
            )
    layers = model.num_layers + model.num_decoder_layers
    chunks = parallel.pp * parallel.num_model_chunks
    if layers < chunks:
        raise ConfigError(
            f"pp={parallel.pp} x vpp={parallel.num_model_chunks} = {chunks} chunks are more than "
            f"the {layers} layers of encoder and decoder; use fewer"
        )
