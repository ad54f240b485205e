"""README and docs/: every code block runs on small models, and the tables match the code."""

import contextlib
import inspect
import io
import json
import re
import shlex
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from docstring_parser import DocstringStyle, parse

import lightning_megatron
from lightning_megatron import (
    Heartbeat,
    LoadFrom,
    LoRA,
    LRSchedule,
    MaskingOptions,
    OptimizerOptions,
    TrainStep,
)
from lightning_megatron.cli.commands import TRAINER_COMMANDS, build_parser
from lightning_megatron.foreign_names import foreign_names
from tests.cli.command import instantiate, run_cli
from tests.cli.corpus import VOCAB_SIZE
from tests.cli.test_config_command import OLD
from tests.families.parity import tiny_model
from tests.models import LLAMA, NO_DROPOUT, QUIET
from tests.pages import blocks, commands, execute, token_loader
from tests.ranks import ROOT, run_ranks
from tests.tokenizers import byte_level_tokenizer, make_tokenizer

(
    CHECKPOINTS,
    DISTILLATION,
    EVALUATION,
    FROM_ACCELERATE,
    FROM_FSDP,
    FROM_NEMO,
    GENERATION,
    OPTIONS,
    PLANNER,
    PREFERENCES,
    SEVERAL_HOSTS,
    STREAMS,
) = (
    f"docs/{name}.md"
    for name in (
        "checkpoints",
        "distillation",
        "evaluation",
        "from_accelerate",
        "from_fsdp",
        "from_nemo",
        "generation",
        "options",
        "planner",
        "preferences",
        "several_hosts",
        "streams",
    )
)
README = "README.md"
TRAINING = "docs/training.md"
BLOCKS = {
    README: ["python", "bash", "bash", "python", "bash", "yaml"],
    CHECKPOINTS: ["python", "yaml", "bash"],
    EVALUATION: ["python", "bash", "python"],
    FROM_ACCELERATE: ["bash", "python", "python"],
    FROM_FSDP: ["python"],
    FROM_NEMO: ["python"],
    GENERATION: ["bash", "python", "python", "yaml"],
    DISTILLATION: ["python", "python"],
    PREFERENCES: ["python"],
    STREAMS: ["python"],
    "docs/own_model.md": ["python"],  # run by tests/convert/test_own_family.py
    "docs/lm_eval.md": ["yaml", "bash", "python", "python"],  # run by tests/harness
    PLANNER: ["bash"],  # run by tests/cli/test_plan_command.py
    TRAINING: ["python", "python", "yaml"],
    "docs/which_layout.md": ["bash"],  # likewise
    SEVERAL_HOSTS: ["bash", "bash"],  # run on several hosts by tests/hosts
}
PROMPTS = ("Once upon a time", "The house")


