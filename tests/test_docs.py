"""docs/: every block of code is run, as a reader would run it, on small models; tables are what the code says.

As a program this writes the tables: ``python -m tests.test_docs``.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_megatron
from lightning_megatron.foreign_names import ForeignName, foreign_names
from tests.cli.command import instantiate, run_cli
from tests.cli.corpus import make_corpus
from tests.cli.test_config_command import OLD
from tests.pages import blocks, commands, execute, token_loader
from tests.ranks import ROOT, run_ranks

CHECKPOINTS, EVALUATION, FROM_ACCELERATE, GENERATION, OPTIONS, PLANNER, SEVERAL_HOSTS = (
    f"docs/{name}.md"
    for name in ("checkpoints", "evaluation", "from_accelerate", "generation", "options", "planner", "several_hosts")
)
BLOCKS = {
    CHECKPOINTS: ["python", "yaml", "bash"],
    EVALUATION: ["python", "bash", "python"],
    FROM_ACCELERATE: ["bash", "python", "python"],
    GENERATION: ["bash", "python", "python", "yaml"],
    PLANNER: ["bash"],  # by tests/cli/test_plan_command.py
    SEVERAL_HOSTS: ["bash", "bash"],  # on hosts of a network: tests/hosts
}
PROMPTS = ("Once upon a time", "The house")


def test_every_block_is_one_that_is_run_below() -> None:
    pages = {f"docs/{path.name}": path.read_text() for path in (ROOT / "docs").glob("*.md")}
    shown = {page: re.findall(r"^```(\w+)$", text, flags=re.MULTILINE) for page, text in pages.items()}
    assert {page: languages for page, languages in shown.items() if languages} == BLOCKS


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    shown = re.findall(r"^::: lightning_megatron\.([\w.]+)\.(\w+)$", page, flags=re.MULTILINE)
    assert {name: f"lightning_megatron.{module}" for module, name in shown} == lightning_megatron._HOMES


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: small models with tokenizers, a dataset, the configs, and what Accelerate wrote."""
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        T5Config,
        T5ForConditionalGeneration,
    )

    from tests.families.parity import tiny_model
    from tests.unit.data.chat_tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("docs")
    gpt2 = GPT2Config(vocab_size=311, n_layer=2, n_head=2, n_embd=16, n_positions=128, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    make_tokenizer(folder / "gpt2")
    tokens = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny_model(AutoModelForCausalLM, LlamaConfig(**tokens, **sizes)).save_pretrained(folder / "llama")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = T5Config(vocab_size=257, decoder_start_token_id=256, eos_token_id=256, pad_token_id=256, **sizes)
    tiny_model(T5ForConditionalGeneration, t5).save_pretrained(folder / "t5")
    for name in ("llama", "t5"):
        _tokenizer_of_bytes(folder / name)
    make_corpus(folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "default_config.yaml").write_text(yaml.safe_dump(OLD))
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


def _printed(folder: Path, words: list[str], *more: str, ranks: int = 1) -> str:
    """What a command of a page prints."""
    program, *arguments = words
    assert program == "lightning-megatron"
    code, out, err = run_cli(folder, *arguments, *more, ranks=ranks)
    assert code == 0, err
    return out


# ---- several_hosts.md -----------------------------------------------------------------------------------------------


def test_what_several_hosts_start_is_a_command_of_ours(reader: Path) -> None:
    for block in blocks(SEVERAL_HOSTS, "bash"):
        (fit,) = [line for line in block.replace("\\\n", "").splitlines() if " fit " in line]
        line = shlex.split(fit.partition(" || ")[0])
        code, out, err = run_cli(reader, *line[line.index("fit") :], "--print_config")
        assert code == 0, err
        shown = yaml.safe_load(out)
        assert (shown["trainer"]["num_nodes"], shown["ckpt_path"]) == (2, "last")


# ---- checkpoints.md -------------------------------------------------------------------------------------------------


def test_checkpoints_convert_there_and_back_and_a_run_begins_and_goes_on(reader: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    printed = [_printed(reader, words) for words in commands(CHECKPOINTS)]
    assert "query_key_value" in printed[-1]
    before = AutoModelForCausalLM.from_pretrained(reader / "gpt2").state_dict()
    after = AutoModelForCausalLM.from_pretrained(reader / "exported").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert json.loads((reader / "exported/config.json").read_text())["dtype"] == "bfloat16"
    assert run_ranks(_steps_of_two_runs, 2, str(reader)) == [[2, 3]] * 2
    assert (reader / "runs/a/last.ckpt").exists()


def _steps_of_two_runs(folder: str) -> list[int]:
    """Run the Python twice, as a run that is started again; the steps that each has made."""
    steps = []
    for last in (2, 3):
        smaller = {"max_steps=1000": f"max_steps={last}, logger=False, enable_progress_bar=False"}
        smaller["every_n_train_steps=100"] = "every_n_train_steps=1"
        trainer = execute(CHECKPOINTS, 0, folder, smaller, loader=token_loader())["trainer"]
        steps.append(int(trainer.fit_loop.epoch_loop.batch_progress.total.completed))
    return steps


def test_the_yaml_about_checkpoints_is_what_the_strategy_takes() -> None:
    from lightning_megatron import LoadFrom, MegatronStrategy

    options = yaml.safe_load(blocks(CHECKPOINTS, "yaml")[0])["trainer"]["strategy"]["init_args"]["load_from"]
    assert MegatronStrategy(load_from=LoadFrom(**options))


# ---- evaluation.md --------------------------------------------------------------------------------------------------


def test_evaluations_print_their_metrics_and_predictions_are_the_logits_of_every_sample(reader: Path) -> None:
    run_ranks(_write_texts, 1, str(reader))
    lines = [json.loads(line)["text"] for line in (reader / "lines.jsonl").read_text().splitlines()]
    assert min(len(line.split()) for line in lines) == 4
    perplexity, last_word = commands(EVALUATION)
    for words, metric in ((perplexity, "test_perplexity"), (last_word, "test_last_word_accuracy")):
        out = _printed(reader, words, "--trainer.limit_test_batches", "2", ranks=2)
        assert metric in out
        assert "test_loss" in out
    assert run_ranks(_shapes_of_logits, 4, str(reader)) == [[(5, 311)] * 7] * 4


def _write_texts(folder: str) -> None:
    execute(EVALUATION, 0, folder, {})


def _shapes_of_logits(folder: str) -> list[tuple[int, ...]]:
    import torch

    dataset = [{"input_ids": torch.full((5,), number)} for number in range(7)]
    quiet = {"logger=False": "enable_progress_bar=False, enable_checkpointing=False, logger=False"}
    variables = execute(EVALUATION, 1, folder, quiet, dataset=dataset)
    assert sum(len(batch) for batch in variables["predictions"]) in (3, 4)
    expected = [variables["module"].logits(row["input_ids"][None])[0] for row in dataset]
    for logits, again in zip(variables["logits"], expected, strict=True):
        # Other rows beside it, and so other kernels.
        torch.testing.assert_close(logits, again, rtol=0.0, atol=1e-5)
    return [tuple(logits.shape) for logits in variables["logits"]]


# ---- from_accelerate.md ---------------------------------------------------------------------------------------------


def test_a_run_of_accelerate_moves_over(reader: Path) -> None:
    *_, printed = [_printed(reader, words) for words in commands(FROM_ACCELERATE)]
    assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["num_microbatches"] == 2
    assert run_ranks(_moved_over, 4, str(reader)) == [(4, pytest.approx(0.5))] * 4
    assert (reader / "out.ckpt").is_dir()


def _moved_over(folder: str) -> tuple[int, float]:
    from lightning.pytorch import Trainer, seed_everything

    from lightning_megatron import MegatronModule, MegatronStrategy

    smaller = {"max_steps=4,": "max_steps=4, limit_val_batches=1, logger=False, enable_progress_bar=False,"}
    variables = execute(FROM_ACCELERATE, 0, folder, smaller)
    losses = []
    for module in (execute(FROM_ACCELERATE, 1, folder, {})["module"], MegatronModule(model="gpt2")):
        seed_everything(1)
        options: dict[str, Any] = {"logger": False, "limit_val_batches": 1}
        trainer = Trainer(accelerator="cpu", devices=4, strategy=MegatronStrategy(tp=2, pp=2), **options)
        losses.append(trainer.validate(module, variables["data"], verbose=False)[0]["val_loss"])
    return int(variables["trainer"].global_step), losses[0] / losses[1]


@pytest.mark.parametrize(
    ("module", "name", "tool"),
    [
        ("accelerate.utils", "MegatronLMPlugin", "plugin"),
        ("accelerate.commands.config.config_args", "ClusterConfig", "config"),
    ],
)
def test_every_option_of_accelerate_is_in_the_table(module: str, name: str, tool: str) -> None:
    options = getattr(pytest.importorskip(module), name).__dataclass_fields__
    assert set(options) <= {row.theirs for row in foreign_names() if row.used_by == tool}


# ---- generation.md --------------------------------------------------------------------------------------------------


def _by_hugging_face(folder: Path, **options: Any) -> list[list[int]]:
    """The rows of both prompts, each alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(folder / "llama") for kind in (AutoModelForCausalLM, AutoTokenizer))
    rows = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    return [model.generate(ids, do_sample=False, pad_token_id=256, **options)[0].tolist() for ids in rows]


def test_the_command_generate_writes_what_the_page_says(reader: Path) -> None:
    from transformers import AutoTokenizer

    shutil.rmtree(reader / "runs", ignore_errors=True)  # of the page about checkpoints
    (reader / "runs/a").mkdir(parents=True)
    convert = "lightning-megatron convert --load-path llama --save-path runs/a/last.ckpt --to megatron"
    _printed(reader, convert.split())
    greedy, drawn, of_file, beams, stopped, answer = (
        _printed(reader, words, "--accelerator", "cpu", ranks=2 if "--tp" in words else 1)
        for words in commands(GENERATION)
    )
    whole = _by_hugging_face(reader, max_new_tokens=40)[0]
    assert greedy == AutoTokenizer.from_pretrained(reader / "llama").decode(whole, skip_special_tokens=True) + "\n"
    assert re.fullmatch(r"Once.*\n\nTwice.*\n", drawn, flags=re.DOTALL)
    assert [json.loads(line)["prompt"] for line in of_file.splitlines()] == list(PROMPTS)
    assert beams.count("Once") == 2
    assert stopped.startswith("Once")
    assert answer.startswith("translate English to German: The house is wonderful.\n")


def test_texts_of_a_trainer_are_hugging_faces(reader: Path) -> None:
    expected = _by_hugging_face(reader, max_new_tokens=8)
    best = _by_hugging_face(reader, max_new_tokens=8, num_beams=4)
    for texts, found, printed in run_ranks(_predicted, 2, str(reader)):
        for row, beam, one, other in zip(texts, found, expected, best, strict=True):
            # Before the shorter prompt there is padding, behind a text that ended, too: both are the end token.
            assert [t for t in row if t != 256] == [t for t in one if t != 256]
            assert [t for t in beam if t != 256] == [t for t in other if t != 256]
        assert "Once upon a time" in printed


def _predicted(folder: str) -> tuple[list[list[int]], list[list[int]], str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        variables = execute(GENERATION, 0, folder, {})
    (texts,) = variables["texts"]
    return texts.tolist(), variables["best"].tolist(), printed.getvalue()


def test_training_shows_samples_and_answers_questions(reader: Path) -> None:
    (printed, answer), (nothing, other) = run_ranks(_trained, 2, str(reader))
    samples = [line.split(" -> ")[0] for line in printed.splitlines() if line.startswith("step ")]
    assert samples == [f"step {step}: {prompt!r}" for step in (1, 2) for prompt in PROMPTS]
    assert "step " not in nothing
    assert answer == other == [1, 3 + 4]


def _trained(folder: str) -> tuple[str, list[int]]:
    import torch

    smaller = {"max_steps=1000": "max_steps=2, max_epochs=1, logger=False, enable_checkpointing=False"}
    smaller |= {"every_n_steps=100": "every_n_steps=1", "max_new_tokens=40": "max_new_tokens=3"}
    given = {"loader": token_loader(), "prompts": torch.tensor([[3, 4, 5]])}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        variables = execute(GENERATION, 1, folder, smaller, **given)
    (question,) = [each for each in variables["trainer"].callbacks if hasattr(each, "answer")]
    return printed.getvalue(), list(question.answer.shape)


def test_the_yaml_of_samples_is_what_the_callback_takes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(blocks(GENERATION, "yaml")[0])
    assert run_ranks(_callback_of_yaml, 1, str(tmp_path)) == [("llama", list(PROMPTS), 500, 40, 0.9)]


def _callback_of_yaml(folder: str) -> tuple[Any, ...]:
    from lightning_megatron import SampleText

    model = ["--model.model", '{"model_type": "gpt2"}', "--data", "IndexedDataModule", "--data.data_path", "x"]
    cli = instantiate(folder, "--config", "run.yaml", *model, "--data.seq_length", "8", "--data.micro_batch_size", "1")
    (sample,) = [each for each in cli.trainer.callbacks if isinstance(each, SampleText)]
    options = sample.generation
    assert options is not None
    return sample.tokenizer, sample.prompts, sample.every_n_steps, options.max_new_tokens, options.top_p


def test_every_option_of_generation_is_described() -> None:
    from lightning_megatron import GenerationOptions

    page = (ROOT / GENERATION).read_text()
    named = set(re.findall(r"`(\w+)`", page[page.index("## Options") :]))
    assert {field.name for field in fields(GenerationOptions)} - named - {"pad_token_id"} == set()


# ---- tables that are made of the code -------------------------------------------------------------------------------

TOOLS = {
    "api": "Accelerate's classes and functions",
    "plugin": "Accelerate's `MegatronLMPlugin`, and `megatron_lm_*` in its file",
    "config": "The other keys of Accelerate's file, and options of `accelerate launch`",
    "loaders": "`MegatronLMDummyDataLoader` and `MegatronLMDummyScheduler`",
    "generate": "`megatron_generate`, and Megatron-LM's text generation",
    "nemo": "NeMo 2's `MegatronStrategy` and data modules",
    "megatron": "Megatron-LM's command line",
    "transformers": "transformers' `generate` and `TrainingArguments`",
}


def _table(header: str, rows: list[str]) -> str:
    return "\n".join([header, "|---|---|---|", *rows])


def _foreign_row(row: ForeignName, tool: str) -> str:
    theirs = f"--{row.theirs.replace('_', '-')}" if tool == "megatron" else row.theirs
    ours = f"`{row.ours.replace(')', '=)')}`" if row.ours else ""
    return f"| `{theirs}` | {ours} | {row.note} |"


def _names_of_other_tools() -> str:
    parts = []
    for tool, title in TOOLS.items():
        rows = [_foreign_row(row, tool) for row in foreign_names() if tool in row.used_by.split()]
        parts.append(f"## {title}\n\n{_table('| there | here | |', rows)}")
    return "\n\n".join(parts) + "\n"


def _summary(kind: Any) -> str:
    return inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")


def _default(field: Any) -> str:
    if field.default is not MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is MISSING else f"`{field.default_factory()!r}`"


def _fields(kind: Any) -> list[str]:
    from docstring_parser import DocstringStyle, parse

    described = {param.arg_name: param.description or "" for param in parse(kind.__doc__, DocstringStyle.GOOGLE).params}
    options = {field.name: field for field in fields(kind)}
    assert described.keys() == options.keys(), kind
    texts = {name: " ".join(text.split()).replace("``", "`").replace("|", r"\|") for name, text in described.items()}
    return [f"| `{name}` | {_default(options[name])} | {text} |" for name, text in texts.items()]


def _options() -> str:
    from lightning_megatron import Heartbeat, LoadFrom, LoRA, LRSchedule, MaskingOptions, OptimizerOptions, TrainStep

    parts = [
        f"## {kind.__name__}\n\n{_summary(kind)}\n\n{_table('| field | default | |', _fields(kind))}\n"
        for kind in (OptimizerOptions, LRSchedule, LoRA, LoadFrom, Heartbeat, MaskingOptions)
    ]
    rows = [
        f"| `{name}` | {'yes' if name in TrainStep.__abstractmethods__ else ''} | "
        + inspect.cleandoc(method.__doc__ or "").splitlines()[0].replace("``", "`")
        + " |"
        for name, method in vars(TrainStep).items()
        if inspect.isfunction(method) and not name.startswith("_")
    ]
    parts.append(
        f"## TrainStep\n\n{_summary(TrainStep)} [An example](../examples/custom_train_step.py). A subclass names its "
        f"losses in `loss_terms`.\n\n{_table('| method | has to be written | |', rows)}\n"
    )
    return "\n".join(parts)


# From its first heading of the second level on, the page is made.
MADE: dict[str, tuple[str, Callable[[], str]]] = {
    FROM_ACCELERATE: (f"## {TOOLS['api']}\n", _names_of_other_tools),
    OPTIONS: ("## OptimizerOptions\n", _options),
}


@pytest.mark.parametrize("page", MADE)
def test_the_tables_are_what_the_code_says(page: str) -> None:
    heading, make = MADE[page]
    text = (ROOT / page).read_text()
    assert text[text.index(heading) :] == make(), "run python -m tests.test_docs"
    assert {tool for row in foreign_names() for tool in row.used_by.split()} == {*TOOLS, "removed"}


def test_the_command_line_takes_the_options_and_its_configuration_can_be_read_again(tmp_path: Path) -> None:
    shown = re.findall(r"`(--[^`]+)` \|", (ROOT / OPTIONS).read_text())
    options = [word for line in shown for word in shlex.split(line)]
    options[options.index("my_module.MyStep")] = "lightning_megatron.T5TrainStep"
    data = ["--data", "IndexedDataModule", "--data.data_path", "x", "--data.seq_length", "8"]
    first = ["--model.model", "t5", "--trainer.strategy", "MegatronStrategy", *data, "--data.micro_batch_size", "1"]
    code, printed, err = run_cli(tmp_path, "fit", *first, *options, "--print_config")
    assert code == 0, err
    (tmp_path / "again.yaml").write_text(printed)
    code, again, err = run_cli(tmp_path, "fit", "--config", "again.yaml", "--print_config")
    assert (code, again) == (0, printed), err
    made = yaml.safe_load(again)
    assert made["model"]["init_args"]["optimizer"]["beta2"] == 0.95
    assert made["trainer"]["strategy"]["init_args"]["load_from"]["path"] == "runs/a"
    assert made["data"]["init_args"]["masking"]["probability"] == 0.2


if __name__ == "__main__":
    for page, (heading, make) in MADE.items():
        text = (ROOT / page).read_text()
        (ROOT / page).write_text(text[: text.index(heading)] + make())
