"""The planner's estimates beside runs that were measured on H200s, its choice of layouts, and its timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import case_named
from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.planner import DEVICES, GIB, Batch, Run, plan, plans, timeline

H200 = DEVICES["h200"]
# Case, micro_batch_size, num_microbatches, GPUs, layout, s/step, peak GiB (None: not noted down), whether fitted.
MEASURED = [
    ("llama-8b-dp4-mb2", 2, 4, 4, {}, 2.8205, 108.0, True),
    ("llama-8b-dp4-mb2", 2, 4, 4, {"tp": 2}, 1.5923, 65.3, True),
    ("llama-8b-dp4-mb2", 2, 4, 4, {"tp": 4}, 0.9233, 44.0, False),
    ("llama-8b-dp4-mb2", 1, 8, 4, {"tp": 2, "pp": 2}, 0.9397, 43.0, False),
    ("llama-8b-dp4-mb2", 1, 8, 4, {"tp": 2, "pp": 2, "vpp": 4}, 0.9246, None, True),
    ("llama-8b-dp4-mb2", 1, 8, 4, {"pp": 2}, 1.6815, 63.5, False),
    ("llama-8b-dp4-mb2", 1, 16, 4, {"pp": 4, "vpp": 4}, 1.7561, 60.8, False),
    ("llama-8b-8layers", 2, 8, 1, {}, 1.6477, 60.1, False),
    ("llama-1b", 4, 2, 1, {}, 0.5289, 52.9, False),
    ("gpt2-large", 24, 2, 4, {"tp": 2, "pp": 2}, 0.2959, 21.9, True),
    ("gpt2-large", 24, 2, 4, {"tp": 2, "pp": 2, "vpp": 3}, 0.2492, None, False),
    ("gpt2-large", 12, 1, 4, {}, 0.1690, 27.0, False),
    ("gpt2-large", 24, 2, 1, {}, 0.5819, 54.0, False),
    ("bert-large", 32, 2, 1, {}, 0.2003, 20.4, False),
    ("bert-large", 32, 8, 4, {"tp": 2, "pp": 2}, 0.4388, 8.1, True),
    ("t5-large", 32, 2, 1, {}, 0.4033, 33.3, True),
    ("t5-large", 32, 8, 4, {"tp": 2, "pp": 2}, 1.1008, 18.9, False),
]


def _run(case_name: str, micro_batch_size: int, num_microbatches: int, gpus: int, layout: dict[str, int]) -> Run:
    case = case_named(case_name)
    return Run(
        model=model_config(dict(case.model)),
        parallel=ParallelConfig(**layout, sequence_parallel=True, num_microbatches=num_microbatches),
        micro_batch_size=micro_batch_size,
        lengths=(case.seq_length, case.decoder_seq_length) if case.decoder_seq_length else (case.seq_length,),
        world_size=gpus,
    )


@pytest.mark.parametrize(("case", "size", "count", "gpus", "layout", "seconds", "gib", "is_fitted"), MEASURED)
def test_estimates_are_near_what_was_measured(
    case: str,
    size: int,
    count: int,
    gpus: int,
    layout: dict[str, int],
    seconds: float,
    gib: float | None,
    is_fitted: bool,
) -> None:
    found = plan(_run(case, size, count, gpus, layout), H200)
    # What is promised is 10 % and 15 %; rows that were fitted have to be nearer.
    assert found.time.total == pytest.approx(seconds, rel=0.06 if is_fitted else 0.15)
    assert gib is None or found.memory.total / GIB == pytest.approx(gib, rel=0.03 if is_fitted else 0.1)


def test_layouts_fit_and_the_fastest_is_first() -> None:
    model = _run("llama-8b-dp4-mb2", 2, 4, 4, {}).model
    batch = Batch(world_size=8, global_batch_size=64, lengths=(4096,))
    small = replace(H200, memory=60 * GIB)
    found = plans(model, batch, small)
    assert [each.time.total for each in found] == sorted(each.time.total for each in found)
    assert all(each.memory.total < small.memory for each in found)
    assert all(each.run.tokens == 64 * 4096 for each in found)
    # Where memory is no matter, one copy a GPU needs neither collectives nor a pipeline, and recomputes nothing.
    best = plans(model, batch, H200)[0].run
    assert (best.parallel.tp, best.parallel.pp, best.recompute) == (1, 1, None)


def test_what_does_not_fit_is_told_with_what_it_needs() -> None:
    model = _run("llama-8b-dp4-mb2", 2, 4, 4, {}).model
    batch = Batch(world_size=2, global_batch_size=4, lengths=(4096,))
    with pytest.raises(
        ConfigError, match=r"^memory: expected at least \d+\.\d GiB a GPU .*, got 40\.0 GiB; use more GPUs"
    ):
        plans(model, batch, replace(H200, memory=40 * GIB))
    with pytest.raises(ConfigError, match="global_batch_size=1: expected one that 7 GPUs can share"):
        plans(model, replace(batch, world_size=7, global_batch_size=1), H200)


@pytest.mark.parametrize("layout", [{"pp": 1}, {"pp": 4}, {"pp": 4, "vpp": 2}])
def test_timeline_has_every_pass_in_an_order_that_can_be(layout: dict[str, int]) -> None:
    run = _run("llama-8b-dp4-mb2", 1, 8, 4, layout)
    stages = timeline(run, H200)
    pp, chunks = run.parallel.pp, run.parallel.num_model_chunks
    ends = {
        (slot.chunk * pp + rank, slot.microbatch, slot.is_forward): slot.start + slot.seconds
        for rank, slots in enumerate(stages)
        for slot in slots
    }
    assert len(ends) == 2 * 8 * pp * chunks
    for rank, slots in enumerate(stages):
        free = 0.0
        for slot in slots:
            place = slot.chunk * pp + rank
            assert slot.start >= free
            free = slot.start + slot.seconds
            if slot.is_forward and place > 0:
                assert slot.start >= ends[place - 1, slot.microbatch, True]
            if not slot.is_forward:
                later = (place + 1, slot.microbatch, False)
                assert slot.start >= ends.get(later, ends[place, slot.microbatch, True])
    # The formula of the bubble and the drawing tell the same time.
    busy = plan(run, H200).time
    drawn = max(slot.start + slot.seconds for slots in stages for slot in slots)
    assert drawn == pytest.approx(busy.total - busy.optimizer - busy.idle, rel=0.06)
