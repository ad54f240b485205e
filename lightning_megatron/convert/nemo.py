"""Checkpoints of NeMo 2: a directory with ``weights/``, which Megatron-Core wrote, and ``context/``, its objects.

``context/model.yaml`` has the values of the model's config with the names of the classes that they are arguments of
(nemo_toolkit 2.0.0 and 2.7.0, lightning/io/mixin.py: ``IOMixin.io_dump``). The names are compared and no class is
imported; ``context/io.json`` and the pickles beside it, which NeMo builds its objects from, are not opened.

The values are those of Megatron-LM's arguments under other names, so they describe the model in the same way
(inferred_model.py) where NeMo's class computes what its values say. Of others, which set more in code, ``--config`` is
required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.checkpoint.meta import BACKENDS
from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.inferred_model import UNSUPPORTED, describe_model
from lightning_megatron.convert.megatron_arguments import GIVE_A_CONFIG, as_plain_data
from lightning_megatron.convert.source import Description
from lightning_megatron.convert.torch_dist import CoreSource
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.storage.yaml_limits import load_yaml

WEIGHTS = "weights"
CONTEXT = "context"
_MODEL = "model.yaml"
_TOKENIZER = "nemo_tokenizer"
_ADAPTERS = "adapter_metadata.json"
_TARGET = "_target_"
_MAX_BYTES = 1 << 22

_KNOWN_CLASSES = re.compile(
    r"nemo\.collections\.llm\.gpt\.model\."
    r"(base\.GPT|llama\.(Code)?Llama(2|3|31|32)?|mistral\.Mistral(NeMo|Small3)?|qwen2\.Qwen25?|qwen3\.Qwen3)Config(\d+\w*)?"
)
"""Classes of configs whose models compute what their values say; subclasses with a size have other defaults alone."""
_KNOWN_LAYERS = re.compile(r"nemo\.collections\.llm\.gpt\.model\.base\.\w+")
"""Functions that build layers from these values, and not from the user's own modules."""
_SAME_NAMES = (
    "num_attention_heads",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "window_size",
    "normalization",
    "layernorm_epsilon",
    *UNSUPPORTED,
)
"""Values that Megatron-LM's arguments have under the same names."""
_LLAMA_3_1 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "old_context_len": 8192,
}
"""Values of scaled rotary embeddings that Megatron-LM's arguments cannot change."""
_OFF = (None, False, 0)


def is_nemo(path: Path) -> bool:
    """Whether ``path`` is a directory with the weights of NeMo 2, perhaps in an older format (zarr)."""
    return (path / WEIGHTS / BACKENDS).is_file()


