"""Does the benchmark of preprocess measure what it says, on inputs of every kind?"""

from __future__ import annotations

from pathlib import Path

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
