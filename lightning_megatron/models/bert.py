"""What does one pipeline stage of a BERT hold? Embeddings with token types, pre-norm encoder layers, and a head.

Megatron-Core's own ``BertModel`` (megatron-core 0.16.1, models/bert/bert_model.py) asks for the first stage without its
virtual stage, gathers the whole sequence for one token, normalizes its head with a norm that refuses sequence
parallelism, and knows no head but that of pretraining; so only its parts are used.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.bert_heads import MaskedLMHead, Pooler, RowClassifier, TokenClassifier
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layer_specs import CHECKPOINT_NAMES, self_attention_spec
from lightning_megatron.models.transformer_config import EngineSettings, transformer_config
from lightning_megatron.models.vocabulary import silence_padding


def build_bert(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
    """This rank's model chunks (one per virtual stage), on ``settings.device``, weights not yet filled.

    Every rank must call, after the process groups exist.

    Raises:
        ConfigError: If the model cannot be split as ``settings.parallel`` says.
    """
    config = transformer_config(model, settings)
    stages: list[int | None] = list(range(settings.parallel.vpp)) if settings.parallel.vpp else [None]
    return torch.nn.ModuleList([BertChunk(model, config, stage).to(settings.device) for stage in stages])


def bert_layer_spec() -> ModuleSpec:
    """One pre-norm encoder layer: attention in both directions, then the MLP."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=self_attention_spec(AttnMaskType.padding),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(CHECKPOINT_NAMES),
        ),
    )


class BertChunk(LanguageModule):
    """A stage of a BERT for ``model.task``; weights have Megatron-Core's names where it has any."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> None:
        """Create this rank's layers.

        Args:
            model: The model and its task.
            config: The same in the engine's words.
            vp_stage: Which virtual stage; None if there is only one.
        """
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = vp_stage
        self.pre_process: bool = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.post_process: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        self.share_embeddings_and_output_weights = model.has_output_layer and model.share_embeddings_and_output_weights
        if self.pre_process:
            self.embedding = _embedding(model, config)
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        self.encoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(layer_specs=[bert_layer_spec()] * num_layers, layer_norm=Norm),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        self._task = model.task
        self._predicts_tokens = model.has_output_layer
        if self.post_process:
            self._create_head(model)
        if model.has_output_layer and (self.pre_process or self.post_process):
            self.setup_embeddings_and_output_layer()

    def _create_head(self, model: ModelConfig) -> None:
        config = self.config
        if model.has_pooler:
            self.pooler = Pooler(model, config)
        if model.task == "pretraining":
            self.binary_head = torch.nn.Linear(model.hidden_size, 2, dtype=config.params_dtype)
        if model.task == "sequence_classification":
            self.classification_head = RowClassifier(model, config)
        if model.task in ("token_classification", "question_answering"):
            self.token_head = TokenClassifier(model, config)
        if model.has_output_layer:
            tp = config.tensor_model_parallel_size
            self.lm_head = MaskedLMHead(model, config)
            self.output_layer = ColumnParallelLinear(
                model.hidden_size,
                model.padded_vocab_size(tp),
                config=config,
                init_method=config.init_method,
                bias=True,
                gather_output=False,
                skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            )
            silence_padding(self.output_layer, model, tp)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take what the stage before sent: [s or s/tp, b, h]."""
        self.encoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where this rank's weights lie in the whole model, by Megatron's checkpoint names."""
        state: dict[str, Any]
        if self._predicts_tokens:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:  # megatron-core 0.16.1, language_module.py: a last stage without an output layer is a KeyError
            state = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        tokentype_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Run this stage; all tensor-parallel ranks must call.

        Args:
            input_ids: [b, s] int64.
            position_ids: [b, s] int64; None counts 0, 1, 2, ...
            attention_mask: [b, s] int64, the number of the segment that a token belongs to, 0 for padding; or
                [b, 1, 1 or s, s] bool, True where a token (third axis) must not see another (fourth axis).
            tokentype_ids: [b, s] int64; None for 0 everywhere.
            labels: [b, s] int64, for models that predict tokens: the loss of each is returned instead of logits.

        Returns:
            Hidden states [s or s/tp, b, h] before the last stage. There, by task: ``pretraining`` and ``masked_lm`` the
            pair of each token's loss [b, s] fp32 (or logits [b, s, v/tp]) and the logits of the sentence order [b, 2]
            (None for ``masked_lm``); ``sequence_classification`` logits [b, num_labels]; the others logits
            [b, s, num_labels].
        """
        embedded = None
        if self.pre_process:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            if tokentype_ids is None and self.embedding.num_tokentypes > 0:
                tokentype_ids = torch.zeros_like(input_ids)
            embedded = self.embedding(input_ids, position_ids, tokentype_ids)
        hidden = self.encoder(hidden_states=embedded, attention_mask=attention_mask)
        return self._head(hidden, labels) if self.post_process else hidden

    def _head(self, hidden: Tensor, labels: Tensor | None) -> Any:
        if self._task == "sequence_classification":
            return self.classification_head(self.pooler(hidden))
        if self._task in ("token_classification", "question_answering"):
            return self.token_head(hidden)
        order = self.binary_head(self.pooler(hidden)) if self._task == "pretraining" else None
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(self.lm_head(hidden), weight=tied)
        if labels is None:
            return logits.transpose(0, 1).contiguous(), order
        return self.compute_language_model_loss(labels, logits), order


def _embedding(model: ModelConfig, config: TransformerConfig) -> LanguageModelEmbedding:
    embedding = LanguageModelEmbedding(
        config=config,
        vocab_size=model.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="learned_absolute",
        num_tokentypes=model.num_tokentypes,
    )
    embedding.embedding_dropout.p = model.embedding_dropout
    if model.pad_token_id >= 0:
        embedding.word_embeddings.register_forward_hook(_freeze_lookups_of(model.pad_token_id))
    return embedding


def _freeze_lookups_of(token: int) -> Any:
    """A hook that keeps a token's embedding from learning where it is looked up, as ``nn.Embedding(padding_idx)`` does.

    A tied output layer still moves it, as it does in Hugging Face.
    """

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            frozen = (args[0] == token)[..., None]
            output.register_hook(lambda gradient: gradient.masked_fill(frozen, 0.0))

    return hook