class NeMoSource(CoreSource):
    """A checkpoint of NeMo 2."""

    kind = "checkpoint of NeMo 2"

    def __init__(self, path: Path) -> None:
        """Read the metadata of the weights and the values of the model's config; see ``DistributedSource``."""
        super().__init__(path / WEIGHTS)
        self.path = path
        if (path / WEIGHTS / _ADAPTERS).is_file():
            raise CheckpointError(
                f"{path}: expected a whole model, got adapters of NeMo ({WEIGHTS}/{_ADAPTERS}), whose layers have "
                "names of their own; merge them with NeMo (llm.peft.merge_lora), and give the result"
            )
        step = self._common.get("global_step")
        if type(step) is int:
            self.iteration = step
        self._values = _model_values(path / CONTEXT / _MODEL)
        tokenizer = path / CONTEXT / _TOKENIZER
        if tokenizer.is_dir() and companion_files(tokenizer):
            self.companions = tokenizer
        self.metadata = {
            "iteration": self.iteration or None,
            "epoch": as_plain_data(self._common.get("epoch")),
            "lightning": as_plain_data(self._common.get("pytorch-lightning_version")),
            "model": {name: as_plain_data(value) for name, value in self._values.items()},
        }

    def describe(self, config: Path | None) -> Description:
        """See ``Source``."""
        arguments: Mapping[str, Any] = {}
        if config is None:
            arguments = self._arguments_of_model()
        shapes = {key: tensor.shape for key, tensor in self.find().items()}
        return describe_model(arguments, shapes, 1, config, self.path)

    def _arguments_of_model(self) -> dict[str, Any]:
        """The values of the model's config as arguments of Megatron-LM.

        Raises:
            CheckpointError: If there are none, their class computes more than they say, or no argument has a value's
                meaning.
        """
        values = self._values
        if not values:
            raise CheckpointError(
                f"{self.path} has no {CONTEXT}/{_MODEL} that says which model it is of; {GIVE_A_CONFIG}"
            )
        kind = str(values.get(_TARGET))
        if not _KNOWN_CLASSES.fullmatch(kind):
            raise CheckpointError(
                f"{self.path}: expected a config of NeMo's GPTs, Llamas, Mistrals or Qwens, whose values say what they "
                f"compute, got {kind[:100]}; {GIVE_A_CONFIG}"
            )
        layers = values.get("transformer_layer_spec")
        if isinstance(layers, Mapping):
            layers = layers.get(_TARGET)
        if layers is not None and not _KNOWN_LAYERS.fullmatch(str(layers)):
            raise CheckpointError(
                f"{self.path}: expected layers of NeMo's own specs, got transformer_layer_spec={str(layers)[:100]}; "
                f"{GIVE_A_CONFIG}"
            )
        activation = _name_of_function(values.get("activation_func"))
        is_silu = activation == "silu"
        if not is_silu and (activation != "gelu" or values.get("gated_linear_unit")):
            raise CheckpointError(
                f"{self.path}: expected activation_func=silu or gelu without gates, got {activation}; {GIVE_A_CONFIG}"
            )
        if is_silu and not values.get("gated_linear_unit"):
            raise CheckpointError(
                f"{self.path}: expected gates with activation_func=silu, got gated_linear_unit="
                f"{values.get('gated_linear_unit')}; {GIVE_A_CONFIG}"
            )
        given = {name: values[name] for name in _SAME_NAMES if name in values}
        return {
            **given,
            "max_position_embeddings": values.get("seq_length"),
            "swiglu": is_silu,
            # Megatron-Core's fused GELU is the tanh approximation (fusions/fused_bias_gelu.py).
            "bias_gelu_fusion": not is_silu and values.get("bias_activation_fusion"),
            "untie_embeddings_and_output_weights": not values.get(
                "share_embeddings_and_output_weights", True
            ),
            "orig_vocab_size": values.get("vocab_size"),
            "num_experts": values.get("num_moe_experts"),
            "apply_layernorm_1p": values.get("layernorm_zero_centered_gamma"),
            "rotary_seq_len_interpolation_factor": values.get("seq_len_interpolation_factor"),
            **self._rope_arguments(),
        }

    def _rope_arguments(self) -> dict[str, Any]:
        """Arguments of the frequency scaling of Llama 3.1, if the model has it."""
        values = self._values
        factor = values.get("scale_factor")
        if factor in _OFF:
            return {}
        for name, only in _LLAMA_3_1.items():
            if values.get(name) != only:
                raise CheckpointError(
                    f"{self.path}: expected {name}={only} with scale_factor={factor}, got {values.get(name)}; "
                    f"{GIVE_A_CONFIG}"
                )
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}


def _model_values(file: Path) -> dict[str, Any]:
    """Values of the model's config; empty without the file.

    Raises:
        CheckpointError: If the file is damaged, or would become far larger than it is.
    """
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = file.read_text()
        content = load_yaml(text, str(file), _load)
    except (ConfigError, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{file} cannot be read ({reason}); use another copy") from None
    values = content.get("config") if isinstance(content, Mapping) else None
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{file}: expected the arguments of a model of NeMo, with its config, got {str(content)[:40]!r}; use "
            "another copy"
        )
    return {str(name): value for name, value in values.items()}


def _load(text: str) -> Any:
    return yaml.load(text, Loader=yaml.CSafeLoader)  # noqa: S506 (a SafeLoader)


def _name_of_function(value: Any) -> str:
    """Last part of the name of a function in the file."""
    if isinstance(value, Mapping):
        value = value.get(_TARGET)
    return str(value).rpartition(".")[2][:40]
