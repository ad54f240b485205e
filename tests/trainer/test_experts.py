"""Training with experts: what is logged, how biases follow the load, and that none is lost silently."""

import io
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.model_summary import get_human_readable_count

from lightning_megatron.accounting import total_parameters
from lightning_megatron.convert.registry import model_config
from tests.checkpoint.runs import EXPERT_BIAS, LLAMA, Run, callback, fit, train
from tests.parity.training import refusal
from tests.ranks import run_ranks

MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.1}
RUN = Run(model=MIXTRAL, trainer={"max_steps": 2})


def _logged(run: Run) -> tuple[str, tuple[dict[str, float], list[list[float]]]]:
    """Lightning's summary; metrics, and what callbacks know."""
    from lightning.pytorch.callbacks import ModelSummary

    summary, log = io.StringIO(), logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.addHandler(logging.StreamHandler(summary))
    trainer, _ = fit(run, ModelSummary())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return summary.getvalue(), (metrics, trainer.strategy.step_shape.expert_counts.tolist())


def test_the_load_of_experts_is_logged_and_known_to_callbacks_and_the_summary_counts_all() -> None:
    run = RUN.but(strategy={"ep": 2, "pp": 2}, trainer={"enable_model_summary": True})
    (summary, one), *others = run_ranks(_logged, 4, run)
    total = get_human_readable_count(total_parameters(model_config(MIXTRAL)))
    assert re.search(rf"{total} +Total params", summary)
    metrics, counts = one
    assert all(other == ("", one) for other in others)
    # 8 rows of 16 tokens, each to two of four experts.
    assert [sum(layer) for layer in counts] == [256.0] * 4
    assert metrics["train_expert_load_max"] == max(max(layer) for layer in counts) / 64
    assert metrics["train_expert_load_min"] == min(min(layer) for layer in counts) / 64
    # The least possible is 2, the experts of a token, times the coefficient; 8 if all went to the same two.
    assert 0.2 <= metrics["train_load_balancing_loss"] < 0.3
    assert metrics["train_loss"] == pytest.approx(metrics["train_lm_loss"] + metrics["train_load_balancing_loss"])


def _biased(run: Run) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The load of all layers after each step, and the biases of the layers on this rank."""
    counts: list[torch.Tensor] = []
    watch = callback(on_train_batch_end=lambda trainer, *_: counts.append(trainer.strategy.step_shape.expert_counts))
    trainer, _ = fit(run, watch)
    routers = [m for chunk in trainer.lightning_module.model_chunks for m in chunk.modules() if hasattr(m, "gating")]
    return counts, {router.layer_number - 1: router.expert_bias for router in routers}


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(4, {"ep": 2, "tp": 2, "sequence_parallel": True}), (2, {"pp": 2, "vpp": 2}), (2, {"cp": 2, "ep": 2})],
)
def test_a_bias_follows_the_load_of_the_whole_batch(ranks: int, strategy: dict[str, Any]) -> None:
    run = RUN.but(strategy=EXPERT_BIAS, trainer={"max_steps": 3}, model={"router_aux_loss_coef": 0.0})
    ((steps, one),) = run_ranks(_biased, 1, run)
    expected = 0.05 * sum((each.mean(dim=1, keepdim=True) - each).sign() for each in steps)
    assert expected.abs().max() > 0.04  # an odd number of steps: it swings
    assert all(torch.allclose(bias, expected[layer]) for layer, bias in one.items())
    for split, biases in run_ranks(_biased, ranks, run.but(strategy=strategy)):
        assert all(torch.equal(*each) for each in zip(split, steps, strict=True))
        assert all(torch.equal(bias, one[layer]) for layer, bias in biases.items())


def test_sigmoids_are_chosen_as_by_megatron() -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from lightning_megatron.engine.fillers.experts import Router

    logits, bias = torch.randn(50, 8), torch.randn(8)
    config = SimpleNamespace(moe_router_pre_softmax=False)
    router: Any = SimpleNamespace(topk=3, expert_bias=bias, training=False, config=config)
    probs, chosen = Router.routing(router, logits)
    dense, _ = topk_routing_with_score_function(logits, 3, score_function="sigmoid", expert_bias=bias)
    torch.testing.assert_close(torch.zeros(50, 8).scatter(1, chosen, probs), dense)


def _exported(run: Run) -> None:
    fit(run)[0].lightning_module.save_pretrained("exported")


def test_biases_are_not_left_out_silently(tmp_path: Path) -> None:
    from lightning_megatron.convert.convert import ConvertOptions, convert

    biased, path, plain = RUN.but(strategy=EXPERT_BIAS), tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    run_ranks(train, 1, biased, path)
    run_ranks(train, 1, RUN, plain)
    for says, call, *arguments in (
        ("no Hugging Face mixtral model has biases of experts", _exported, biased),
        ("expert_bias", convert, ConvertOptions(load_path=path, save_path=tmp_path / "hf", to="hf")),
        ("expert_bias=True there and None here", fit, RUN.but(ckpt_path=str(path))),
        ("expert_bias", fit, biased.but(ckpt_path=str(plain))),
        ("experts.num_experts=4 there and 8 here", fit, RUN.but(model={"num_local_experts": 8}, ckpt_path=str(plain))),
    ):
        assert says in run_ranks(refusal, 1, call, *arguments)[0]
