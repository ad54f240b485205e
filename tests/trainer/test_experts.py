"""Training with experts: what is logged, and mistakes that are told before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import ConfigError, MegatronStrategy
from tests.checkpoint.runs import EXPERT_BIAS, LLAMA, Run, fit, train_and_save
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


def _biased(run: Run) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """The load of all layers after each step, and the biases of the layers on this rank."""
    import lightning.pytorch as pl

    class Counts(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            self.seen.append(trainer.strategy.step_shape.expert_counts)

    counts = Counts()
    trainer, _ = fit(run, counts)
    routers = [m for chunk in trainer.lightning_module.model_chunks for m in chunk.modules() if hasattr(m, "gating")]
    return counts.seen, {router.layer_number - 1: router.expert_bias for router in routers}


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
    run_ranks(_choose_as_megatron, 1)


def _choose_as_megatron() -> None:
    from types import SimpleNamespace

    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from lightning_megatron.engine.fillers.experts import Router

    logits, bias = torch.randn(50, 8), torch.randn(8)
    config = SimpleNamespace(moe_router_pre_softmax=False)
    router: Any = SimpleNamespace(topk=3, expert_bias=bias, training=False, config=config)
    probs, chosen = Router.routing(router, logits)
    dense, _ = topk_routing_with_score_function(logits, 3, score_function="sigmoid", expert_bias=bias)
    torch.testing.assert_close(torch.zeros(50, 8).scatter(1, chosen, probs), dense)


def test_the_published_config_of_qwen3_is_taken() -> None:
    from lightning_megatron.convert.registry import model_config

    published = {"model_type": "qwen3_moe", "head_dim": 128, "max_window_layers": 48, "num_hidden_layers": 48}
    assert model_config(published).kv_channels == 128


REFUSED: tuple[tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("ep=3 .*num_experts=4", 3, {}, {"ep": 3}, {}),
    ("ep=2: expected a divisor of the 1 ranks", 1, {}, {"ep": 2}, {}),
    ("ep=0 must be at least 1", 1, {}, {"ep": 0}, {}),
    ("ep=2: expected a model with experts, got llama", 2, {"model_type": "llama"}, {"ep": 2}, {}),
    ("trained with sequence_parallel=True", 2, {}, {"tp": 2}, {}),
    ("expected at most num_experts=4, got 5", 1, {"num_experts_per_tok": 5}, {}, {}),
    ("together, got one of", 1, {}, {"transformer_config_overrides": {"moe_router_score_function": "sigmoid"}}, {}),
    ("moe_router_bias_update_rate: expected a model with", 1, {"model_type": "llama"}, EXPERT_BIAS, {}),
    (
        "moe_token_dispatcher_type='flex' is unknown",
        1,
        {},
        {"transformer_config_overrides": {"moe_token_dispatcher_type": "flex"}},
        {},
    ),
    ("router_jitter_noise=0.1", 1, {"router_jitter_noise": 0.1}, {}, {}),
    ("expected bf16-mixed or 32-true, got 16-mixed", 1, {}, {}, {"precision": "16-mixed"}),
)


BY_HAND = (
    ("moe_z_loss_coeff", 0.1, "nothing reads it here"),
    ("moe_aux_loss_coeff", 0.1, "set it in the model's config"),
    ("expert_model_parallel_size", 2, r"use MegatronStrategy\(ep=\)"),
)


@pytest.mark.parametrize(("name", "value", "says"), BY_HAND)
def test_what_no_layer_reads_is_no_option(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"expected no '{name}'.*{says}"):
        MegatronStrategy(transformer_config_overrides={name: value})


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


def _export(run: Run, folder: str) -> None:
    fit(run)[0].lightning_module.save_pretrained(folder)


def _converted(path: Path, folder: Path) -> str:
    from lightning_megatron import CheckpointError
    from lightning_megatron.convert.convert import convert
    from lightning_megatron.convert.options import ConvertOptions

    with pytest.raises(CheckpointError) as error:
        convert(ConvertOptions(load_path=path, save_path=folder, to="hf"))
    return str(error.value)


def _go_on(run: Run) -> str:
    from lightning_megatron import CheckpointError

    with pytest.raises(CheckpointError) as error:
        fit(run)
    return str(error.value)


def test_biases_are_not_left_out_silently(tmp_path: Any) -> None:
    biased, path = RUN.but(strategy=EXPERT_BIAS), tmp_path / "a.ckpt"
    with pytest.raises(RankError, match="ConfigError: no Hugging Face mixtral model has biases of experts"):
        run_ranks(_export, 1, biased, str(tmp_path / "hf"))
    run_ranks(train_and_save, 1, biased, path)
    (told,) = run_ranks(_go_on, 1, RUN.but(ckpt_path=str(path)))
    assert "expert_bias=True there and None here" in told
    (told,) = run_ranks(_converted, 1, path, tmp_path / "converted")
    assert "expert_bias" in told
    run_ranks(train_and_save, 1, RUN, path)
    (told,) = run_ranks(_go_on, 1, biased.but(ckpt_path=str(path)))
    assert "expert_bias" in told
