"""What a newcomer must follow stays short: into how many other files of ours control goes."""

from __future__ import annotations

from tests.ranks import run_ranks

MOST = {"from a batch to its loss": 16, "in a save": 12, "to the first token of a text": 20, "for the next token": 4}
"""What was reached: whoever needs one more finds one that can go, or says here why there is none."""


def _found() -> dict[str, list[str]]:
    from tests.hops import hops

    return {what: sorted(f"{left} -> {entered}" for left, entered in found) for what, found in hops().items()}


def test_control_enters_few_other_files() -> None:
    (found,) = run_ranks(_found, 1)
    assert found.keys() == MOST.keys()
    assert {what: hops for what, hops in found.items() if len(hops) > MOST[what]} == {}
