"""README, CONTRIBUTING and the tables of docs/: every block of code is executed or parsed, every link exists."""

from __future__ import annotations

import ast
import gzip
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.commands import TRAINER_COMMANDS, _parser
from tests.cli.command import instantiate
from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.pages import blocks, commands, execute, token_loader
from tests.ranks import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
SHOWN = [*commands("README.md"), *commands("CONTRIBUTING.md")]


def _global_step(folder: str) -> int:
    """Run the Python of the README with a small model, over a small dataset."""
    import torch

    vocabulary = f'"vocab_size": {VOCAB_SIZE}'
    smaller = {
        '"n_layer": 12, "n_embd": 768, "n_head": 12': f'"n_layer": 2, "n_embd": 16, "n_head": 2, {vocabulary}',
        "seq_length=1024, micro_batch_size=4": "seq_length=16, micro_batch_size=1, split='80,20,0'",
        "max_steps=1000": "max_steps=2, limit_val_batches=1, enable_progress_bar=False, logger=False",
    }
    trainer = execute("README.md", 0, folder, smaller, __name__="__main__")["trainer"]
    assert torch.distributed.get_world_size() == 4
    return int(trainer.global_step)


def test_the_python_of_the_readme_trains(tmp_path: Path) -> None:
    make_corpus(tmp_path)
    assert run_ranks(_global_step, 4, str(tmp_path)) == [2] * 4


def _finetuned(folder: str) -> bool:
    """Run the README's lines about Hugging Face weights on two ranks; whether the weights have moved."""
    import torch
    from lightning.pytorch import Trainer
    from transformers import AutoModelForCausalLM

    from lightning_megatron import MegatronModule, MegatronStrategy

    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2), max_steps=1, **options)
    given = {"MegatronModule": MegatronModule, "trainer": trainer, "loader": token_loader()}
    execute("README.md", 1, folder, {}, **given)
    before, after = (AutoModelForCausalLM.from_pretrained(name) for name in ("path/to/llama", "tuned"))
    return not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_the_readme_goes_from_hugging_face_weights_and_back(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "path/to/llama")
    assert len(blocks("README.md", "python")) == 2
    assert run_ranks(_finetuned, 2, str(tmp_path)) == [True, True]


def test_the_python_of_contributing_is_the_rank_pool_as_it_is() -> None:
    (code,) = blocks("CONTRIBUTING.md", "python")
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    assert names == {"_world_size", "test_every_rank_sees_the_others"}
    assert "from tests.ranks import run_ranks" in code


def _instantiated(folder: str) -> tuple[int, str]:
    cli = instantiate(folder, "--config", "shown.yaml", "--trainer.logger", "false")
    return cli.trainer.strategy.num_microbatches, type(cli.datamodule).__name__


def test_the_yaml_of_the_readme_can_be_instantiated(tmp_path: Path) -> None:
    (text,) = blocks("README.md", "yaml")
    (tmp_path / "model.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "shown.yaml").write_text(text.replace("path/to/config.json", "model.json"))
    expected = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]["num_microbatches"]
    assert run_ranks(_instantiated, 1, str(tmp_path)) == [(expected, "IndexedDataModule")]


@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_every_shell_command_exists(command: list[str]) -> None:
    program, *arguments = command
    if program == "lightning-megatron":
        if arguments[0] in TRAINER_COMMANDS:
            assert (ROOT / arguments[arguments.index("--config") + 1]).exists()
        else:
            parser, _ = _parser()
            parser.parse_args(arguments)
    elif "nox" in arguments and "-s" in arguments:
        session = arguments[arguments.index("-s") + 1]
        assert f"\ndef {session}(session" in (ROOT / "noxfile.py").read_text()
    else:
        assert "install" in arguments, command
        assert program == "pip" or command[1:3] == ["-m", "pip"], command


def test_the_quickstart_does_what_the_readme_says() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    for command in commands("README.md"):
        if command[0] == "lightning-megatron" and command[1] != "doctor":
            for word in command[1:]:
                assert word in noxfile or word.isupper(), f"{word} of the README is not in the noxfile"


def test_the_text_of_the_quickstart_is_the_one_that_is_described() -> None:
    packed = (ROOT / "examples/data/shakespeare.jsonl.gz").read_bytes()
    text, facts = gzip.decompress(packed), (ROOT / "examples/data/README.md").read_text()
    documents = text.count(b"\n")
    sizes = (f"{len(packed):,} bytes", f"{len(text):,} unpacked", f"| {documents:,} |")
    assert all(fact in facts for fact in (hashlib.sha256(packed).hexdigest(), *sizes))


def test_the_readme_is_short_and_its_links_exist() -> None:
    assert len(README.splitlines()) <= 130
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tree_of_contributing_names_what_there_is() -> None:
    tree = CONTRIBUTING.split("## The source tree")[1]
    for folder in (ROOT / "lightning_megatron").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert re.search(rf"\n  {folder.name}(/|\.py) ", tree), folder.name
