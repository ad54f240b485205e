"""Training of mixtures of experts: logged metrics, biases that follow the load, and refusals to lose biases."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import Tensor

from lightning_megatron.convert.registry import model_config
from lightning_megatron.planning.parameters import total_parameters
from tests.checkpoint.runs import EXPERT_BIAS, LLAMA, Run, callback, fit, train
from tests.parity.comparison import all_equal
from tests.parity.training import metrics_of, refusal
from tests.ranks import run_ranks
from tests.recording import recorded_log

MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "router_aux_loss_coef": 0.1,
}
RUN = Run(model=MIXTRAL, trainer={"max_steps": 2})


Logged = tuple[dict[str, float], list[list[float]]]


def _fit_and_read_logs(run: Run) -> tuple[str, Logged]:
    """Lightning's model summary; logged metrics and the expert counts that callbacks see."""
    from lightning.pytorch.callbacks import ModelSummary

    with (
        recorded_log("lightning.pytorch.callbacks.model_summary") as summary,
        recorded_log("megatron.core") as warnings,
    ):
        trainer, _ = fit(run, ModelSummary())
    # Megatron knows the types of all layers, for example.
    assert not warnings.getvalue()
    counts = trainer.strategy.step_shape.expert_counts
    return summary.getvalue(), (metrics_of(trainer), counts.tolist())


def test_expert_load_is_logged_and_summary_counts_all_experts() -> None:
    run = RUN.but(
        strategy={"ep": 2, "pp": 2},
        trainer={"enable_model_summary": True},
    )
    (summary, first), *others = run_ranks(_fit_and_read_logs, 4, run)
    total = get_human_readable_count(total_parameters(model_config(MIXTRAL)))
    assert re.search(rf"{total} +Total params", summary)
    metrics, counts = first
    assert all(other == ("", first) for other in others)
    # 8 rows of 16 tokens, each routed to two of four experts.
    assert [sum(layer) for layer in counts] == [256.0] * 4
    assert metrics["train_expert_load_max"] == max(max(layer) for layer in counts) / 64
    assert metrics["train_expert_load_min"] == min(min(layer) for layer in counts) / 64
    # Minimum: 2 (experts per token) times the coefficient; 8 times it if all tokens had the same two experts.
    assert 0.2 <= metrics["train_load_balancing_loss"] < 0.3
    assert metrics["train_loss"] == pytest.approx(
        metrics["train_lm_loss"] + metrics["train_load_balancing_loss"]
    )


def _train_with_bias(run: Run) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Expert counts of all layers after each step, and the biases by layer on this rank."""
    counts: list[Tensor] = []

    def count(trainer: Any, *_: Any) -> None:
        counts.append(trainer.strategy.step_shape.expert_counts)

    trainer, _ = fit(run, callback(on_train_batch_end=count))
    modules = trainer.lightning_module.model_chunks.modules()
    routers = [module for module in modules if hasattr(module, "gating")]
    return counts, {router.layer_number - 1: router.expert_bias for router in routers}


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (4, {"ep": 2, "tp": 2, "sequence_parallel": True}),
        (2, {"pp": 2, "vpp": 2}),
        (2, {"cp": 2, "ep": 2}),
    ],
)
def test_expert_bias_follows_load_of_global_batch(ranks: int, strategy: dict[str, Any]) -> None:
    run = RUN.but(
        strategy=EXPERT_BIAS, trainer={"max_steps": 3}, model={"router_aux_loss_coef": 0.0}
    )
    ((counts, reference),) = run_ranks(_train_with_bias, 1, run)
    surplus = [step.mean(dim=1, keepdim=True) - step for step in counts]
    expected = 0.05 * sum(each.sign() for each in surplus)
    assert expected.abs().max() > 0.04  # an odd number of steps: the bias oscillates
    assert all(torch.allclose(bias, expected[layer]) for layer, bias in reference.items())
    for sharded_counts, biases in run_ranks(_train_with_bias, ranks, run.but(strategy=strategy)):
        assert all_equal(sharded_counts, counts)
        assert all(torch.equal(bias, reference[layer]) for layer, bias in biases.items())


@pytest.mark.parametrize("groups", [None, (4, 2)])
def test_sigmoid_routing_equals_megatron(groups: tuple[int, int] | None) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from lightning_megatron.engine.ops.router import Router
    from lightning_megatron.engine.ops.routing import Routing

    logits = torch.randn(50, 8)
    bias = torch.randn(8)
    num_groups, topk_groups = groups or (None, None)
    config = SimpleNamespace(
        moe_router_num_groups=num_groups,
        moe_router_group_topk=topk_groups,
    )
    router: Any = SimpleNamespace(
        expert_bias=bias,
        training=False,
        config=config,
    )
    router._routing = Routing(topk=4, is_sigmoid=True, is_normalized=True, min_sum=0.0, scale=2.5)
    router._choose = partial(Router._choose, router)
    router._selection_scores = partial(Router._selection_scores, router)
    probs, chosen = Router.routing(router, logits)
    # Megatron's groups count with their topk / topk_groups = 2 largest scores.
    dense, _ = topk_routing_with_score_function(
        logits,
        4,
        num_groups=num_groups,
        group_topk=topk_groups,
        scaling_factor=2.5,
        score_function="sigmoid",
        expert_bias=bias,
    )
    torch.testing.assert_close(
        torch.zeros(50, 8).scatter(1, chosen, probs),
        dense,
    )


def _export(run: Run) -> None:
    fit(run)[0].lightning_module.save_pretrained("exported")


def test_expert_biases_are_never_dropped_silently(tmp_path: Path) -> None:
    from tests.convert.directories import converted

    biased = RUN.but(strategy=EXPERT_BIAS)
    path = tmp_path / "a.ckpt"
    plain = tmp_path / "b.ckpt"
    run_ranks(train, 1, biased, path)
    run_ranks(train, 1, RUN, plain)
    for message, call, *arguments in (
        ("no Hugging Face mixtral model has biases of experts", _export, biased),
        ("expert_bias", converted, path, tmp_path / "hf"),
        ("expert_bias=True there and None here", fit, RUN.but(ckpt_path=str(path))),
        ("expert_bias", fit, biased.but(ckpt_path=str(plain))),
        (
            "experts.num_experts=4 there and 8 here",
            fit,
            RUN.but(model={"num_local_experts": 8}, ckpt_path=str(plain)),
        ),
    ):
        assert message in run_ranks(refusal, 1, call, *arguments)[0]
