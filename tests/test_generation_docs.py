"""Every block of code in docs/generation.md is run, as a reader would run it, on small models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_generate_command import run_command
from tests.ranks import ROOT, run_ranks

PAGE = (ROOT / "docs/generation.md").read_text()
PROMPTS = ("Once upon a time", "The house")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: a folder with the models ``llama`` and ``t5``, a checkpoint of a run, and prompts."""
    from transformers import AutoModelForCausalLM, LlamaConfig, T5Config, T5ForConditionalGeneration

    from lightning_megatron.cli import main
    from tests.families.parity import tiny_model

    folder = tmp_path_factory.mktemp("docs")
    tokens = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny_model(AutoModelForCausalLM, LlamaConfig(**tokens, **sizes)).save_pretrained(folder / "llama")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = T5Config(vocab_size=257, decoder_start_token_id=256, eos_token_id=256, pad_token_id=256, **sizes)
    tiny_model(T5ForConditionalGeneration, t5).save_pretrained(folder / "t5")
    for name in ("llama", "t5"):
        _tokenizer_of_bytes(folder / name)
    (folder / "runs/a").mkdir(parents=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    paths = ["--load-path", str(folder / "llama"), "--save-path", str(folder / "runs/a/last.ckpt")]
    assert main(["convert", *paths, "--to", "megatron"]) == 0
    return folder


def _tokenizer_of_bytes(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|end|>", eos_token="<|end|>")
    assert wrapped.eos_token_id == len(letters) == 256
    wrapped.save_pretrained(folder)


def _by_hugging_face(folder: Path, **options: Any) -> list[list[int]]:
    """The rows of both prompts, each alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(folder / "llama") for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    return [model.generate(ids, do_sample=False, pad_token_id=256, **options)[0].tolist() for ids in rows]


def test_the_commands_write_what_the_page_says(folder: Path) -> None:
    from transformers import AutoTokenizer

    outputs = []
    for line in _blocks("bash")[0].splitlines():
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("lightning-megatron", "generate")
        ranks = 2 if "--tp" in arguments else 1
        code, out, err = run_ranks(_command_in, ranks, str(folder), [*arguments, "--accelerator", "cpu"], ranks > 1)[0]
        assert code == 0, err
        outputs.append(out)
    greedy, drawn, of_file, beams, stopped, answer = outputs
    whole = _by_hugging_face(folder, max_new_tokens=40)[0]
    assert greedy == AutoTokenizer.from_pretrained(folder / "llama").decode(whole, skip_special_tokens=True) + "\n"
    assert re.fullmatch(r"Once.*\n\nTwice.*\n", drawn, flags=re.DOTALL)
    assert [json.loads(line)["prompt"] for line in of_file.splitlines()] == list(PROMPTS)
    assert beams.count("Once") == 2
    assert stopped.startswith("Once")
    assert answer.startswith("translate English to German: The house is wonderful.\n")


def _command_in(folder: str, arguments: list[str], is_one_of_many: bool) -> tuple[int, str, str]:
    os.chdir(folder)
    return run_command(arguments, is_one_of_many)


def test_texts_of_a_trainer_are_hugging_faces(folder: Path) -> None:
    expected = _by_hugging_face(folder, max_new_tokens=8)
    best = _by_hugging_face(folder, max_new_tokens=8, num_beams=4)
    for texts, found, printed in run_ranks(_predicted, 2, str(folder), _blocks("python")[0]):
        for row, beam, one, other in zip(texts, found, expected, best, strict=True):
            # Before the shorter prompt there is padding, behind a text that ended, too: both are the end token.
            assert [t for t in row if t != 256] == [t for t in one if t != 256]
            assert [t for t in beam if t != 256] == [t for t in other if t != 256]
        assert "Once upon a time" in printed


def _predicted(folder: str, code: str) -> tuple[list[list[int]], list[list[int]], str]:
    os.chdir(folder)
    variables: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "generation.md", "exec"), variables)
    (texts,) = variables["texts"]
    return texts.tolist(), variables["best"].tolist(), printed.getvalue()


def test_training_shows_samples_and_answers_questions(folder: Path) -> None:
    (printed, answer), (nothing, other) = run_ranks(_trained, 2, str(folder), _blocks("python")[1])
    samples = [line.split(" -> ")[0] for line in printed.splitlines() if line.startswith("step ")]
    assert samples == [f"step {step}: {prompt!r}" for step in (1, 2) for prompt in PROMPTS]
    assert "step " not in nothing
    assert answer == other == [1, 3 + 4]


def _trained(folder: str, code: str) -> tuple[str, list[int]]:
    import torch
    from torch.utils.data import DataLoader

    os.chdir(folder)
    shorter = code.replace("max_steps=1000", "max_steps=2, max_epochs=1, logger=False, enable_checkpointing=False")
    shorter = shorter.replace("every_n_steps=100", "every_n_steps=1").replace("max_new_tokens=40", "max_new_tokens=3")
    assert shorter.count("=1,") == 2, "the page no longer shows what this test shortens"
    rows = [{name: torch.arange(16) for name in ("input_ids", "labels")} for _ in range(8)]
    variables: dict[str, Any] = {"loader": DataLoader(rows, batch_size=4), "prompts": torch.tensor([[3, 4, 5]])}  # type: ignore[arg-type]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(shorter, "generation.md", "exec"), variables)
    (question,) = [each for each in variables["trainer"].callbacks if hasattr(each, "answer")]
    return printed.getvalue(), list(question.answer.shape)


def test_the_yaml_is_what_the_callback_takes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(_blocks("yaml")[0])
    assert run_ranks(_callback_of_yaml, 1, str(tmp_path)) == [("llama", list(PROMPTS), 500, 40, 0.9)]


def _callback_of_yaml(folder: str) -> tuple[Any, ...]:
    from lightning_megatron import SampleText
    from lightning_megatron.cli.train import MegatronCLI

    os.chdir(folder)
    model = ["--model.model", '{"model_type": "gpt2"}', "--data", "IndexedDataModule", "--data.data_path", "x"]
    sizes = ["--data.seq_length", "8", "--data.micro_batch_size", "1", "--trainer.accelerator", "cpu"]
    cli = MegatronCLI(args=["--config", "run.yaml", *model, *sizes], run=False)
    (sample,) = [each for each in cli.trainer.callbacks if isinstance(each, SampleText)]  # type: ignore[attr-defined]
    assert sample.generation is not None
    return (
        sample.tokenizer,
        sample.prompts,
        sample.every_n_steps,
        sample.generation.max_new_tokens,
        sample.generation.top_p,
    )


def test_every_option_is_described() -> None:
    from lightning_megatron import GenerationOptions

    named = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## Options") :]))
    assert {field.name for field in fields(GenerationOptions)} - named - {"pad_token_id"} == set()
