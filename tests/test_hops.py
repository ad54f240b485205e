"""Limits on the number of package files that control passes through (tests/hops.py)."""

from tests.ranks import run_ranks

LIMITS = {
    "from a batch to its loss": 35,
    "in a save": 33,
    "to the first token of a text": 40,
    "for the next token": 13,
}
"""Most hops allowed; the targets were 20, 15, any and 8. To add one, remove another or state here why none can go.
Two of a save are the loader's position in the data; prompts and options are checked in other files. One concept a file
added to these limits, which were 18, 15, 23 and 4: 5, 0, 3 and 4 for the ops of the engine; 2, 0, 0 and 0 for the
base and the checks of train steps; 0, 1, 0 and 0 for the optimizer's state; 6, 0, 1 and 0 for batch shapes, workers,
GPTs' samples and the layout of prompts; 0, 12, 0 and 0 for states, checksums, locks, paths and hooks of checkpoints;
2, 3, 1 and 1 for engine/progress.py, through which alone its counters are written and a save is announced; 1, 0, 0
and 0 for penalties on weights, which a loss alone shows; 0, 1, 0 and 0 for the moments of a weight, of which Muon's
matrices have one and all others two; 1, 1, 0 and 0 for weights that a callback has changed, which the masters take over
before an update and before a save; 0, 0, 12 and 4 for generation's sampler, logits processors, stop criteria,
chunks, inference mode, static steps and CUDA graphs."""


def _count_hops() -> dict[str, list[str]]:
    from tests.hops import hops

    return {
        activity: sorted(" -> ".join(pair) for pair in pairs) for activity, pairs in hops().items()
    }


def test_hops_stay_below_their_limits() -> None:
    (counted,) = run_ranks(_count_hops, 1)
    assert counted.keys() == LIMITS.keys()
    assert {
        activity: hops for activity, hops in counted.items() if len(hops) > LIMITS[activity]
    } == {}