def test_no_page_has_an_unknown_code_block() -> None:
    pages = [README, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    shown = {
        page: re.findall(r"^```(\w+)$", (ROOT / page).read_text(), flags=re.MULTILINE)
        for page in pages
    }
    assert {page: languages for page, languages in shown.items() if languages} == BLOCKS


def test_reference_lists_every_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    shown = re.findall(r"^::: lightning_megatron\.([\w.]+)\.(\w+)$", page, flags=re.MULTILINE)
    homes = {name: f"lightning_megatron.{module}" for module, name in shown}
    assert homes == vars(lightning_megatron)["_MODULES"]


@pytest.fixture(scope="module")
def reader(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's directory: small models with tokenizers, a dataset, the configs and an Accelerate config."""
    from transformers import (
        AutoModelForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        T5Config,
    )
    from transformers import T5ForConditionalGeneration as T5

    folder = tmp_path_factory.mktemp("docs")
    gpt2 = GPT2Config(
        vocab_size=311,
        n_layer=2,
        n_head=2,
        n_embd=16,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    make_tokenizer(folder / "gpt2")
    tokens = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tiny_model(AutoModelForCausalLM, LlamaConfig(**tokens, **sizes)).save_pretrained(
        folder / "llama"
    )
    tokens |= {"decoder_start_token_id": 256, "pad_token_id": 256}
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
    }
    tiny_model(T5, T5Config(**tokens, **sizes)).save_pretrained(folder / "t5")
    tokenizer = byte_level_tokenizer({number: bytes([number]) for number in range(256)})
    tokenizer.add_special_tokens(dict.fromkeys(("bos_token", "eos_token"), "<|end|>"))
    for name in ("llama", "t5"):
        tokenizer.save_pretrained(folder / name)
    shutil.copytree(corpus.parent, folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "path/to").mkdir(parents=True)
    (folder / "path/to/llama").symlink_to(folder / "llama")
    (folder / "path/to/config.json").write_text('{"model_type": "gpt2"}')
    (folder / "default_config.yaml").write_text(yaml.safe_dump(OLD))
    return folder


def _run(
    folder: Path,
    words: list[str],
    *more: str,
) -> str:
    """Output of a command of a page."""
    program, *arguments = words
    assert program == "lightning-megatron"
    is_parallel = arguments[0] in ("generate", "test") and {"--tp", "--trainer.devices"} & {
        *arguments
    }
    code, out, err = run_cli(
        folder,
        *arguments,
        *more,
        ranks=2 if is_parallel else 1,
    )
    assert code == 0, err
    return out


def _check_block(
    folder: str,
    page: str,
    number: int,
    changes: dict[str, str],
    check: str,
) -> bool:
    """Run a Python block on this rank and evaluate ``check`` with its variables and its output ``printed``."""
    import torch
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronModule, MegatronStrategy

    variables: dict[str, Any] = {
        "__name__": "__main__",
        "loader": token_loader(),
        "prompts": torch.tensor([[3, 4, 5]]),
    }
    variables |= {
        "torch": torch,
        "dataset": [{"input_ids": torch.full((5,), number)} for number in range(7)],
    }
    if (page, number) == (README, 1):
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=MegatronStrategy(tp=2),
            max_steps=1,
            **QUIET,
        )
        variables |= {"MegatronModule": MegatronModule, "trainer": trainer}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        variables = execute(page, number, folder, changes, **variables)
    return bool(eval(check, variables | {"printed": printed.getvalue()}))


def _added_loss(folder: str, config: dict[str, Any]) -> tuple[float, float, float]:
    """Loss of the objective that the page defines, its two terms: the second by hand, from the first's tokens."""
    import torch
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronStrategy

    changes = {'{"model_type": "gpt2"}': str(config)}
    model = execute(TRAINING, 0, folder, changes)["model"]
    strategy = MegatronStrategy(pp=2, num_microbatches=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=1,
        **QUIET,
    )
    losses: list[torch.Tensor] = []

    def log_probabilities(*_: Any) -> None:
        tokens = torch.arange(16)[None]
        predicted = model.logits(tokens).log_softmax(-1)[:, :-1]
        losses.append(-predicted.gather(-1, tokens[:, 1:, None]).squeeze(-1))

    model.on_train_start = log_probabilities
    trainer.fit(model, token_loader())
    expected = losses[0].mean() + 0.01 * losses[0].square().mean()
    logged = trainer.callback_metrics
    total = logged["train_lm_loss"] + logged["train_confidence_loss"]
    return expected.item(), logged["train_loss"].item(), total.item()


def test_the_added_loss_of_the_training_page_is_trained(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 64,
        "n_positions": 16,
        **NO_DROPOUT,
    }
    for expected, loss, total in run_ranks(
        _added_loss,
        2,
        str(tmp_path),
        config,
    ):
        assert loss == pytest.approx(expected, rel=1e-5)  # fp32, summed in another order
        assert total == pytest.approx(loss, rel=1e-6)


def _reward_loss(folder: str, config: dict[str, Any]) -> tuple[float, float]:
    """Loss of the pairs that the page shows: by hand, from the model's logits, and of the step."""
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_megatron import MegatronStrategy

    changes = {'"llama"': str(config), "pretrained=True": "pretrained=False"}
    shown = execute(TRAINING, 1, folder, changes)
    model = shown["model"]
    batch = shown["batch"]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(pp=2, num_microbatches=2),
        max_steps=1,
        **QUIET,
    )
    losses: list[torch.Tensor] = []

    def by_hand(*_: Any) -> None:
        chosen, rejected = (
            model.logits(batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"])
            for name in ("chosen", "rejected")
        )
        losses.append(torch.log(1 + torch.exp(rejected - chosen)).mean())

    model.on_train_start = by_hand
    rows: Any = [{name: tensor[row] for name, tensor in batch.items()} for row in range(2)]
    trainer.fit(model, DataLoader(rows, batch_size=2))
    return losses[0].item(), trainer.callback_metrics["train_reward_loss"].item()


def test_the_pairs_of_the_training_page_train_a_reward_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", **LLAMA, "vocab_size": 64, "initializer_range": 0.2}
    for expected, loss in run_ranks(_reward_loss, 2, str(tmp_path), config):
        assert loss == pytest.approx(expected, rel=1e-5)


def _run_python(
    folder: Path,
    page: str,
    number: int,
    ranks: int,
    changes: dict[str, str],
    check: str,
) -> None:
    """Run a Python block with text replaced by ``changes`` on ``ranks`` ranks; ``check`` must hold on each."""
    assert (
        run_ranks(_check_block, ranks, str(folder), page, number, changes, check) == [True] * ranks
    )


def test_readme_python_trains_and_fine_tunes_hugging_face_weights(reader: Path) -> None:
    from transformers import AutoModelForCausalLM

    vocabulary = f'"vocab_size": {VOCAB_SIZE}'
    smaller = {
        '"n_layer": 12, "n_embd": 768, "n_head": 12': f'"n_layer": 2, "n_embd": 16, "n_head": 2, {vocabulary}',
        "seq_length=1024, micro_batch_size=4": "seq_length=16, micro_batch_size=1, split='80,20,0'",
        "max_steps=1000": "max_steps=2, limit_val_batches=1, enable_progress_bar=False, logger=False",
    }
    _run_python(
        reader, README, 0, 4, smaller, "trainer.global_step == 2 and trainer.world_size == 4"
    )
    _run_python(reader, README, 1, 2, {}, "trainer.global_step == 1")
    before, after = (
        AutoModelForCausalLM.from_pretrained(reader / name) for name in ("llama", "tuned")
    )
    assert not before.lm_head.weight.equal(after.lm_head.weight)


@pytest.mark.parametrize(
    "command",
    [*commands(README), *commands("CONTRIBUTING.md")],
    ids=" ".join,
)
def test_commands_of_readme_and_contributing_exist_and_match_the_quickstart(
    command: list[str],
) -> None:
    program, *arguments = command
    noxfile = (ROOT / "noxfile.py").read_text()
    if program == "lightning-megatron":
        if arguments[0] in TRAINER_COMMANDS:
            assert (ROOT / arguments[arguments.index("--config") + 1]).exists()
        else:
            build_parser()[0].parse_args(arguments)
        assert (
            arguments == ["doctor"]
            or [word for word in arguments if word not in noxfile and not word.isupper()] == []
        )
    elif program == "bash":
        assert (ROOT / arguments[0]).exists()
    elif "nox" in arguments and "-s" in arguments:
        assert f"\ndef {arguments[arguments.index('-s') + 1]}(session" in noxfile
    else:
        assert "install" in arguments, command
        assert program == "pip" or command[1:3] == ["-m", "pip"], command


def test_readme_is_short_and_links_exist() -> None:
    assert len((ROOT / README).read_text().splitlines()) <= 130
    for page in (ROOT / README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


YAML = {
    README: "cli.trainer.strategy.num_microbatches == 16 and type(cli.datamodule).__name__ == 'IndexedDataModule'",
    CHECKPOINTS: "cli.config.trainer.strategy.init_args['load_from']['step'] == 300",
    TRAINING: "cli.model.optimizer_options.name == 'muon' and cli.model.optimizer_options.adjust_lr != 'original'",
    GENERATION: f"[(x.tokenizer, tuple(x.prompts), x.every_n_steps, x.generation.max_new_tokens, x.generation.top_p)"
    f" for x in cli.trainer.callbacks if type(x).__name__ == 'SampleText'] == [('llama', {PROMPTS}, 500, 40, 0.9)]",
}


@pytest.mark.parametrize("page", YAML)
def test_yaml_of_pages_can_be_instantiated(reader: Path, page: str) -> None:
    assert run_ranks(_check_yaml, 1, str(reader), page) == [True]


def _check_yaml(folder: str, page: str) -> bool:
    (Path(folder) / "shown.yaml").write_text(blocks(page, "yaml")[0])
    data = ["--data", "IndexedDataModule", "--data.data_path", "x", "--data.seq_length", "8"]
    more = ["--model.model", '{"model_type": "gpt2"}', *data, "--data.micro_batch_size", "1"]
    arguments = [
        "--config",
        "shown.yaml",
        "--trainer.logger",
        "false",
        *(more if page != README else ()),
    ]
    return bool(eval(YAML[page], {"cli": instantiate(folder, *arguments)}))


def test_commands_for_several_hosts_are_valid(reader: Path) -> None:
    for block in blocks(SEVERAL_HOSTS, "bash"):
        lines = block.replace("\\\n", "").splitlines()
        line = shlex.split(next(each for each in lines if " fit " in each).split("||")[0])
        shown = yaml.safe_load(
            _run(
                reader,
                [
                    "lightning-megatron",
                    *line[line.index("fit") :],
                    "--print_config",
                ],
            )
        )
        assert (shown["trainer"]["num_nodes"], shown["ckpt_path"]) == (2, "last")


def test_checkpoints_page_converts_starts_and_resumes_a_run(reader: Path) -> None:
    assert "query_key_value" in [_run(reader, words) for words in commands(CHECKPOINTS)][-1]
    assert json.loads((reader / "exported/config.json").read_text())["dtype"] == "bfloat16"
    for steps in (2, 3):  # the second run resumes
        smaller = {"max_steps=1000": f"max_steps={steps}, logger=False, enable_progress_bar=False"}
        smaller["every_n_train_steps=100"] = "every_n_train_steps=1"
        check = f"trainer.fit_loop.epoch_loop.batch_progress.total.completed == {steps}"
        _run_python(reader, CHECKPOINTS, 0, 2, smaller, check)
    assert (reader / "runs/a/last.ckpt").exists()


def test_evaluation_page_prints_metrics_and_predicts_logits(reader: Path) -> None:
    _run_python(reader, EVALUATION, 0, 1, {}, "min(len(line.split()) for line in lines) == 4")
    for words, metric in zip(
        commands(EVALUATION), ("test_perplexity", "test_last_word_accuracy"), strict=True
    ):
        assert metric in _run(reader, words, "--trainer.limit_test_batches", "2")
    quiet = {"logger=False": "enable_progress_bar=False, enable_checkpointing=False, logger=False"}
    _run_python(
        reader, EVALUATION, 1, 4, quiet, "[each.shape for each in logits] == [(5, 311)] * 7"
    )


def test_accelerate_page_migrates_a_run(reader: Path) -> None:
    *_, printed = [_run(reader, words) for words in commands(FROM_ACCELERATE)]
    assert yaml.safe_load(printed)["trainer"]["strategy"]["init_args"]["num_microbatches"] == 2
    smaller = {
        "max_steps=4,": "max_steps=4, limit_val_batches=1, logger=False, enable_progress_bar=False,"
    }
    _run_python(reader, FROM_ACCELERATE, 0, 4, smaller, "trainer.global_step == 4")
    assert (reader / "out.ckpt").is_dir()
    halved = "module.train_step.loss_func({'loss_mask': torch.ones(2, 4)}, torch.ones(2, 4))['lm_loss'].sum == 4"
    _run_python(reader, FROM_ACCELERATE, 1, 1, {}, halved)


def test_nemo_page_trains(reader: Path) -> None:
    quiet = {"devices=4, precision": "devices=4, logger=False, precision"}
    _run_python(reader, FROM_NEMO, 0, 4, quiet, "trainer.global_step == 4")


def test_fsdp_page_trains_and_exports(reader: Path) -> None:
    quiet = {
        "strategy, max_steps=2)": "strategy, max_steps=2, logger=False, enable_progress_bar=False)"
    }
    _run_python(reader, FROM_FSDP, 0, 4, quiet, "trainer.global_step == 2")
    assert (reader / "tuned/model.safetensors").exists()


def test_preferences_page_trains(reader: Path) -> None:
    shutil.copy(ROOT / "examples/preferences.jsonl", reader)
    quiet = {
        "strategy, max_steps=2)": "strategy, max_steps=2, logger=False, enable_progress_bar=False)"
    }
    check = "float(trainer.callback_metrics['train_accuracy']) in (0, 0.5, 1)"
    _run_python(reader, PREFERENCES, 0, 2, quiet, check)
    assert len(list((reader / "reference_logps").glob("*/depends_on.json"))) == 2


def test_streams_page_trains(reader: Path) -> None:
    for name in ("web", "books"):
        (reader / "data" / name).mkdir(parents=True)
        (reader / "data" / name / "a.txt").write_text(f"A text of {name}. " * 40)
    smaller = {
        "strategy, max_steps=2)": "strategy, max_steps=2, logger=False, enable_progress_bar=False)",
        "seq_length=4096": "seq_length=32",
        "num_workers=2": "num_workers=0",
    }
    _run_python(reader, STREAMS, 0, 2, smaller, "trainer.global_step == 2")


def test_distillation_page_trains(reader: Path) -> None:
    quiet = {
        "strategy, max_steps=2)": "strategy, max_steps=2, logger=False, enable_progress_bar=False)"
    }
    check = "trainer.callback_metrics['train_kl_loss'] > 0"
    for number in (0, 1):
        _run_python(reader, DISTILLATION, number, 2, quiet, check)
    assert (reader / "teacher_logits/top_logits.json").exists()


def test_foreign_names_cover_every_accelerate_option() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.utils import MegatronLMPlugin

    for kind, tool in ((MegatronLMPlugin, "plugin"), (ClusterConfig, "config")):
        assert {field.name for field in fields(kind)} <= {
            row.theirs for row in foreign_names() if tool in row.used_by.split()
        }


def test_generation_page_generates_completions(reader: Path) -> None:
    shutil.rmtree(reader / "runs", ignore_errors=True)  # left by the checkpoints page
    (reader / "runs/a").mkdir(parents=True)
    convert = (
        "lightning-megatron convert --load-path llama --save-path runs/a/last.ckpt --to megatron"
    )
    _run(reader, convert.split())
    greedy, sampled, from_file, beams, stopped, translated = (
        _run(reader, words, "--accelerator", "cpu") for words in commands(GENERATION)
    )
    assert greedy.startswith("Once upon a time")
    assert re.fullmatch(r"Once.*\n\nTwice.*\n", sampled, flags=re.DOTALL)
    assert [json.loads(line)["prompt"] for line in from_file.splitlines()] == list(PROMPTS)
    assert beams.count("Once") == 2
    assert stopped.startswith("Once")
    assert translated.startswith("translate English to German: The house is wonderful.\n")
    shapes = "texts[0].shape == best.shape == (2, rows.input_ids.shape[1] + 8)"
    _run_python(reader, GENERATION, 0, 2, {}, f"{shapes} and 'Once upon a time' in printed")
    smaller = {
        "max_steps=1000": "max_steps=2, max_epochs=1, logger=False, enable_checkpointing=False"
    }
    smaller |= {"every_n_steps=100": "every_n_steps=1", "max_new_tokens=40": "max_new_tokens=3"}
    lines = "printed.count('step ') == (0 if trainer.global_rank else 4)"
    samples = f"trainer.callbacks[1].answer.shape == (1, 7) and {lines}"
    _run_python(reader, GENERATION, 1, 2, smaller, samples)


def test_generation_page_describes_every_option() -> None:
    from lightning_megatron import GenerationOptions

    page = (ROOT / GENERATION).read_text()
    documented = set(re.findall(r"`(\w+)`", page[page.index("## Options") :]))
    assert {field.name for field in fields(GenerationOptions)} <= documented | {"pad_token_id"}


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_table_of_foreign_names_matches_the_code() -> None:
    accelerate = (ROOT / FROM_ACCELERATE).read_text()
    nemo = (ROOT / FROM_NEMO).read_text()
    expected = set()
    for row in foreign_names():
        for tool in row.used_by.replace("removed", "").split():
            theirs = f"--{row.theirs.replace('_', '-')}" if tool == "megatron" else row.theirs
            ours = f"`{row.ours.replace(')', '=)')}`" if row.ours else ""
            expected.add(f"| `{theirs}` | {ours} | {row.note} |")
    tables = accelerate[accelerate.index("## Accelerate's classes and functions") :]
    tables += nemo[nemo.index("## Arguments") :]
    assert {line for line in tables.splitlines() if line.startswith("| `")} == expected


@pytest.mark.parametrize(
    "kind", [OptimizerOptions, LRSchedule, LoRA, LoadFrom, Heartbeat, MaskingOptions]
)
def test_option_tables_have_every_field_default_and_meaning(kind: Any) -> None:
    expected = []
    descriptions = {
        each.arg_name: each.description
        for each in parse(kind.__doc__, DocstringStyle.GOOGLE).params
    }
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if default is MISSING else f"`{default!r}`"
        meaning = (
            " ".join(str(descriptions[field.name]).split()).replace("``", "`").replace("|", r"\|")
        )
        expected.append(f"| `{field.name}` | {shown} | {meaning} |")
    section = (ROOT / OPTIONS).read_text().split(f"## {kind.__name__}\n")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == expected


def test_train_step_table_has_every_method() -> None:
    section = (ROOT / OPTIONS).read_text().split("## TrainStep\n")[1]
    public = {
        name
        for name, value in vars(TrainStep).items()
        if inspect.isfunction(value) and name[0] != "_"
    }
    shown = dict(re.findall(r"^\| `(\w+)` \| (\w*) \|", section, flags=re.MULTILINE))
    assert shown == {
        name: "yes" if name in TrainStep.__abstractmethods__ else "" for name in public
    }


def test_documented_options_are_accepted_and_printed_config_round_trips(tmp_path: Path) -> None:
    shown = re.findall(r"`(--[^`]+)` \|", (ROOT / OPTIONS).read_text())
    options = [word for line in shown for word in shlex.split(line)]
    options[options.index("my_module.MyStep")] = "lightning_megatron.T5TrainStep"
    data = ["--data", "IndexedDataModule", "--data.data_path", "x", "--data.seq_length", "8"]
    required = [
        "--model.model",
        "t5",
        "--trainer.strategy",
        "MegatronStrategy",
        *data,
        "--data.micro_batch_size",
        "1",
    ]
    code, printed, err = run_cli(tmp_path, "fit", *required, *options, "--print_config")
    assert code == 0, err
    (tmp_path / "again.yaml").write_text(printed)
    code, again, err = run_cli(tmp_path, "fit", "--config", "again.yaml", "--print_config")
    assert (code, again) == (0, printed), err
    config = yaml.safe_load(again)
    assert config["model"]["init_args"]["optimizer"]["beta2"] == 0.95
    assert config["trainer"]["strategy"]["init_args"]["load_from"]["path"] == "runs/a"
    assert config["data"]["init_args"]["masking"]["probability"] == 0.2
