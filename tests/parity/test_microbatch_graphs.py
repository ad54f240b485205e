"""Microbatches replayed as CUDA graphs equal those run by Megatron's schedule."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.comparison import assert_same_run
from tests.parity.training import Case, Layout, Outcome, join_outcomes, outcome, train
from tests.ranks import run_ranks


class _FakeGraph:
    """Stand-in for a CUDA graph on the CPU: a replay runs the body on the graph's input buffers."""

    def __init__(
        self,
        inputs: dict[str, torch.Tensor],
        body: Any,
    ) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.body = body
        self.graph = self
        self.report = torch.zeros(1, 2)
        self.replays = 0

    def replay(self) -> None:
        self.report.copy_(self.body(self.inputs))
        self.replays += 1


def _train_with_fake_graphs(case: Case) -> tuple[Outcome, list[int]]:
    from lightning_megatron.engine import microbatch_graph
    from lightning_megatron.models import checks

    graphs_made: list[_FakeGraph] = []

    def record(
        inputs: Any,
        body: Any,
        stream: Any,
        pool: Any,
    ) -> _FakeGraph:
        graphs_made.append(_FakeGraph(inputs, body))
        return graphs_made[-1]

    microbatch_graph._capture = record  # type: ignore[assignment]
    checks._check_graphs = lambda settings: None
    return train(case), [each.replays for each in graphs_made]


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_replays_equal_megatrons_schedule(model: str) -> None:
    case = Case(
        model=model,
        layout=Layout(dp=2, num_microbatches=3),
        steps=6,
        labels="uneven",
        clip=0.5,
    )
    layout = replace(case.layout, cuda_graphs=True)
    replayed = run_ranks(_train_with_fake_graphs, 2, replace(case, layout=layout))
    assert [replays for _, replays in replayed] == [[3 * 3]] * 2
    assert_same_run(join_outcomes([run for run, _ in replayed]), outcome(case))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_cuda_graphs_equal_megatrons_schedule(model: str) -> None:
    cases = [
        Case(
            model=model,
            layout=Layout(num_microbatches=3, cuda_graphs=graphs),
            steps=6,
            accelerator="gpu",
        )
        for graphs in (False, True)
    ]
    assert_same_run(*(outcome(case) for case in cases))
