"""Converted weights are the same, bit for bit, to Hugging Face, to our strategy and to Megatron-Core itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.contents import open_source
from lightning_megatron.convert.convert import ConvertOptions, convert
from lightning_megatron.convert.shards import Key
from tests.checkpoint.runs import LLAMA, Run, Trace, fit, read_tensors
from tests.convert.directories import assert_same, save_as, tensors_in, tiny, tiny_gpt2, tiny_llama
from tests.convert.weights import weights_of
from tests.families.parity import Rows, padded_sentences
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def _convert(source: Path, target: Path, **options: Any) -> Path:
    convert(ConvertOptions(**{"load_path": source, "save_path": target, "to": "megatron", **options}))
    return target


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def validated(checkpoint: str, config: str, layout: Layout, rows: Rows) -> float:
    """The loss of a module with random weights that gets those of ``checkpoint``."""
    from torch.utils.data import DataLoader

    from lightning_megatron import MegatronModule

    loader: Any = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    module = MegatronModule(model=config, make_vocab_size_divisible_by=8)
    (logged,) = trainer_of(Case(layout=layout)).validate(module, loader, ckpt_path=checkpoint, verbose=False)
    return float(logged["val_loss"])


def trained_and_saved(run: Run, folder: str) -> None:
    """Train, and save as a checkpoint and as a Hugging Face directory."""
    trainer, _ = fit(run)
    trainer.save_checkpoint(Path(folder) / "run.ckpt")
    trainer.lightning_module.save_pretrained(Path(folder) / "expected")


def trained(run: Run) -> Trace:
    """Train."""
    return fit(run)[1]


def loaded_by_megatron_core(checkpoint: str) -> dict[str, torch.Tensor]:
    """This rank's weights of Megatron-Core's own GPT at tp=2, with nothing of ours but the groups."""
    from datetime import timedelta

    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from lightning_megatron.engine import groups
    from lightning_megatron.engine.parallel import ParallelConfig
    from lightning_megatron.engine.runtime import Runtime

    dist.init_process_group("gloo")
    runtime = Runtime(torch.device("cpu"))
    groups.initialize(ParallelConfig(tp=2), timedelta(minutes=1))
    runtime.seed(1, 0)
    with runtime.active():
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            tensor_model_parallel_size=2,
            use_cpu_initialization=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=128,
            max_sequence_length=1024,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        )
        model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)["model"])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- there and back -------------------------------------------------------------------------------------------------


# ---- who loads it ---------------------------------------------------------------------------------------------------


def _t5() -> Any:
    model = tiny("t5")
    model.config.update({"decoder_start_token_id": 0, "dropout_rate": 0.0})
    return model


@pytest.mark.parametrize(
    ("make", "layout"),
    [(tiny_llama, Layout(tp=2)), (_t5, Layout(pp=2, num_microbatches=2))],
    ids=["llama", "t5"],
)
def test_the_strategy_computes_hugging_faces_loss(tmp_path: Path, make: Any, layout: Layout) -> None:
    model = make()
    save_as(model, tmp_path / "source", "safetensors")
    rows = padded_sentences()
    expected = model(**{field: torch.stack([row[field] for row in rows]) for field in rows[0]}).loss.item()
    _convert(tmp_path / "source", tmp_path / "model.ckpt", tp=layout.tp, pp=layout.pp)

    arguments = (str(tmp_path / "model.ckpt"), str(tmp_path / "source" / "config.json"), layout, rows)
    for found in run_ranks(validated, layout.world_size, *arguments):
        assert found == pytest.approx(expected, rel=2e-6)  # other kernels add in another order


@pytest.mark.parametrize(("model", "precision"), [(LLAMA, "32-true"), ({}, "bf16-mixed")], ids=["llama", "gpt2-bf16"])
def test_a_trained_checkpoint_becomes_what_the_module_saves(
    tmp_path: Path, model: dict[str, Any], precision: str
) -> None:
    strategy = {"tp": 2, "pp": 2, "sequence_parallel": True}
    run = Run(model=model, strategy=strategy, trainer={"max_steps": 2, "precision": precision})
    run_ranks(trained_and_saved, 4, run, str(tmp_path))

    _convert(tmp_path / "run.ckpt", tmp_path / "back", to="hf")
    _convert(tmp_path / "run.ckpt", tmp_path / "legacy", to="megatron-legacy", tp=2)
    _convert(tmp_path / "run.ckpt", tmp_path / "weights.ckpt", pp=2, make_vocab_size_divisible_by=8)

    for step, source in enumerate((tmp_path / "legacy", tmp_path / "weights.ckpt")):
        _convert(source, tmp_path / f"from{step}", to="hf")
        assert_same(tensors_in(tmp_path / f"from{step}"), tensors_in(tmp_path / "expected"))
    assert_same(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "expected"))
    assert open_source(tmp_path / "run.ckpt").iteration == 2
    assert any(name.startswith("optimizer.") for name in read_tensors(tmp_path / "run.ckpt"))
    assert not any(name.startswith("optimizer.") for name in read_tensors(tmp_path / "weights.ckpt"))
    begun = Run(model=model, strategy={"load_from": str(tmp_path / "weights.ckpt")}, trainer={"max_steps": 1})
    assert list(run_ranks(trained, 1, begun)[0].steps) == [1]


def test_megatron_core_loads_it_at_its_own_layout(tmp_path: Path) -> None:
    save_as(tiny_gpt2(), tmp_path / "source", "safetensors")
    _convert(tmp_path / "source", tmp_path / "model.ckpt", pp=2)
    tensors = weights_of(tmp_path / "source").tensors

    for rank, found in enumerate(run_ranks(loaded_by_megatron_core, 2, str(tmp_path / "model.ckpt"))):
        words = tensors[Key("embedding.word_embeddings.weight")]
        here = words[64 * rank : 64 * (rank + 1)]
        assert torch.equal(found["embedding.word_embeddings.weight"][: len(here)], here)
        qkv = tensors[Key("decoder.layers.self_attention.linear_qkv.weight", 1)][48 * rank : 48 * (rank + 1)]
        assert torch.equal(found["decoder.layers.1.self_attention.linear_qkv.weight"], qkv)
        norm = tensors[Key("decoder.layers.mlp.linear_fc1.layer_norm_bias", 0)]
        assert torch.equal(found["decoder.layers.0.pre_mlp_layernorm.bias"], norm)
        proj = tensors[Key("decoder.layers.self_attention.linear_proj.weight", 1)]
        here = proj[:, 16 * rank : 16 * (rank + 1)]
        assert torch.equal(found["decoder.layers.1.self_attention.linear_proj.weight"], here)
