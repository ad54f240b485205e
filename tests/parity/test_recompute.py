"""Each ``recompute`` mode recomputes exactly the parts that it names."""

from typing import Any

import pytest

from tests.checkpoint.runs import callback
from tests.parity.training import Case, Layout, loader_of, module_of, trainer_of
from tests.ranks import run_ranks


def _count_calls(layout: Layout) -> tuple[int, int, int]:
    """Calls of layers, core attentions and norms (including the final norm) in one step."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from lightning_megatron.engine.ops.attention import SDPAttention
    from lightning_megatron.engine.ops.norms import Norm

    case = Case(layout=layout, steps=1)
    calls = {TransformerLayer: 0, SDPAttention: 0, Norm: 0}
    module = module_of(case)

    def count(part: Any, arguments: Any) -> None:
        calls[type(part)] += 1

    def watch(trainer: Any, pl_module: Any) -> None:
        for part in pl_module.modules():
            if type(part) in calls:
                part.register_forward_pre_hook(count)

    trainer_of(case, callbacks=[callback(on_train_start=watch)]).fit(module, loader_of(case))
    return calls[TransformerLayer], calls[SDPAttention], calls[Norm]


@pytest.mark.parametrize(
    ("layout", "layer_calls", "attention_calls", "norm_calls"),
    [
        (Layout(), 4, 4, 8),
        (Layout(recompute="selective"), 4, 4, 16),
        (
            Layout(
                recompute="selective",
                transformer_config_overrides=(("recompute_modules", ["core_attn"]),),
            ),
            4,
            8,
            8,
        ),
        (
            Layout(recompute="full", recompute_num_layers=3),
            8,
            8,
            16,
        ),  # in groups of three and of one
        (
            Layout(recompute="full", recompute_method="block", recompute_num_layers=3),
            7,
            7,
            14,
        ),
    ],
    ids=str,
)
def test_recompute_repeats_named_parts(
    layout: Layout, layer_calls: int, attention_calls: int, norm_calls: int
) -> None:
    assert run_ranks(_count_calls, 1, layout) == [(layer_calls, attention_calls, norm_calls + 1)]
