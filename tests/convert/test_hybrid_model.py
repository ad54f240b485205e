"""Checkpoints of Megatron-Core's ``HybridModel``, which 0.19 has in place of ``GPTModel``; hybrid/make.py made them."""

import importlib.util
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.formats import open_source
from lightning_megatron.errors import CheckpointError
from tests.checkpoint.runs import Run, train
from tests.cli.command import run_all
from tests.convert.directories import converted, save_as, tensors_in, tiny_llama
from tests.convert.hybrid.make import TARGET, stack_spec
from tests.convert.test_distributed_foreign import write_distributed
from tests.ranks import RankError, run_ranks

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 60,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
_MIXTRAL = {
    **_LLAMA,
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_LENGTH = 16


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the checkpoints of hybrid/make.py, by their names."""
    folder = tmp_path_factory.mktemp("hybrid")
    with tarfile.open(TARGET) as archive:
        archive.extractall(folder, filter="data")
    (folder / "llama.json").write_text(json.dumps(_LLAMA))
    (folder / "mixtral.json").write_text(json.dumps(_MIXTRAL))
    return folder


def _hugging_face(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize(("name", "config"), [("dense", None), ("experts", "mixtral.json")])
def test_transformers_computes_the_logits_of_the_engine(
    tmp_path: Path, checkpoints: Path, name: str, config: str | None
) -> None:
    given = checkpoints / config if config else None
    model = _hugging_face(converted(checkpoints / name, tmp_path / "hf", config=given))
    stored = torch.load(checkpoints / name / "logits.pt")
    with torch.no_grad():
        logits = model(stored["input_ids"]).logits
    expected = stored["logits"][..., : logits.shape[-1]]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


def test_files_of_each_rank_hold_the_same_model(tmp_path: Path, checkpoints: Path) -> None:
    distributed = converted(checkpoints / "dense", tmp_path / "distributed")
    legacy = converted(checkpoints / "legacy", tmp_path / "legacy")
    expected = tensors_in(distributed)
    tensors = tensors_in(legacy)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(expected[name]) for name in expected)


def rows(dp: int) -> Any:
    """``DataLoader`` of one batch of eight rows."""
    from torch.utils.data import DataLoader

    ids = (torch.arange(8)[:, None] * 5 + torch.arange(_LENGTH) * 3) % 60
    samples: Any = [{"input_ids": row} for row in ids]
    return DataLoader(samples, batch_size=8 // dp)


def first_loss(run: Run) -> float:
    loss: float = train(run).steps[1]["loss"]
    return loss


@pytest.mark.parametrize("name", ["dense", "legacy"])
def test_run_begins_with_its_weights(tmp_path: Path, checkpoints: Path, name: str) -> None:
    run = Run(
        model=_LLAMA,
        loader=rows,
        trainer={"max_steps": 1},
        strategy={"tp": 2, "load_from": str(checkpoints / name)},
    )
    model = _hugging_face(converted(checkpoints / "dense", tmp_path / "hf"))
    (batch,) = rows(1)
    # The logits of the four rows of padding do not take part in the run's loss.
    logits = model(**batch).logits[:, :-1, :60]
    labels = batch["input_ids"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert run_ranks(first_loss, 2, run) == [pytest.approx(expected.item(), rel=1e-5)] * 2


def all_losses(run: Run) -> list[float]:
    return [step["loss"] for step in train(run).steps.values()]


def test_master_weights_begin_with_its_weights_wherever_they_are(checkpoints: Path) -> None:
    """The second step's loss is that of weights that the first update has written from the masters."""
    run = Run(
        model=_LLAMA,
        loader=rows,
        trainer={"max_epochs": 3, "precision": "bf16-mixed"},
        strategy={"load_from": str(checkpoints / "dense")},
    )
    (expected,) = run_ranks(all_losses, 1, run)
    (offloaded,) = run_ranks(all_losses, 1, run.but(strategy={"offload_optimizer": True}))
    assert len(expected) == 3
    assert offloaded == expected


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"strict": False}, {}, "strict=False needs a checkpoint of MegatronStrategy"),
        ({"optimizer": True}, {}, "optimizer=True needs a checkpoint of MegatronStrategy"),
        ({"step": 7}, {}, r"expected iter_0000007 \(iteration=7\), got iter_0000003"),
        ({}, {"rms_norm_eps": 1e-6}, "another model: layernorm_epsilon=1e-05 there and 1e-06 here"),
        ({}, {"num_hidden_layers": 2}, "another model: num_layers=3 there and 2 here"),
    ],
    ids=str,
)
def test_other_model_or_option_is_refused(
    checkpoints: Path, options: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    run = Run(
        model={**_LLAMA, **model},
        loader=rows,
        trainer={"max_steps": 1},
        strategy={"load_from": {"path": str(checkpoints / "dense"), **options}},
    )
    with pytest.raises(RankError, match=message):
        run_ranks(first_loss, 1, run)


def test_inspect_shows_the_engine_names(checkpoints: Path) -> None:
    ((code, out, error),) = run_all(checkpoints, [("inspect", "dense")])
    assert code == 0, error
    assert "decoder.final_norm.weight" in out
    assert "num_layers 6" in out


def test_layers_that_no_family_pairs_are_refused(checkpoints: Path) -> None:
    with pytest.raises(CheckpointError, match=r"in turn, .* got '\*\*--\*-'"):
        open_source(checkpoints / "two_attentions")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({0: "mixer.in_proj", 1: "mlp.linear_fc1"}, r"got 'M-' \(M: Mamba"),
        ({0: "self_attention.linear_qkv", 2: "mlp.linear_fc1"}, r"got '\*\?'"),
        ({0: "self_attention.linear_qkv", 1: "adapter.linear"}, r"got '\*\?'"),
        ({0: "self_attention.linear_qkv"}, r"got '\*'"),
    ],
    ids=["mamba", "missing layer", "unknown module", "no MLP"],
)
def test_other_layers_are_refused(
    tmp_path: Path,
    layers: dict[int, str],
    message: str,
) -> None:
    tensors = {
        f"decoder.layers.{layer}.{module}.weight": torch.zeros(8, 4)
        for layer, module in layers.items()
    }
    path = write_distributed(
        tmp_path / "core", {**tensors, "decoder.final_norm.weight": torch.zeros(4)}
    )
    with pytest.raises(CheckpointError, match=f"an MLP .-. in turn, .* {message}"):
        open_source(path)


