"""The live state of a run, as Megatron's sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.runtime import Runtime
from lightning_megatron.engine.weight_average import WeightAverage
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.models.adapter_names import is_adapter, is_trained_with_lora

EXPERT_BIAS = "transformer_config_overrides.moe_router_enable_expert_bias"
"""Field of a model's description that is set if its router has biases and sigmoids, which no Hugging Face config
describes."""

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Format of the optimizer's state: the default one raises on every save (megatron-core 0.16.1,
optimizer/distrib_optimizer.py)."""


Part = Literal["all", "base", "adapters"]
"""All weights, those without adapters, or those that are trained with adapters; a classification head is in each."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The live objects of a run that a checkpoint saves or is loaded into."""

    chunks: list[Any]
    optimizer: MegatronOptimizer | None
    """None to save or load weights only."""
    runtime: Runtime
    topology: Topology
    model_description: Mapping[str, Any]
    """Plain data that identifies the model; loading into another model is refused."""
    hugging_face_config: Mapping[str, Any] | None = None
    """Content of the model's ``config.json`` for Hugging Face, so that the checkpoint alone can be converted."""
    base: str | None = None
    """For a model with adapters: path of its frozen weights, if checkpoints of weights alone leave them out."""
    part: Part = "all"
    """Which weights are saved or loaded."""
    position: Mapping[str, Any] | None = None
    """Place of the checkpoint that is saved among those of the run, on rank 0, as plain data; None outside of a run."""

    average: WeightAverage | None = None
    """Moving average of the trained weights; None in runs without one."""

    @property
    def num_averaged(self) -> int:
        """Updates of the average that is saved; 0 if none is."""
        return 0 if self.average is None else self.average.num_updates

    def settle(self) -> None:
        """Check the outcome of the last step before it is saved; every rank must call.

        Raises:
            NonFiniteError: If it was not finite, and the run ends with it.
        """
        if self.optimizer is not None:
            self.optimizer.settle()

    def weights_only(self) -> RunState:
        """The state for a checkpoint of weights alone, without those that are stored elsewhere (``base``)."""
        part: Part = "all" if self.base is None else "adapters"
        return replace(self, optimizer=None, part=part)


def layout_of(topology: Topology) -> dict[str, Any]:
    """Parallel sizes that determine which rank draws which random numbers."""
    parallel = topology.parallel
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.vpp,
        "cp": parallel.cp,
        "dp": topology.dp,
    }


def rng_file(rank: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng_{rank:05d}.pt"


def sharded_weights(chunks: list[Any], part: Part = "all") -> dict[str, Any]:
    """The live weights as Megatron's sharded tensors, with all parameters gathered; every rank must call."""
    finish_parameter_gathers(chunks)
    return ungathered_weights(chunks, part)


def ungathered_weights(chunks: list[Any], part: Part = "all") -> dict[str, Any]:
    """The live weights as Megatron's sharded tensors, as they are in this rank's memory."""
    state = {}
    for index, chunk in enumerate(chunks):
        weights = unwrap(chunk).sharded_state_dict(metadata=dict(SHARDING))
        if part == "base":
            weights = {name: each for name, each in weights.items() if not is_adapter(name)}
        elif part == "adapters":
            weights = {name: each for name, each in weights.items() if is_trained_with_lora(name)}
        state[f"model{index}"] = weights
    return state


def sharded_state(
    run: RunState,
    *,
    is_loading: bool = False,
) -> dict[str, Any]:
    """Weights, optimizer state and, to save it, their average as Megatron's sharded tensors; every rank must call."""
    models = sharded_weights(run.chunks, run.part)
    state = dict(models)
    if run.optimizer is not None:
        state["optimizer"] = run.optimizer.sharded_state_dict(models, is_loading=is_loading)
    if run.num_averaged and not is_loading:
        state |= sharded_average(run, models if run.part == "all" else None)
    return state


def sharded_average(
    run: RunState,
    models: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The average of the weights, if there is one, as Megatron's sharded tensors; every rank must call.

    Args:
        run: The run.
        models: All its weights as ``sharded_weights`` returns them; None to build them here.
    """
    if run.average is None:
        return {}
    if models is None:
        models = sharded_weights(run.chunks)
    return {"average": run.average.sharded_state_dict(models)}


class AllPageable(TorchFunctionMode):
    """No tensor says that it is pinned while shards are described.

    torch 2.13, distributed/_shard/sharded_tensor/api.py refuses shards of which some are pinned and some are not, as
    those of layers whose state is in host memory and of others; and a checkpoint would tell where its state has been.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.is_pinned:
            return False
        return func(*args, **(kwargs or {}))
