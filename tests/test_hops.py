"""What a newcomer must follow stays short: into how many other files of ours control goes."""

from tests.ranks import run_ranks

MOST = {"from a batch to its loss": 17, "in a save": 14, "to the first token of a text": 23, "for the next token": 4}
"""What was reached, of at most 20, 15, any and 8: whoever needs one more finds one that can go, or says why there is
none. The loader keeps its own place in the data (two of a save); prompts and options are checked in other files."""


def _found() -> dict[str, list[str]]:
    from tests.hops import hops

    return {what: sorted(f"{left} -> {entered}" for left, entered in found) for what, found in hops().items()}


def test_control_enters_few_other_files() -> None:
    (found,) = run_ranks(_found, 1)
    assert found.keys() == MOST.keys()
    assert {what: hops for what, hops in found.items() if len(hops) > MOST[what]} == {}
