"""The command ``generate`` prints the completions of transformers, from any checkpoint."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.cli.generate import TextWriter, _lack_of_memory_as_error
from lightning_megatron.cli.stored_model import default_precision
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from tests.cli.command import run_cli
from tests.marks import on_gpus

PROMPTS = ("w1 w5", "w90 w7 w11 w3 w2")


def _generate(*arguments: object, ranks: int = 1) -> str:
    """Output of the command."""
    code, out, err = run_cli(".", "generate", *arguments, ranks=ranks)
    assert code == 0, err
    return out


def _hf_completions(folder: Path, **options: Any) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    completions = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        sequences = model.generate(ids, do_sample=False, pad_token_id=0, **options)
        completions += [tokenizer.decode(row, skip_special_tokens=True) for row in sequences]
    return "\n\n".join(completions) + "\n"


BEAMS = {"num_beams": 4, "early_stopping": True, "length_penalty": -1.0, "num_return_sequences": 2}


@pytest.mark.parametrize(
    ("name", "tp", "pp", "search"),
    [("hf", 1, 1, BEAMS), ("run.ckpt", 2, 1, {}), ("legacy", 1, 2, {})],
)
def test_completions_of_every_checkpoint_format_equal_hugging_face(
    checkpoints: Path, name: str, tp: int, pp: int, search: dict[str, Any]
) -> None:
    options = [
        word
        for key, value in search.items()
        for word in (f"--{key.replace('_', '-')}", str(value).lower())
    ]
    out = _generate(
        *f"--checkpoint {checkpoints}/{name} --tokenizer {checkpoints}/hf --accelerator cpu".split(),
        *options,
        *f"--max-new-tokens 6 --tp {tp} --pp {pp} --prompt".split(),
        *PROMPTS,
        ranks=tp * pp,
    )
    assert out == _hf_completions(checkpoints / "hf", max_new_tokens=6, **search)


@pytest.mark.parametrize("tp", [on_gpus(tp, tp) for tp in (1, 2)])
def test_completions_on_gpus_equal_hugging_face(checkpoints: Path, tp: int) -> None:
    common = (
        "--checkpoint",
        checkpoints / "hf",
        "--max-new-tokens",
        12,
        "--tp",
        tp,
        "--prompt",
        *PROMPTS,
    )
    assert _generate(*common, ranks=tp) == _hf_completions(checkpoints / "hf", max_new_tokens=12)


def test_default_precision_on_gpus_is_that_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for dtype, on_gpu in (
        ("float32", "32-true"),
        ("bfloat16", "bf16-true"),
        ("float16", "16-mixed"),
    ):
        stored: Any = SimpleNamespace(dtype=getattr(torch, dtype))
        assert [default_precision(stored, accelerator) for accelerator in ("cpu", "auto")] == [
            "32-true",
            on_gpu,
        ]


def test_stop_string_ends_a_completion_and_seed_fixes_sampling(checkpoints: Path) -> None:
    common = (
        "--checkpoint",
        checkpoints / "hf",
        "--prompt",
        PROMPTS[0],
        "--max-new-tokens",
        12,
        "--temperature",
        2,
    )
    complete = _generate(*common)
    assert complete == _generate(*common) != _generate(*common, "--seed", 1)
    new = complete.rstrip("\n")[len(PROMPTS[0]) :]
    stop = new[4:6]
    assert _generate(*common, "--stop", stop) == f"{PROMPTS[0]}{new[: new.index(stop) + 2]}\n"


def test_prompt_file_in_batches_with_json_output(checkpoints: Path, tmp_path: Path) -> None:
    prompts = [*PROMPTS, 'w3 "\u00e9"']
    # With a byte order mark, carriage returns and an empty line, as from some editors.
    (tmp_path / "prompts.txt").write_bytes(
        "\r\n".join(["\ufeff" + prompts[0], "", *prompts[1:], ""]).encode()
    )
    common = ("--checkpoint", checkpoints / "hf", "--max-new-tokens", 5)
    out = _generate(*common, "--prompt-file", tmp_path / "prompts.txt", "--batch-size", 2, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    printed = _generate(*common, "--prompt", *prompts, "--static-cache")
    assert "\n\n".join(line["prompt"] + line["text"] for line in lines) + "\n" == printed


def test_streamed_completion_is_the_same(checkpoints: Path) -> None:
    common = (
        "--checkpoint",
        checkpoints / "hf",
        "--prompt",
        PROMPTS[0],
        "--max-new-tokens",
        12,
        "--top-k",
        40,
    )
    expected = _generate(*common)
    for pp in (1, 2):
        assert (
            _generate(*common, "--accelerator", "cpu", "--pp", pp, "--stream", ranks=pp) == expected
        )


def test_t5_completion_equals_hugging_face(checkpoints: Path) -> None:
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(checkpoints / "t5")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "hf")
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    text = tokenizer.decode(
        model.generate(ids, do_sample=False, max_new_tokens=6)[0], skip_special_tokens=True
    )
    common = (
        "--checkpoint",
        checkpoints / "t5",
        "--tokenizer",
        checkpoints / "hf",
        "--max-new-tokens",
        6,
    )
    for stream in ((), ("--stream",)):
        assert _generate(*common, "--prompt", PROMPTS[0], *stream) == f"{PROMPTS[0]}\n{text}\n"


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        ("aé🎉b".encode(), (), ["pa", "é", "🎉", "b", "\n"]),
        (b"a\xf0\x9f", (), ["pa", "\N{REPLACEMENT CHARACTER}\n"]),
        (b"ab.\n\ncd", ("x", ".\n"), ["pa", "b", ".", "\n", "\n"]),
    ],
)
def test_stream_shows_complete_characters_up_to_a_stop_string(
    text: bytes, stop: tuple[str, ...], pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    parts: list[str] = []
    writer = TextWriter(
        ["p"], ByteTokenizer(), GenerationOptions(stop_strings=stop), as_json=False, is_t5=False
    )
    monkeypatch.setattr(sys.stdout, "write", parts.append)
    rows = {"input_ids": torch.tensor([list(b"p")]), "attention_mask": torch.ones(1, 1)}
    for token in (*text, -1):
        writer.add(rows, torch.tensor([token]))
    writer.end(rows, torch.tensor([list(b"p" + text)]))
    assert [piece for piece in parts if piece] == pieces


def test_json_escapes_characters_that_stdout_cannot_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    rows = {"input_ids": torch.tensor([[33]]), "attention_mask": torch.ones(1, 1)}
    writer = TextWriter(
        ["é "],
        ByteTokenizer(),
        GenerationOptions(),
        as_json=True,
        is_t5=False,
    )
    writer.end(rows, torch.tensor([[33, *"🎉".encode()]]))
    assert json.loads(raw.getvalue().decode("latin-1")) == {"prompt": "é ", "text": "🎉"}


def test_checkpoint_without_config_needs_the_config_option(
    checkpoints: Path, tmp_path: Path
) -> None:
    import torch

    from tests.checkpoint.damage import update_checksums

    shutil.copytree(checkpoints / "run.ckpt", tmp_path / "own.ckpt")
    meta = torch.load(tmp_path / "own.ckpt/meta.pt", weights_only=True)
    # Like a checkpoint of a model_provider.
    torch.save({**meta, "hugging_face_config": None}, tmp_path / "own.ckpt/meta.pt")
    update_checksums(tmp_path / "own.ckpt")
    common = (
        "--checkpoint",
        tmp_path / "own.ckpt",
        "--tokenizer",
        checkpoints / "hf",
        "--max-new-tokens",
        3,
    )
    code, _, err = run_cli(".", "generate", *common, "--prompt", *PROMPTS)
    assert code == 2
    assert "(none is saved with a model_provider)" in err
    assert "with --config" in err
    assert _generate(
        *common, "--prompt", *PROMPTS, "--config", checkpoints / "hf/config.json"
    ) == _hf_completions(checkpoints / "hf", max_new_tokens=3)


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (MemoryError("no room"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_too_little_memory_names_the_options_to_lower(error: Exception, is_lack: bool) -> None:
    expected = ConfigError if is_lack else type(error)
    with pytest.raises(expected) as caught, _lack_of_memory_as_error():
        raise error
    assert str(error) in str(caught.value)
    assert ("lower --batch-size, --num-beams" in str(caught.value)) == is_lack
