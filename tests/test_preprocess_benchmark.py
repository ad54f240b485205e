"""Does the benchmark of preprocess measure what it says, on inputs of every kind?"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import preprocess, preprocess_run


def test_each_case_runs_on_the_same_text_as_the_peer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One two three. Four five.\n" * 400)
    texts = list(preprocess._texts([str(tmp_path / "a.txt")], 15_000))
    preprocess._write_inputs(tmp_path, texts)
    preprocess._train(tmp_path)

    assert "".join(texts) == "One two three. Four five.\n" * 400 + ("One two three. Four five.\n" * 400)[:8000]
    assert preprocess_run._peer(tmp_path)[0] > 0
    tokens = set()
    for case in preprocess.CASES:
        preprocess_run._preprocess(tmp_path, case.suffix, "1", *case.arguments)
        if not case.arguments:
            tokens.add((tmp_path / "out_text_document.bin").read_bytes())
    assert len(tokens) == 1
    assert (tmp_path / "out_text_sentence.bin").exists()


def test_the_table_compares_medians_with_n_times_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": each, "cpu": 2 * each, "mebibytes": 10 * each} for each in seconds]

    peers = {1: runs(9, 2, 1), 2: runs(3)}
    preprocess._print_table(peers, {("a", 2): runs(1.25, 1.0, 7), ("b", 1): runs(2, 2.1, 2.2)}, 10)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "peer, one thread: 5.00 MB/s, CPU time 4.00 s"
    assert lines[-2:] == [
        "| b | 1 | 4.76 | 0.95 | 0.95 | 0.95 | met | 22 MiB |",
        "| a | 2 | 8.00 | 0.80 | 1.20 | 2.40 | missed | 70 MiB |",
    ]
