"""README, CONTRIBUTING and the tables of docs/: every block of code is executed or parsed, every link exists."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from lightning_megatron.cli.commands import TRAINER_COMMANDS, _parser
from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.ranks import ROOT, run_ranks

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _commands(text: str) -> list[list[str]]:
    """Every shell line of the document, without its comment."""
    lines = [line for block in _blocks(text, "bash") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


SHOWN = [*_commands(README), *_commands(CONTRIBUTING)]


def _run_code(code: str, folder: str, prefix: str) -> int:
    """Run the Python of the README with a small model, on one process, over a small dataset."""
    import os

    import torch

    os.chdir(folder)
    vocabulary = f'"vocab_size": {VOCAB_SIZE}'
    small = {
        '"n_layer": 12, "n_embd": 768, "n_head": 12': f'"n_layer": 2, "n_embd": 16, "n_head": 2, {vocabulary}',
        "corpus_text_document": prefix,
        "seq_length=1024, micro_batch_size=4": "seq_length=16, micro_batch_size=1, split='80,20,0'",
        "max_steps=1000": "max_steps=2, limit_val_batches=1, enable_progress_bar=False, logger=False",
    }
    for shown, smaller in small.items():
        assert shown in code, f"the README no longer shows {shown}"
        code = code.replace(shown, smaller)
    variables = {"__name__": "__main__"}
    exec(compile(code, "README.md", "exec"), variables)
    assert torch.distributed.get_world_size() == 4
    trainer = variables["trainer"]
    return int(trainer.global_step)  # type: ignore[attr-defined]


def _run_finetuning(code: str, folder: str) -> bool:
    """Run the README's lines about Hugging Face weights with a small Llama, on two ranks."""
    import os

    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from lightning_megatron import MegatronModule, MegatronStrategy

    os.chdir(folder)
    rows = [{name: torch.arange(8) for name in ("input_ids", "labels")} for _ in range(4)]
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=MegatronStrategy(tp=2), max_steps=1, **options)
    exec(
        compile(code, "README.md", "exec"),
        {"MegatronModule": MegatronModule, "trainer": trainer, "loader": DataLoader(rows, batch_size=4)},  # type: ignore[arg-type]
    )
    before, after = (AutoModelForCausalLM.from_pretrained(name) for name in ("path/to/llama", "tuned"))
    return not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_the_readme_goes_from_hugging_face_weights_and_back(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "path/to/llama")
    _, code = _blocks(README, "python")
    assert run_ranks(_run_finetuning, 2, code, str(tmp_path)) == [True, True]


def test_the_python_of_the_readme_trains(tmp_path: Path) -> None:
    code, _ = _blocks(README, "python")
    prefix = make_corpus(tmp_path)
    assert run_ranks(_run_code, 4, code, str(tmp_path), str(prefix)) == [2] * 4


def test_the_python_of_contributing_is_the_rank_pool_as_it_is() -> None:
    (code,) = _blocks(CONTRIBUTING, "python")
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    assert names == {"_world_size", "test_every_rank_sees_the_others"}
    assert "from tests.ranks import run_ranks" in code


def _parse_configuration(text: str, folder: str) -> tuple[int, str]:
    from pathlib import Path

    from lightning_megatron.cli.train import MegatronCLI

    path = Path(folder) / "model.json"
    path.write_text('{"model_type": "gpt2"}')
    shown = Path(folder) / "shown.yaml"
    shown.write_text(text.replace("path/to/config.json", str(path)))
    cli = MegatronCLI(
        args=["--config", str(shown), "--trainer.accelerator", "cpu", "--trainer.logger", "false"], run=False
    )
    return cli.trainer.strategy.num_microbatches, type(cli.datamodule).__name__


def test_the_yaml_of_the_readme_can_be_instantiated(tmp_path: Path) -> None:
    (text,) = _blocks(README, "yaml")
    expected = yaml.safe_load(text)["trainer"]["strategy"]["init_args"]["num_microbatches"]
    (made,) = run_ranks(_instantiate_outside_torchrun, 1, text, str(tmp_path))
    assert made == (expected, "IndexedDataModule")


def _instantiate_outside_torchrun(text: str, folder: str) -> tuple[int, str]:
    import os

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    return _parse_configuration(text, folder)


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
    for command in _commands(README):
        if command[0] == "lightning-megatron" and command[1] != "doctor":
            for word in command[1:]:
                assert word in noxfile or word.isupper(), f"{word} of the README is not in the noxfile"


def test_the_text_of_the_quickstart_is_the_one_that_is_described() -> None:
    import gzip
    import hashlib

    packed = (ROOT / "examples/data/shakespeare.jsonl.gz").read_bytes()
    text = gzip.decompress(packed)
    facts = (ROOT / "examples/data/README.md").read_text()
    for fact in (hashlib.sha256(packed).hexdigest(), f"{len(packed):,} bytes", f"{len(text):,} unpacked"):
        assert fact in facts
    documents = text.count(b"\n")
    assert f"| {documents:,} |" in facts


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
