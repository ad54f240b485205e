"""One pipeline chunk of a model: embedding, layers and output layer, as far as they are on this rank.

GPT, BERT and T5 stand on Megatron-Core's ``LanguageModule``, which ties embeddings over pipeline stages, and (GPT and
BERT) its ``TransformerBlock``, not on its whole models: those of megatron-core 0.16.1 have no pipeline (T5), refuse
sequence parallelism in the head (BERT), or ignore positions (GPT), and ``GPTModel`` is deprecated upstream.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from lightning_megatron.engine.fillers.context import ContextParallel
from lightning_megatron.engine.fillers.loss import soft_capped
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layers import join_additions_and_norms, layer_spec, norm_spec


class Chunk(LanguageModule):
    """What Megatron's schedule, gradient reduction and checkpoints expect of a chunk, whatever its layers are.

    Attributes:
        pre_process: Whether the embedding is here.
        post_process: Whether the output layer (or another head) is here.
        context: Which tokens of a row this rank computes; a chunk is called with whole rows, and returns them.
        share_embeddings_and_output_weights: Whether the output layer is the embedding; on the last of several stages it
            is a copy, whose gradient Megatron's ``finalize_model_grads`` adds to that of the first stage.
    """

    stack_name: ClassVar[str] = "decoder"
    """Of the attribute that holds the layers; the names of weights begin with it."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        """Create the embedding, if it is here.

        Args:
            model: The description.
            config: The same in the engine's words.
            vp_stage: Which virtual stage; None if there is only one.
        """
        super().__init__(config=config)
        self.description = model
        self.context = ContextParallel(config)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process: bool = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.share_embeddings_and_output_weights = model.has_output_layer and model.share_embeddings_and_output_weights
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
                max_sequence_length=model.max_position_embeddings + model.position_offset,
                position_embedding_type="learned_absolute" if model.has_position_table else "none",
                num_tokentypes=model.num_tokentypes,
            )
            self.embedding.embedding_dropout.p = model.embedding_dropout

    def create_block(self) -> TransformerBlock:
        """This chunk's share of an even cut of the layers and, on the last stage, the final norm."""
        config = self.config
        first = get_transformer_layer_offset(config, self.vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=self.vp_stage))
        block = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[layer_spec(self.description, number) for number in numbers],
                layer_norm=norm_spec(self.description),
            ),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=self.vp_stage,
        )
        join_additions_and_norms(block.layers, block.final_layernorm)
        return block

    def create_output_layer(self, *, bias: bool = False) -> ColumnParallelLinear:
        """The layer that makes logits."""
        model, config = self.description, self.config
        layer = ColumnParallelLinear(
            model.hidden_size,
            model.padded_vocab_size(config.tensor_model_parallel_size),
            config=config,
            init_method=config.init_method,
            bias=bias,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
        )
        if model.logits_softcap is not None:
            cap = model.logits_softcap
            layer.register_forward_hook(lambda _, args, output: (soft_capped(output[0], cap), output[1]))
        vocab_size, tp_rank = model.vocab_size, self.pg_collection.tp.rank()
        whole = model.padded_vocab_size(config.tensor_model_parallel_size)

        def silence(module: torch.nn.Module, args: Any, output: tuple[Tensor, Any]) -> None:
            # [s, b, v/tp], or [s, b, v] where they were gathered.
            hide_padded_vocab_(output[0], vocab_size, 0 if output[0].shape[-1] == whole else tp_rank)

        if whole != vocab_size:
            layer.register_forward_hook(silence)
        return layer

    def predictions(self, hidden: Tensor, labels: Tensor | None, runtime_gather_output: bool | None = None) -> Tensor:
        """Logits [b, s, v/tp or v], or with ``labels`` [b, s] the loss of each, [b, s] fp32.

        Args:
            hidden: [s or s/tp, b, h]; here and in what follows s is the tokens of this rank of the cp group.
            labels: int64, of the whole rows; None for logits.
            runtime_gather_output: Whether logits are gathered over the tensor-parallel ranks.
        """
        if self.description.logits_multiplier != 1.0:
            hidden = hidden * self.description.logits_multiplier  # h numbers a token, not v
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=tied, runtime_gather_output=runtime_gather_output)
        if labels is None:
            return self.context.all_tokens(logits.transpose(0, 1).contiguous())
        return self.context.all_tokens(self.compute_language_model_loss(self.context.own_tokens(labels), logits))

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Take what the stage before sent: [s or s/tp, b, h]; Megatron's schedules call it."""
        stack = getattr(self, self.stack_name)
        stack.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where this rank's weights lie in the whole model, by Megatron's checkpoint names."""
        state: dict[str, Any]
        if self.description.has_output_layer:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:  # megatron-core 0.16.1, language_module.py: a last stage without an output layer is a KeyError
            state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


def hide_padded_vocab_(logits: Tensor, vocab_size: int, tp_rank: int) -> Tensor:
    """Set the logits of padding rows to -inf in place: they never win and their gradient is exactly 0.

    Only the padded columns are touched, and autograd does not see it: nothing saves the logits, and the gradient of a
    softmax is 0 where the logit is -inf. With much padding a whole shard can be hidden; another rank has the maximum.

    Args:
        logits: [..., v/tp], the shard of rank ``tp_rank``; gathered logits are the shard of rank 0.
        vocab_size: Vocabulary without padding.
        tp_rank: Which shard this is.

    Returns:
        ``logits``.
    """
    width = logits.shape[-1]
    first_padding = max(0, vocab_size - tp_rank * width)
    if first_padding < width:
        logits.detach()[..., first_padding:].fill_(float("-inf"))
    return logits
