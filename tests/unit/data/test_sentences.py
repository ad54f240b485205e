"""Are texts cut where sentences end, and is nothing of them lost?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.corpus import files
from lightning_megatron.data.corpus.sentences import SentenceSplitter
from lightning_megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Dr. Smith went to Washington D.C. on Jan. 5th.", "He met Mr. Brown."]),
        ("en", ["The U.S. economy grew 3.5 percent.", "That was a surprise!"]),
        ("en", ['He said "Stop. Go away." and left.', "Then she cried."]),
        ("en", ["Visit www.example.com.", "Version 2.0.1 is out."]),
        ("en", ["What?!", "No...", "Really?", "Yes."]),
        ("en", ["At 5 p.m. he left.", "At 6 a.m. Mr. Lee came."]),
        ("de", ["Das ist z.B. gut.", "Und das."]),
        ("ja", ["吾輩は猫である。", "名前はまだ無い。"]),
    ],
    ids=str,
)
def test_sentences_end_where_a_reader_would_say(language: str, sentences: list[str]) -> None:
    between = "" if language == "ja" else " "

    assert SentenceSplitter(language, keep_newlines=False)(between.join(sentences)) == sentences


def test_white_space_between_sentences_is_dropped_or_kept() -> None:
    text = "\n Title\n\nOne.  Two\nlines.\n\n\nThree. \n"

    assert SentenceSplitter("en", keep_newlines=False)(text) == ["Title", "One.", "Two\nlines.", "Three."]
    kept = ["\n Title\n\n", "One.  ", "Two\nlines.\n\n\n", "Three. \n"]
    assert SentenceSplitter("en", keep_newlines=True)(text) == kept
    for blank in ("", " \n\u3000"):
        assert SentenceSplitter("en", keep_newlines=True)(blank) == []


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aB.!? \n\r\t\"'()1é。\u2029\u00a0\u3000\u200b🙂-", max_size=40), st.integers(1, 2))
def test_no_character_is_lost_and_white_space_of_any_kind_does_no_harm(text: str, times: int) -> None:
    long = text * (1 if times == 1 else 400)  # the library cuts long texts once more

    assert "".join(SentenceSplitter("en", keep_newlines=True)(long)) == (long if long.strip() else "")
    dropped = SentenceSplitter("en", keep_newlines=False)(long)
    assert "".join("".join(dropped).split()) == "".join(long.split())


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"split_sentences needs the library sentencex, .*\[data\]"):
        SentenceSplitter("en", keep_newlines=False)
