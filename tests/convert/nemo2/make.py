"""Make ``checkpoint.tar.xz``: a checkpoint of NeMo 2.7.0, and the Hugging Face model that NeMo imported it from.

NeMo's own classes write it: ``HFLlamaImporter`` with its Trainer, MegatronStrategy, MegatronCheckpointIO and
``io_dump`` of nemo_toolkit 2.7.0, on a CPU through this package's emulation of CUDA, with megatron-core 0.16.1. What
differs from a machine with GPUs, none of which names or stores anything otherwise:

- Transformer Engine is absent. The engine's local layers take its place, with the norms of fused layers as parameters
  of their linears (``layer_norm_weight``), which NeMo's importer fills by these names.
- Of the packages that NeMo imports, those without a part in this are empty modules (``_ABSENT``), and ModelOpt's hooks
  do nothing.
- transformers 5 has moved attributes that NeMo reads; they are put back (``_read_config``, ``_track_tokenizers``).

It needs, beside this package's test environment::

    pip install --no-deps --target NEMO nemo_toolkit==2.7.0 nemo_run==0.11.1 fiddle==0.3.1 libcst hydra-core \
        omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 onnx ml_dtypes wget wrapt cloudpickle toml pytz six catalogue \
        strenum einops sentencepiece tiktoken numexpr nv_one_logger_core nv_one_logger_training_telemetry \
        nv_one_logger_pytorch_lightning_integration
    PYTHONPATH=.:NEMO python -m tests.convert.nemo2.make
"""

import importlib.abc
import importlib.machinery
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "checkpoint.tar.xz"
_VOCAB_SIZE = 83
_ABSENT = {
    "IPython",
    "bs4",
    "cryptography",
    "decord",
    "diffusers",
    "fabric",
    "faiss",
    "ftfy",
    "graphviz",
    "ijson",
    "inquirerpy",
    "jieba",
    "leptonai",
    "lhotse",
    "librosa",
    "megatron_energon",
    "nltk",
    "opencc",
    "overrides",
    "pangu",
    "paramiko",
    "qwen_vl_utils",
    "rapidfuzz",
    "requests",
    "rouge_score",
    "sacrebleu",
    "soundfile",
    "tensorstore",
    "torchx",
    "typer",
    "wandb",
    "webdataset",
    "zarr",
}
"""Packages that NeMo imports and does not use here."""


class _Name(type):
    """An empty class, whose attributes are their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    """A module in which any name is an empty class; of ``overrides`` a decorator that changes nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "overrides":
            return type(name, (), {}) if name[0].isupper() else lambda function: function
        return _Name(name, (), {"__init__": lambda self, *_, **__: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages after all others."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _leave_out_modelopt() -> None:
    for name in ("nemo.collections.llm.modelopt", "nemo.collections.llm.modelopt.model_utils"):
        module = types.ModuleType(name)
        module.__path__ = []
        for function in ("restore_modelopt_state", "save_modelopt_state"):
            setattr(module, function, lambda *_, **__: None)
        sys.modules[name] = module


def _layer_spec(config: Any, vp_stage: Any = None) -> Any:
    """The engine's local layer, with norms in the linears behind them, as Transformer Engine's have them."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class NormAndLinear(ColumnParallelLinear):
        def __init__(self, *args: Any, config: Any, **options: Any) -> None:
            super().__init__(*args, config=config, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(config.hidden_size))

    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    parts = spec.submodules
    parts.input_layernorm = IdentityOp
    parts.pre_mlp_layernorm = IdentityOp
    parts.sharded_state_dict_keys_map = {}
    parts.self_attention.submodules.linear_qkv = NormAndLinear
    parts.mlp.submodules.linear_fc1 = NormAndLinear
    return spec


def _use_torch_kernels() -> None:
    """Let NeMo's defaults name fused kernels, which only a forward pass would need."""
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import torch_norm
    from nemo.collections.llm.gpt.model import base

    rope_utils.fused_apply_rotary_pos_emb = object()
    rope_utils.fused_apply_rotary_pos_emb_thd = object()
    torch_norm.WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps: torch.nn.RMSNorm(
        hidden_size, eps=eps
    )
    base.HAVE_TE = False
    base.local_layer_spec = _layer_spec


def _use_the_engine_without_tensorstore() -> None:
    """megatron-core 0.16.1 has no tensorstore strategy, which NeMo imports beside those that it uses."""
    import nemo.utils.callbacks.dist_ckpt_io as dist_ckpt_io
    from megatron.core.dist_checkpointing.strategies import async_utils

    dist_ckpt_io.AsyncCallsQueue = async_utils.AsyncCallsQueue
    dist_ckpt_io.AsyncRequest = async_utils.AsyncRequest
    dist_ckpt_io.HAVE_MEGATRON_CORE = True


def _track_tokenizers() -> None:
    """As nemo/lightning/io/registry.py, which ends at an import from transformers 4."""
    from nemo.collections.common.tokenizers import AutoTokenizer
    from nemo.lightning.io.artifact import DirOrStringArtifact, FileArtifact
    from nemo.lightning.io.mixin import track_io

    files = [FileArtifact(name, required=False) for name in ("vocab_file", "merges_file")]
    folder = DirOrStringArtifact("pretrained_model_name", required=False)
    track_io(AutoTokenizer, artifacts=[*files, folder])


def _read_config() -> None:
    """Give configs the attributes that they had in transformers 4."""
    import torch
    import transformers

    original = transformers.AutoConfig.from_pretrained

    def from_pretrained(*args: Any, **options: Any) -> Any:
        config = original(*args, **options)
        if not isinstance(config, tuple):
            object.__setattr__(config, "rope_theta", config.rope_parameters["rope_theta"])
            object.__setattr__(config, "rope_scaling", None)
            object.__setattr__(config, "torch_dtype", torch.float32)
        return config

    transformers.AutoConfig.from_pretrained = from_pretrained


def _save_hugging_face(folder: Path) -> None:
    import torch

    from tests.convert.directories import save_as, tiny_llama
    from tests.tokenizers import save_word_tokenizer

    torch.manual_seed(3)
    model = tiny_llama()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
    save_as(model, folder, "safetensors")
    save_word_tokenizer(folder, _VOCAB_SIZE)


def main() -> None:
    from lightning_megatron.engine.runtime import emulated_cuda

    sys.meta_path.append(_Finder())
    from nemo.collections.llm.gpt.model.llama import HFLlamaImporter

    _leave_out_modelopt()
    _use_torch_kernels()
    _use_the_engine_without_tensorstore()
    _track_tokenizers()
    _read_config()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        _save_hugging_face(root / "hf")
        with emulated_cuda():
            HFLlamaImporter(str(root / "hf")).apply(root / "nemo")
        with tarfile.open(TARGET, "w:xz") as archive:
            for name in ("hf", "nemo"):
                archive.add(root / name, arcname=name)


if __name__ == "__main__":
    main()
