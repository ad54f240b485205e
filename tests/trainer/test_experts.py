"""Training with experts: what is logged, and mistakes that are told before a rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.runs import LLAMA, Run, fit, train_and_save
from tests.ranks import RankError, run_ranks

MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "router_aux_loss_coef": 0.1}
RUN = Run(model=MIXTRAL, trainer={"max_steps": 2})


def _logged(run: Run) -> tuple[dict[str, float], list[list[float]]]:
    trainer, _ = fit(run)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, trainer.strategy.step_shape.expert_counts.tolist()


def test_the_load_of_experts_is_logged_and_known_to_callbacks() -> None:
    one, *others = run_ranks(_logged, 4, RUN.but(strategy={"ep": 2, "pp": 2}))
    metrics, counts = one
    assert all(each == one for each in others)
    # 8 rows of 16 tokens, each to two of four experts.
    assert [sum(layer) for layer in counts] == [256.0] * 4
    assert metrics["train_expert_load_max"] == max(max(layer) for layer in counts) / 64
    assert metrics["train_expert_load_min"] == min(min(layer) for layer in counts) / 64
    # The least possible is 2, the experts of a token, times the coefficient; 8 if all went to the same two.
    assert 0.2 <= metrics["train_load_balancing_loss"] < 0.3
    assert metrics["train_loss"] == pytest.approx(metrics["train_lm_loss"] + metrics["train_load_balancing_loss"])


REFUSED: tuple[tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("ep=3 .*num_experts=4", 3, {}, {"ep": 3}, {}),
    ("ep=2: expected a divisor of the 1 ranks", 1, {}, {"ep": 2}, {}),
    ("ep=0 must be at least 1", 1, {}, {"ep": 0}, {}),
    ("ep=2: expected a model with experts, got llama", 2, {"model_type": "llama"}, {"ep": 2}, {}),
    ("trained with sequence_parallel=True", 2, {}, {"tp": 2}, {}),
    ("expected at most num_experts=4, got 5", 1, {"num_experts_per_tok": 5}, {}, {}),
    ("router_jitter_noise=0.1", 1, {"router_jitter_noise": 0.1}, {}, {}),
    ("expected bf16-mixed or 32-true, got 16-mixed", 1, {}, {}, {"precision": "16-mixed"}),
)


@pytest.mark.parametrize(("says", "ranks", "fields", "strategy", "options"), REFUSED)
def test_a_mistake_is_one_line_on_every_rank(
    says: str, ranks: int, fields: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    model = LLAMA if "model_type" in fields else {**MIXTRAL, **fields}
    with pytest.raises(RankError, match=f"ConfigError: .*{says}"):
        run_ranks(fit, ranks, Run(model=model, strategy=strategy, trainer=options))


def test_a_checkpoint_of_other_experts_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(train_and_save, 1, RUN, path)
    other = RUN.but(model={"num_local_experts": 8}, ckpt_path=str(path))
    with pytest.raises(RankError, match="experts.num_experts=4 there and 8 here"):
        run_ranks(fit, 1, other)
