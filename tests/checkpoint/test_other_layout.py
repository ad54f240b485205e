"""A run resumes at other sizes of tp, pp, vpp, cp and dp, with or without distributed optimizer.

Megatron pads its buckets to multiples of dp, so at dp = 3 all offsets differ from those at dp = 1, 2 and 4.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checkpoint.runs import (
    EXPERT_BIAS,
    LLAMA,
    NO_DROPOUT,
    VOCAB_SIZE,
    Run,
    differences,
    fit,
    read_plain_state,
    read_tensors,
    rows_dataset,
    train,
)
from tests.marks import exhaustive
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

Layout = tuple[int, dict[str, Any]]
"""World size and arguments of the strategy."""

ONE: Layout = (1, {})
TP2: Layout = (2, {"tp": 2})
TP2_SP: Layout = (2, {"tp": 2, "sequence_parallel": True})
PP4: Layout = (4, {"pp": 4})
PP2_VPP2: Layout = (2, {"pp": 2, "vpp": 2})
CP2: Layout = (2, {"cp": 2})
DP2: Layout = (2, {})
DP3: Layout = (3, {})
PP2_UNEVEN: Layout = (2, {"pp": 2, "num_layers_in_last_pipeline_stage": 1})

BATCH = 12
"""Rows per step: a multiple of every dp."""
SAMPLES = 48
"""Four steps per epoch."""


def _unsharded(layout: Layout) -> Layout:
    """The layout without distributed optimizer."""
    return layout[0], {**layout[1], "distributed_optimizer": False}


def _loader(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(SAMPLES), batch_size=BATCH // dp, shuffle=True)


FP16: dict[str, Any] = {
    "trainer": {"precision": "16-mixed"},
    "optimizer": {"initial_loss_scale": 2.0**9, "loss_scale_window": 2},
}


EXPERTS: dict[str, Any] = {
    "model": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_key_value_heads": 4},
    # With more microbatches, the tokens that are balanced together would depend on the layout.
    "strategy": {"num_microbatches": 1, **EXPERT_BIAS},
}
GPT_OSS: dict[str, Any] = {
    "model": {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "strategy": {"num_microbatches": 1},
}
"""Sinks are split over tp, and biases over ep."""
DEEPSEEK: dict[str, Any] = {
    "model": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": LLAMA["num_attention_heads"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 12,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
    "strategy": {"num_microbatches": 1},
}
"""Projections to latents are replicated, those from latents split over tp."""
ERNIE: dict[str, Any] = {
    "model": {**LLAMA, "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2},
    "strategy": {"num_microbatches": 1},
}
"""Biases select experts beside a softmax."""
QWEN3_NEXT: dict[str, Any] = {
    "model": {
        **LLAMA,
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    },
    "strategy": {"num_microbatches": 1},
}
"""Two kinds of layers; convolutions and decays are split over tp."""
APERTUS: dict[str, Any] = {"model": {**LLAMA, "model_type": "apertus"}}
"""Parameters and constants of activations are replicated."""
EP2: Layout = (2, {"ep": 2})
TP2_EP2: Layout = (
    2,
    {"tp": 2, "ep": 2, "sequence_parallel": True},
)
EP4: Layout = (4, {"ep": 4})
PP2_EP2: Layout = (4, {"pp": 2, "ep": 2})


@pytest.mark.parametrize(
    ("changes", "layouts"),
    [
        pytest.param(
            EXPERTS,
            [EP2, ONE, EP4, TP2_EP2, _unsharded(EP2), PP2_EP2, DP3],
            id="experts",
        ),
        pytest.param(
            {**EXPERTS, "optimizer": {"name": "muon"}},
            [TP2_EP2, DP3, PP2_EP2, _unsharded(EP2)],
            id="muon",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            GPT_OSS,
            [TP2_EP2, ONE, PP2_EP2, _unsharded(TP2_EP2)],
            id="gpt_oss",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DEEPSEEK,
            [TP2_EP2, ONE, PP2_EP2, _unsharded(TP2_EP2)],
            id="deepseek_v3",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            QWEN3_NEXT,
            [TP2_EP2, ONE, PP2_EP2, _unsharded(TP2_EP2)],
            id="qwen3_next",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ERNIE,
            [TP2_EP2, ONE, PP2_EP2, EP2],
            id="ernie4_5_moe",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            APERTUS,
            [PP2_VPP2, ONE, TP2_SP, DP3],
            id="apertus",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {},
            [CP2, ONE, TP2_SP, PP2_VPP2, PP2_UNEVEN, PP4, DP3],
            id="tied",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            FP16,
            [DP2, _unsharded(TP2), DP3],
            id="fp16",
        ),
    ],
)
def test_resume_at_other_layouts_keeps_weights_and_moments(
    tmp_path: Path, changes: dict[str, Any], layouts: list[Layout]
) -> None:
    """The padded vocabulary is 104 rows at tp=1 and 112 at tp=2; only the real rows are compared."""
    run = Run(
        loader=_loader, module={"make_vocab_size_divisible_by": 8}, trainer={"max_steps": 3}
    ).but(**changes)
    paths = [tmp_path / f"{index}.ckpt" for index in range(len(layouts))]
    for index, (world_size, strategy) in enumerate(layouts):
        # From the second layout on, max_steps is already reached: the loaded state is saved again.
        resumed_from = str(paths[index - 1]) if index else None
        run_ranks(
            train,
            world_size,
            run.but(strategy=strategy, ckpt_path=resumed_from),
            paths[index],
        )

    original = read_tensors(paths[0])
    plain = read_plain_state(paths[0])
    for path, (_, strategy) in zip(paths[1:], layouts[1:], strict=True):
        copy = read_tensors(path)
        assert copy.keys() == original.keys()
        for name, tensor in original.items():
            rows = VOCAB_SIZE if "word_embeddings" in name or "output_layer" in name else None
            assert tensor[:rows].equal(copy[name][:rows]), (
                f"{name} changed on the way to {strategy}"
            )
        assert differences(plain, read_plain_state(path)) == [], (
            f"the optimizer changed on the way to {strategy}"
        )
    moments = original["optimizer.state.exp_avg.embedding.word_embeddings.weight"]
    assert moments[:VOCAB_SIZE].abs().sum() > 0
    if "name" in run.optimizer:
        of_matrix = "decoder.layers.self_attention.linear_qkv.weight"
        assert original[f"optimizer.state.exp_avg.{of_matrix}"].abs().sum() > 0
        assert f"optimizer.state.exp_avg_sq.{of_matrix}" not in original
    if changes is EXPERTS:
        assert original["decoder.layers.mlp.router.expert_bias"].abs().sum() > 0
    if "precision" in run.trainer:
        name = "decoder.layers.mlp.linear_fc1.weight"
        weight = original[name]
        master = original[f"optimizer.state.param.{name}"]
        assert master.dtype != weight.dtype
        assert master.to(weight.dtype).equal(weight)
    if changes is FP16:
        # 512, doubled after two finite steps; one more has been counted since.
        assert plain[".grad_scaler.scale"] == 2.0**10
        assert plain[".grad_scaler.growth_tracker"] == 1


# ---- the optimizer's state equals megatron-core's, and is loaded in another precision -------------------------------

BF16: dict[str, Any] = {"precision": "bf16-mixed"}
LLAMA_RUN = Run(
    model=LLAMA,
    module={"make_vocab_size_divisible_by": 4},
    trainer={"max_steps": 2},
)
"""Without padding of the vocabulary."""


def _has_notice(first: Run, resumed: Run, folder: Path) -> bool:
    """Whether resuming a run of tp=2 with dp=2 says that dropout masks differ."""
    path = folder / "first.ckpt"
    train(first, path)
    with recorded_warnings("dropout masks differ") as messages:
        train(resumed.but(ckpt_path=str(path)))
    return bool(messages)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param({"model": NO_DROPOUT}, {}, False, id="no dropout"),
        pytest.param(
            {"model": NO_DROPOUT},
            {"model": {"attn_pdrop": 0.1}},
            True,
            id="new dropout",
        ),
        pytest.param({}, {"model": NO_DROPOUT}, False, id="no dropout any more"),
        pytest.param(
            {
                "model": NO_DROPOUT,
                "module": {"lora": {"rank": 2, "dropout": 0.1}},
            },
            {},
            True,
            id="dropout of adapters",
        ),
    ],
)
def test_only_a_model_with_dropout_is_told_that_masks_differ(
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    expected: bool,
) -> None:
    run = Run(
        loader=_loader,
        trainer={"max_steps": 1},
    ).but(**before)
    first = run.but(strategy={"tp": 2})
    resumed = run.but(**after)
    has_notice, _ = run_ranks(_has_notice, 2, first, resumed, tmp_path)
    assert has_notice == expected


def _save_and_gather(run: Run, now: Path, before: Path) -> None:
    """Save our sharded state dict to ``now`` and the one that Megatron gathers to ``before``."""
    from megatron.core.optimizer import distrib_optimizer

    from lightning_megatron.checkpoint.state import SHARDING
    from lightning_megatron.engine.optimizer import MegatronOptimizer

    def gathered(
        optimizer: Any,
        models: Any,
        **options: Any,
    ) -> dict[str, Any]:
        state: dict[str, Any] = optimizer.inner.sharded_state_dict(models, metadata=dict(SHARDING))
        return state

    trainer, _ = fit(run)
    trainer.save_checkpoint(now)
    # Keep the step count in the parameter groups, as Apex's Adam does.
    like_apex = patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)
    with (
        like_apex,
        patch.object(MegatronOptimizer, "sharded_state_dict", gathered),
        trainer.strategy.engine(),
    ):
        trainer.save_checkpoint(before)


def test_sharded_optimizer_state_equals_the_one_megatron_gathers(tmp_path: Path) -> None:
    now = tmp_path / "now.ckpt"
    before = tmp_path / "before.ckpt"
    run_ranks(_save_and_gather, 3, LLAMA_RUN, now, before)

    ours = read_tensors(now)
    theirs = read_tensors(before)
    assert differences(theirs, ours) == []
    assert differences(read_plain_state(before), read_plain_state(now)) == []
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in ours) == len(ours) // 4


@pytest.mark.parametrize(
    "optimizer",
    [{}, exhaustive(_unsharded(ONE)[1])],
    ids=["sharded optimizer", "unsharded optimizer"],
)
def test_master_weights_survive_a_change_of_precision(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    in_16_bits, in_32_bits, back = (tmp_path / f"{name}.ckpt" for name in ("a", "b", "c"))
    run_ranks(train, 2, LLAMA_RUN.but(trainer=BF16), in_16_bits)
    first, *other_traces = run_ranks(
        train,
        3,
        LLAMA_RUN.but(strategy=optimizer, ckpt_path=str(in_16_bits)),
        in_32_bits,
    )
    run_ranks(
        train,
        2,
        LLAMA_RUN.but(trainer=BF16, ckpt_path=str(in_32_bits)),
        back,
    )

    source = read_tensors(in_16_bits)
    copy = read_tensors(in_32_bits)
    weights = [name for name in source if not name.startswith("optimizer.")]
    assert weights
    for name in weights:
        master = source[f"optimizer.state.param.{name}"]
        assert copy[name].equal(master)
        assert not source[name].float().equal(master) or name.endswith("layer_norm_weight"), (
            "nothing was rounded"
        )
    assert differences(source, read_tensors(back)) == []
    # Every rank has all masters, also those that its optimizer does not hold.
    for trace in other_traces:
        names = [name for name in trace.state if name.startswith("weights.")]
        for name in names:
            assert trace.state[name].equal(first.state[name])
