"""Each program in examples/ runs as a user would run it."""

import contextlib
import csv
import io
import math
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.cli.corpus import VOCAB_SIZE, make_sentences
from tests.marks import exhaustive
from tests.ranks import ROOT, run_ranks

EXAMPLES = sorted(
    path.name
    for path in (ROOT / "examples").glob("*.py")
    if path.stem != "shipped"  # what they share
)


def _run(example: str, world_size: int, *arguments: object) -> str:
    """Output of rank 0 of an example run on ``world_size`` ranks."""
    printed: list[str] = run_ranks(
        _main, world_size, example, [str(each) for each in arguments], timeout=240
    )
    return printed[0]


def _main(example: str, arguments: list[str]) -> str:
    sys.argv = [example, *arguments]
    sys.path.insert(0, str(ROOT / "examples"))  # as Python does for a program
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return output.getvalue()


def _metrics(folder: Path) -> list[dict[str, str]]:
    (metrics,) = folder.rglob("metrics.csv")
    with metrics.open() as file:
        return list(csv.DictReader(file))


def _check_losses(folder: Path, share: float = 1.0) -> list[float]:
    """Training losses; asserts that the last is less than ``share`` of the first."""
    losses = [float(row["train_loss"]) for row in _metrics(folder) if row["train_loss"]]
    assert losses[-1] < losses[0] * share
    return losses


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run examples in without arguments; what they make of what is shipped is shared."""
    return tmp_path_factory.mktemp("clone")


@pytest.mark.parametrize(
    "example",
    EXAMPLES,
    ids=lambda name: name.removesuffix(".py"),
)
def test_example_parses_its_arguments_before_slow_imports(example: str) -> None:
    program = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: print('code', end.code, 'torch' in sys.modules)"
    )
    for argument, code in (("--help", 0), ("--no-such-option", 2)):
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys; sys.argv = [{str(ROOT / 'examples' / example)!r}, {argument!r}]\n{program}",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"code {code} False" in ran.stdout
        assert "usage: " in ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("example", "arguments", "prints"),
    [
        ("pretrain_gpt.py", ["--max-steps", 5], r"5 steps: .*\nlosses.*\ncheckpoint: .*last\.ckpt"),
        ("custom_train_step.py", ["--max-steps", 5], r"5 steps with key tokens \[\d+, \d+"),
        ("own_model.py", ["--max-steps", 4], r"2 steps: .*half\.ckpt\n4 steps: training loss \d"),
        ("finetune_llama.py", ["--max-steps", 5], r"5 steps on .*instructions.jsonl: training"),
        exhaustive("dpo_llama.py", ["--max-steps", 5], r"5 steps on .*preferences.jsonl: training"),
        exhaustive(
            "distill_gpt.py", ["--max-steps", 5], r"5 steps with the teacher .*: validation"
        ),
        ("generate_text.py", ["--max-new-tokens", 3], r"2 prompts continued by runs/shipped/gpt2"),
        exhaustive("reward_llama.py", ["--max-steps", 5], r"5 steps on .*preferences.jsonl: train"),
        exhaustive("reward_llama.py", ["--max-steps", 5, "--lora"], r"5 steps on .*validation mar"),
        exhaustive("pretrain_clm.py", ["--epochs", 1], r"359 steps: (.*\n)+model and tokenizer: "),
        exhaustive("pretrain_t5.py", ["--max-steps", 5], r"5 steps: .*\nlosses.*\nmodel and tok"),
        exhaustive("classify_bert.py", ["--max-steps", 5], r"5 steps from runs/shipped/megatron-b"),
        exhaustive("pretrain_bert.py", ["--max-steps", 5], r"5 steps: .*\nlosses.*\nmodel and to"),
    ],
    ids=lambda value: value.removesuffix(".py") if str(value).endswith(".py") else "",
)
def test_example_runs_on_what_is_shipped_and_says_where_results_are(
    example: str, arguments: list[Any], prints: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone)
    world_size = 2 if example in ("custom_train_step.py", "classify_bert.py") else 4
    assert re.search(prints, _run(example, world_size, *arguments))


def test_examples_use_what_the_quickstart_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples import shipped

    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()
    Path("quickstart/shakespeare_text_document.idx").touch()
    assert shipped.shakespeare() == ("quickstart/tokenizer", "quickstart/shakespeare_text_document")
    assert not Path("runs").exists()


def test_pretrain_gpt_trains_and_saves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    common = ("--data-path", corpus, "--vocab-size", VOCAB_SIZE, "--output", tmp_path)
    _run("pretrain_gpt.py", 4, *common, "--max-steps", 20)
    assert list(tmp_path.rglob("last.ckpt"))
    _check_losses(tmp_path)


def test_pretrain_clm_trains_resumes_and_saves_hugging_face(corpus: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from examples.pretrain_clm import TextBlocks
    from lightning_megatron import ConfigError

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{number} bottles of beer on the wall" for number in range(250)))
    common = (
        "--dataset",
        text,
        "--tokenizer",
        corpus.parent / "tok",
        "--block-size",
        64,
        "--output",
        tmp_path / "out",
    )
    first = _run(
        "pretrain_clm.py", 4, *common, "--epochs", 2, "--with-tracking", "--report-to", "csv"
    )
    second = _run("pretrain_clm.py", 4, *common, "--epochs", 3, "--resume")
    examples, steps = map(int, re.findall(r"(?:Examples|Optimization steps) = (\d+)", first))
    assert steps == 2 * (examples // 8)
    _check_losses(tmp_path / "out", 0.7)
    assert f"Optimization steps = {3 * (examples // 8)}" in second
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", device_map="auto")
    assert torch.isfinite(model(torch.arange(32)[None]).logits).all()
    with pytest.raises(ConfigError, match=r"dataset=no\.txt does not exist; give"):
        TextBlocks("no.txt", "tokenizer", folder=str(tmp_path / "none")).prepare_data()


def test_custom_train_step_trains_with_its_own_loss(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    key_tokens = AutoTokenizer.from_pretrained(corpus.parent / "tok")(" w")["input_ids"]
    common = ("--data-path", corpus, "--vocab-size", VOCAB_SIZE, "--output", tmp_path)
    _run("custom_train_step.py", 2, *common, "--max-steps", 20, "--key-tokens", *key_tokens)
    # Every row has key tokens: the weighted loss of an untrained model exceeds the logarithm of the vocabulary size.
    assert _check_losses(tmp_path)[0] > 1.1 * math.log(VOCAB_SIZE)


def test_finetune_llama_learns_and_saves_hugging_face(corpus: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(corpus.parent / "tok")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads))
    source.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    _run(
        "finetune_llama.py",
        4,
        "--model",
        tmp_path / "llama",
        "--output",
        tmp_path / "run",
        "--max-steps",
        12,
    )
    _check_losses(tmp_path / "run")
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert tuned.num_parameters() == source.num_parameters()
    assert not any(
        torch.equal(a, b) for a, b in zip(tuned.parameters(), source.parameters(), strict=True)
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "model")) == len(tokenizer)


@pytest.mark.exhaustive
def test_bert_is_pretrained_and_learns_to_classify(tmp_path: Path) -> None:
    text = Path(sysconfig.get_path("stdlib")) / "asyncio"
    sentences = make_sentences(tmp_path, "bert", text)
    common = (
        "--data-path",
        sentences,
        "--tokenizer",
        tmp_path / "tok",
        "--output",
        tmp_path / "pretrained",
    )
    _run("pretrain_bert.py", 4, *common, "--max-steps", 20)
    metrics = _metrics(tmp_path / "pretrained")
    assert float(metrics[-2]["train_lm_loss"]) < float(metrics[0]["train_lm_loss"])
    total, tokens, order = (
        float(metrics[-1][f"val_{name}"]) for name in ("loss", "lm_loss", "sop_loss")
    )
    assert total == pytest.approx(tokens + order, rel=1e-4)
    model = tmp_path / "pretrained" / "model"
    _run(
        "classify_bert.py",
        2,
        "--model",
        model,
        "--text",
        text,
        "--output",
        tmp_path / "run",
        "--max-steps",
        90,
    )
    last = _metrics(tmp_path / "run")[-1]
    # Both classes are equally frequent.
    assert float(last["val_accuracy"]) > 0.65
    assert float(last["val_f1"]) > 0.65


def test_pretrain_t5_trains_and_saves_hugging_face(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, T5ForConditionalGeneration

    sentences = make_sentences(tmp_path, "t5", Path(sysconfig.get_path("stdlib")) / "asyncio")
    common = ("--data-path", sentences, "--tokenizer", tmp_path / "tok", "--output", tmp_path)
    _run("pretrain_t5.py", 4, *common, "--max-steps", 10)
    _check_losses(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 512


def test_generate_text_decodes_in_four_ways(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=32,
        eos_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(corpus.parent / "tok").save_pretrained(tmp_path)
    out = _run(
        "generate_text.py",
        4,
        "--model",
        tmp_path,
        "--prompts",
        "w1 w2",
        "w3",
        "--max-new-tokens",
        6,
    )
    sections = out[out.index("---- ") :].split("---- ")[1:]
    assert [section.split("\n")[0] for section in sections] == [
        "top-p, decaying",
        "top-k",
        "top-k, after the first token of texts",
        "20 beams",
    ]
    assert all("w1 w2" in section and "w3" in section for section in sections)
