"""A model of one's own on Megatron-Core's blocks: causal convolutions instead of attention, at tp2 pp2, resumed.

    python examples/own_model.py

docs/own_model.md says what each part is for. Lightning starts the four processes.
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-steps", type=int, default=100, help="half before resuming")
    parser.add_argument("--output", default="runs/own_model", help="directory for the checkpoint")
    arguments = parser.parse_args()

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule as EngineModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from lightning_megatron import ConfigError, IndexedDataModule, MegatronModule, MegatronStrategy
from lightning_megatron.engine.ops.norms import Norm
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import mask_padded_vocab_
from lightning_megatron.models.transformer_config import transformer_config

KERNEL_SIZE = 4


class CausalConvolution(EngineModule):
    """Depthwise convolution over this rank's channels: a token sees itself and the three before it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        channels = config.ffn_hidden_size // config.tensor_model_parallel_size
        weight = torch.empty(channels, KERNEL_SIZE, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        # Each rank has other channels: the gradient norm sums over tp instead of counting one rank.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve [s, b, f/tp] over s, and add the input."""
        rows = torch.nn.functional.pad(x.permute(1, 2, 0), (KERNEL_SIZE - 1, 0))
        convolved = torch.nn.functional.conv1d(rows, self.weight[:, None], groups=len(self.weight))
        return x + convolved.permute(2, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Say that axis 0 of the weight is split over tp, so that it loads at any tp."""
        own = self.state_dict(keep_vars=True)
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, {"weight": 0}, sharded_offsets
        )
        return state


class ConvolutionLayer(EngineModule):
    """A layer of the stack: norm, linear, convolution, activation, linear, residual."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: Any = None,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        # From 1, over all stages; the block names weights in checkpoints by it.
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage)
        options = {"config": config, "init_method": config.init_method, "bias": False}
        hidden, wide = config.hidden_size, config.ffn_hidden_size
        self.norm = Norm(config, hidden, config.layernorm_epsilon)
        self.linear_in = ColumnParallelLinear(hidden, wide, gather_output=False, **options)
        self.convolution = CausalConvolution(config)
        self.linear_out = RowParallelLinear(
            wide, hidden, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: Tensor, context: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Transform [s, b, h]; the block passes masks, angles and more, which this layer does not need."""
        wide, _bias = self.linear_in(self.norm(hidden_states))
        mixed = torch.nn.functional.gelu(self.convolution(wide))
        output, _bias = self.linear_out(mixed)
        return hidden_states + output, context


class ConvolutionalModel(LanguageModule):
    """One chunk: embedding on the first stage, some of the layers, head on the last stage."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        super().__init__(config)
        self.vocab_size = model.vocab_size
        padded_size = model.padded_vocab_size(config.tensor_model_parallel_size)
        place = {"ignore_virtual": False, "vp_stage": vp_stage}
        self.pre_process = parallel_state.is_pipeline_first_stage(**place)
        self.post_process = parallel_state.is_pipeline_last_stage(**place)
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = False
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                vocab_size=padded_size,
                max_sequence_length=model.max_position_embeddings,
                position_embedding_type="none",  # the convolution sees the order
            )
        layer = ModuleSpec(module=ConvolutionLayer)
        self.decoder = TransformerBlock(
            config,
            TransformerBlockSubmodules(
                layer_specs=[layer] * get_num_layers_to_build(config, vp_stage),
                layer_norm=Norm,
            ),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                padded_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
            )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states of the stage before, [s, b, h]; the schedule calls this before each forward."""
        if isinstance(input_tensor, list):
            input_tensor = input_tensor[0]
        self.decoder.set_input_tensor(input_tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [s, b, h] before the last stage; on it losses [b, s], or without labels logits."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids, position_ids)
        hidden: Tensor = self.decoder(hidden_states=embedded, attention_mask=None)
        if not self.post_process:
            return hidden
        logits, _bias = self.output_layer(hidden)
        logits = mask_padded_vocab_(logits, self.vocab_size, self.pg_collection.tp.rank())
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses: Tensor = self.compute_language_model_loss(labels, logits)
        return losses


def convolutional_model(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """The ``model_provider``: this rank's chunks, one per virtual stage."""
    parallel = settings.parallel
    if parallel.sequence_parallel or parallel.cp > 1:
        raise ConfigError(
            f"sequence_parallel={parallel.sequence_parallel}, cp={parallel.cp}: expected whole sequences, whose tokens "
            "a convolution needs; leave both out"
        )
    config = transformer_config(model, settings)
    vpp = parallel.vpp
    stages = [None] if vpp is None else range(vpp)
    chunks = [ConvolutionalModel(model, config, stage).to(settings.device) for stage in stages]
    return torch.nn.ModuleList(chunks)


def train(max_steps: int, ckpt_path: str | None = None) -> Trainer:
    """Train until ``max_steps``, from the beginning or from a checkpoint."""
    import shipped

    _, data_path = shipped.shakespeare()
    seed_everything(1234, workers=True)
    module = MegatronModule(
        model={  # sizes; which fields mean something is up to the provider
            "model_type": "llama",
            "vocab_size": shipped.VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        model_provider=convolutional_model,
        lr=3e-3,
    )
    data = IndexedDataModule(
        data_path=data_path, split="90,10,0", seq_length=64, micro_batch_size=4
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def main() -> None:
    half = arguments.max_steps // 2
    checkpoint = f"{arguments.output}/half.ckpt"
    trainer = train(half)
    first = float(trainer.callback_metrics["train_loss"])
    trainer.save_checkpoint(checkpoint)
    trainer = train(arguments.max_steps, checkpoint)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["train_loss"]
        print(f"{half} steps: training loss {first:.3f}; resumed from {checkpoint}")
        print(f"{trainer.global_step} steps: training loss {loss:.3f}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