# ---- the engine's reader ---------------------------------------------------------------------------------------------


def _logits_of_the_engine(
    path: Path,
    fields: dict[str, Any],
    input_ids: Any,
) -> Any:
    """Logits of a ``HybridModel`` with the weights of a checkpoint of this package, which the engine itself reads."""
    import megatron.core.models.hybrid.hybrid_block as hybrid_block
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lightning_megatron.convert.convert import live_engine
    from lightning_megatron.engine.parallel import ParallelConfig

    hybrid_block.TENorm = WrappedTorchNorm
    pattern = "*-" * fields["num_hidden_layers"]
    with live_engine(ParallelConfig()):
        config = TransformerConfig(
            num_layers=len(pattern),
            hidden_size=fields["hidden_size"],
            ffn_hidden_size=fields["intermediate_size"],
            num_attention_heads=fields["num_attention_heads"],
            num_query_groups=fields["num_key_value_heads"],
            layernorm_epsilon=fields["rms_norm_eps"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            params_dtype=torch.float32,
        )
        model = HybridModel(
            config=config,
            hybrid_stack_spec=stack_spec(),
            vocab_size=128,  # with the padding of the checkpoint
            max_sequence_length=fields["max_position_embeddings"],
            hybrid_layer_pattern=pattern,
            position_embedding_type="rope",
            rotary_base=fields["rope_parameters"]["rope_theta"],
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ).eval()
        state = model.sharded_state_dict()
        retarget_sharded_state_dict_to_gpt_checkpoint(state, gpt_compatible_layer_maps(pattern))
        loaded = dist_checkpointing.load({"model": state}, str(path))
        model.load_state_dict(loaded["model"])
        positions = torch.arange(input_ids.shape[1])[None]
        with torch.no_grad():
            return model(input_ids, positions, None)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.dist_checkpointing.gpt_checkpoint_interop") is None,
    reason="needs megatron-core 0.19; `nox -s engines` with Python 3.12 runs it",
)
def test_engine_reads_our_checkpoints_into_its_class(tmp_path: Path) -> None:
    model = tiny_llama().eval()
    save_as(model, tmp_path / "hf", "safetensors")
    path = converted(tmp_path / "hf", tmp_path / "run.ckpt", to="megatron")
    input_ids = torch.arange(20)[None] * 3
    with torch.no_grad():
        expected = model(input_ids).logits
    (logits,) = run_ranks(
        _logits_of_the_engine,
        1,
        path,
        model.config.to_dict(),
        input_ids,
    )
    torch.testing.assert_close(
        logits[..., : expected.shape[-1]],
        expected,
        rtol=1e-4,
        atol=2e-5,
    )
