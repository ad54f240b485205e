"""Make ``checkpoints.tar.xz``: checkpoints of Megatron-Core 0.19.2's own ``HybridModel``, and the logits it computes.

Model, arguments, writer and reader are the engine's (``megatron.core`` and ``megatron.training`` of its wheel), on a
CPU through this package's emulation of CUDA, without its patches. Transformer Engine, which the engine's own specs of
a ``HybridModel`` need, does not run there: its linears and norms are replaced by the engine's local ones, and the norms
are stored under the names that Transformer Engine's fused layers have (``sharded_state_dict_keys_map``, as in the
engine's gpt_layer_specs.py). The files of ``--ckpt-format torch`` have the local names, which no map changes.

The wheel says that it needs Python 3.12, of which it uses ``typing.override``; 3.11 runs it with that name added::

    pip install --no-deps --ignore-requires-python --target ENGINE megatron-core==0.19.2
    PYTHONPATH=ENGINE:. python -m tests.convert.hybrid.make
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from lightning_megatron.engine.runtime import emulated_cuda

TARGET = Path(__file__).parent / "checkpoints.tar.xz"
_VOCAB_SIZE = 60
_PADDED_VOCAB_SIZE = 64
_LENGTH = 24
_MODEL = {
    "hidden-size": 32,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "ffn-hidden-size": 48,
    "normalization": "RMSNorm",
    "norm-epsilon": 1e-5,
    "position-embedding-type": "rope",
    "rotary-base": 5000,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "vocab-size": _VOCAB_SIZE,
    "tokenizer-type": "NullTokenizer",
    "make-vocab-size-divisible-by": 32,
    "init-method-std": 0.2,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "micro-batch-size": 1,
    "transformer-impl": "local",
    "lr": 1e-3,
    "train-iters": 3,
    "save-interval": 3,
}
_SWITCHES = (
    "group-query-attention",
    "swiglu",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "no-save-optim",
    # Need kernels that a CPU lacks.
    "no-rope-fusion",
    "no-gradient-accumulation-fusion",
    "no-masked-softmax-fusion",
    "no-persist-layer-norm",
)
_EXPERTS = {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 48}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("*-*-|*-", {"ckpt-format": "torch_dist"}),
    "legacy": ("*-*-|*-", {"ckpt-format": "torch"}),
    "experts": ("*E|*E", {"ckpt-format": "torch_dist", **_EXPERTS}),
    "two_attentions": ("**--|*-", {"ckpt-format": "torch_dist"}),
}
"""Pattern of layers and other arguments of each checkpoint; all are written at tp=2, pp=2."""
_WITH_LOGITS = ("dense", "experts")


def _arguments(pattern: str, **more: Any) -> Any:
    """Megatron-LM's arguments, parsed and checked by its own functions."""
    from megatron.training import arguments, global_vars

    options = {**_MODEL, "hybrid-layer-pattern": pattern, **more}
    switches = [f"--{name}" for name in _SWITCHES]
    values = [f"--{name}={value}" for name, value in options.items()]
    sys.argv = ["make", *switches, *values]
    arguments.get_device_arch_version = lambda: 9  # of an H200
    args = arguments.parse_args()
    args.rank = dist.get_rank()
    args.world_size = dist.get_world_size()
    arguments.validate_args(args)
    args.padded_vocab_size = _PADDED_VOCAB_SIZE
    global_vars._GLOBAL_ARGS = args
    return args


def stack_spec() -> Any:
    """The engine's hybrid_stack_spec (hybrid_layer_specs.py) with local layers in place of Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
        ),
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    attention_layer = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    )
    mlp_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    )
    moe_layer = TransformerLayerSubmodules(
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=get_moe_module_spec(use_te=False, num_experts=_EXPERTS["num-experts"]),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention_layer),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp_layer),
            moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=moe_layer),
        ),
    )


def _model(args: Any) -> Any:
    """The stage of this rank."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training.arguments import core_transformer_config_from_args

    hybrid_block.TENorm = WrappedTorchNorm
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return HybridModel(
        config=core_transformer_config_from_args(args),
        hybrid_stack_spec=stack_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        pg_collection=groups,
    )


@contextmanager
def _engine(tp: int, pp: int) -> Iterator[None]:
    """The engine's groups and random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    with emulated_cuda():
        parallel_state.initialize_model_parallel(tp, pp)
        model_parallel_cuda_manual_seed(1)
        yield
    dist.destroy_process_group()


def _write(name: str, folder: str) -> None:
    """Write a checkpoint of random weights, as Megatron-LM's training does; on four ranks."""
    from megatron.training.checkpointing import save_checkpoint

    pattern, more = CASES[name]
    sizes = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2}
    with _engine(2, 2):
        model = _model(_arguments(pattern, save=folder, **sizes, **more))
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # the same on both ranks of tp
                seed = len(parameter_name) + dist.get_rank() // 2
                values = torch.Generator().manual_seed(seed)
                parameter.data.uniform_(0.5, 1.5, generator=values)
        save_checkpoint(3, [model], None, None, 0)


def _compute(name: str, folder: str) -> None:
    """Load a distributed checkpoint into the engine's model on one rank, and keep its logits."""
    from megatron.core import dist_checkpointing

    pattern, more = CASES[name]
    with _engine(1, 1):
        model = _model(_arguments(pattern.replace("|", ""), **more)).eval()
        state = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, f"{folder}/iter_0000003")
        model.load_state_dict(loaded["model"])
        input_ids = (torch.arange(_LENGTH)[None] * 7 + 3) % _VOCAB_SIZE
        with torch.no_grad():
            logits = model(input_ids, torch.arange(_LENGTH)[None], None)
        torch.save({"input_ids": input_ids, "logits": logits}, f"{folder}/logits.pt")


def _run(num_ranks: int, *arguments: str) -> None:
    launcher = ["torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    command = [sys.executable, "-m", *launcher, "-m", "tests.convert.hybrid.make", *arguments]
    subprocess.run(command, check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in CASES:
            folder = str(root / name)
            _run(4, "write", name, folder)
            if name in _WITH_LOGITS:
                _run(1, "compute", name, folder)
        # The same weights, written by the same seed.
        shutil.copy(root / "dense" / "logits.pt", root / "legacy" / "logits.pt")
        with tarfile.open(TARGET, "w:xz") as archive:
            for name in CASES:
                archive.add(root / name, arcname=name)


if __name__ == "__main__":
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # validate_args asks for it
    if len(sys.argv) == 1:
        main()
    else:
        _, step, case, path = sys.argv
        {"write": _write, "compute": _compute}[step](case, path)
