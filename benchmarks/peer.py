"""Peer of the training benchmark: a Hugging Face model, optionally compiled, with Lightning's FSDP or DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    AutoModelForSeq2SeqLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.megatron_bert.modeling_megatron_bert import MegatronBertLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from benchmarks.cases import Case
from lightning_megatron.convert.registry import model_config
from lightning_megatron.planning.parameters import total_parameters

_LARGEST_REPLICA_PARAMETERS = 2e9
"""Larger models are sharded: fp32 weights, gradients and moments take 16 bytes per parameter."""

LAYERS: dict[str, type[torch.nn.Module]] = {
    "deepseek_v3": DeepseekV3DecoderLayer,
    "gpt2": GPT2Block,
    "gpt_oss": GptOssDecoderLayer,
    "llama": LlamaDecoderLayer,
    "megatron-bert": MegatronBertLayer,
    "qwen3_moe": Qwen3MoeDecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
    "t5": T5Block,
}
"""Layer class by model type, the unit of compilation and sharding."""

_MODELS: dict[str, Any] = {"megatron-bert": AutoModelForPreTraining, "t5": AutoModelForSeq2SeqLM}
"""Auto classes of models that are not trained as causal language models."""


class PeerModule(pl.LightningModule):
    """Hugging Face language model, trained as its documentation shows.

    Experts use ``grouped_mm``, transformers' default since 5.0, without load balancing.
    """

    def __init__(self, model: dict[str, Any], lr: float, clip: float, compiled: bool) -> None:
        super().__init__()
        fields = {key: value for key, value in model.items() if key != "model_type"}
        self._config = CONFIG_MAPPING[model["model_type"]](**fields, use_cache=False)
        self._model_class = _MODELS.get(model["model_type"], AutoModelForCausalLM)
        self._lr = lr
        self._clip = clip
        self._compiled = compiled
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        # Initialized on the device: billions of random numbers take minutes on a CPU.
        with self.trainer.strategy.root_device:
            self.model = self._model_class.from_config(self._config, dtype=torch.float32)
        if self._compiled:
            layer_class = LAYERS[self._config.model_type]
            for layer in (
                module for module in self.model.modules() if isinstance(module, layer_class)
            ):
                layer.compile()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert self.model is not None, "configure_model comes before the first step"
        loss: torch.Tensor = self.model(**{"labels": batch["input_ids"], **batch}).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self._lr, fused=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning's own clipping does not work with FSDP, whose norm spans the shards of all ranks.
        wrapped: Any = self.trainer.strategy.model
        if hasattr(wrapped, "clip_grad_norm_"):
            wrapped.clip_grad_norm_(self._clip)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), self._clip)


def peer_strategy(case: Case) -> tuple[Any, str]:
    """Strategy and its name: DDP (or a single device) if the model fits on one GPU, else FSDP with full sharding."""
    model = model_config(case.model)
    count = total_parameters(model)
    if count > _LARGEST_REPLICA_PARAMETERS:
        layers = {LAYERS[case.model["model_type"]]}
        return FSDPStrategy(
            auto_wrap_policy=layers, sharding_strategy="FULL_SHARD", use_orig_params=True
        ), "FSDP"
    if case.num_devices == 1:
        return "auto", "single device"
    return DDPStrategy(gradient_as_bucket_view=True), "DDP"
