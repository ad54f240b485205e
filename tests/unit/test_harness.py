"""Options of evaluation by lm_eval, and what is read of task YAMLs; without lm_eval, which is an extra."""

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.harness import _SUPPORTED, HarnessOptions, require_lm_eval
from lightning_megatron.harness.evaluation import metrics_of
from lightning_megatron.harness.offline import offline
from lightning_megatron.harness.task_files import check_addresses, is_task_path, read_task_file
from tests.cli.command import run_all
from tests.ranks import ROOT

# ---- options --------------------------------------------------------------------------------------------------------


def test_tasks_are_separated_by_spaces_or_commas() -> None:
    assert HarnessOptions(tasks=["a,b", " c "]).task_names == ["a", "b", "c"]
    assert HarnessOptions(tasks="a, b").task_names == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": [","]}, "tasks: expected a name or path, got none"),
        ({"num_fewshot": -1}, "num_fewshot=-1 must be at least 0"),
        ({"limit": 0}, "limit=0 must be above 0; leave it out"),
        ({"limit": -1.0}, "limit=-1.0 must be at least 0"),
        ({"bootstrap_iters": -1}, "bootstrap_iters=-1 must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"fewshot_as_multiturn": True}, "fewshot_as_multiturn=True is for chats"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HarnessOptions(**{"tasks": ["a"], **options})


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            None,
            r"lm_eval: expected a version from 0.4.12 to below 0.5, got none; run `pip install 'lightning-meg",
        ),
        ("0.4.11", "expected a version from 0.4.12 to below 0.5, got 0.4.11"),
        ("0.5.0", "got 0.5.0"),
        ("0.4.12", None),
        ("0.4.13.dev1", None),
    ],
)
def test_the_version_of_lm_eval_is_checked(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    message: str | None,
) -> None:
    def installed(name: str) -> str:
        assert name == "lm_eval"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    if message is None:
        require_lm_eval()
        return
    with pytest.raises(ConfigError, match=message):
        require_lm_eval()


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, end = (".".join(map(str, version)) for version in _SUPPORTED)
    assert project["optional-dependencies"]["eval"] == [f"lm_eval>={first},<{end}"]


def test_wrong_arguments_of_the_command_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "there.md").touch()
    command = ["evaluate", "--checkpoint", tmp_path, "--tasks", "a"]
    cases: dict[str, list[Any]] = {
        "--log-samples: expected JSON to add them to": ["--log-samples"],
        "there.md exists; give another file": ["--output", tmp_path / "there.md"],
        "x.csv: expected a name that ends with .json or .md": ["--output", "x.csv"],
        "--batch-size 0 must be at least 1": ["--batch-size", 0],
        "--dp 0 must be at least 1": ["--dp", 0],
        "--max-length 0 must be at least 1": ["--max-length", 0],
        "--limit 0 must be above 0": ["--limit", 0],
    }
    results = run_all(tmp_path, [[*command, *more] for more in cases.values()])
    for message, (code, out, err) in zip(cases, results, strict=True):
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


# ---- task files -----------------------------------------------------------------------------------------------------


def test_functions_of_a_task_and_its_includes_are_found_without_running_them(
    tmp_path: Path,
) -> None:
    shipped = tmp_path / "shipped"
    (shipped / "sub").mkdir(parents=True)
    (shipped / "base.yaml").write_text("doc_to_text: !function utils.text\nnum_fewshot: 2\n")
    (shipped / "sub" / "own.yaml").write_text("task: own\ninclude: ../base.yaml\n")
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ninclude: [shipped/base.yaml]\nnum_fewshot: 1\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "code.yaml").write_text("task: c\nprocess_docs: !function os.system\n")
    (tmp_path / "metric.yaml").write_text(
        "task: m\nmetric_list: [{metric: acc, hf_evaluate: true}]\n"
    )
    mine = read_task_file(tmp_path / "mine.yaml")
    assert mine.config["num_fewshot"] == 1
    assert mine.config["task"] == "mine"
    for name in ("mine.yaml", "shipped/sub/own.yaml"):
        read_task_file(tmp_path / name).check_trusted(shipped, ["acc"])
    for name, message in (
        ("code.yaml", "code.yaml names code, !function os.system; read it, and give --trust-task"),
        ("metric.yaml", "metric acc is none of lm_eval's"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_task_file(tmp_path / name).check_trusted(shipped, ["acc"])
    with pytest.raises(ConfigError, match="metric acc is none"):
        mine.check_trusted(shipped, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: a.yaml\n", "includes .*a.yaml, which includes it again"),
        ("- 1\n", "expected a mapping, got a list"),
        (
            "x: !python/name:os.system\n",
            "cannot be read as YAML: could not determine a constructor",
        ),
        ("x: [\n", "cannot be read as YAML"),
        (None, "cannot be read: No such file"),
        (f"x: 1{':1' * 500_000}\n", "task .*a.yaml: expected numbers of at most 1,000 characters"),
        (f"x: &a [{'1,' * 999}1]\ny: [{'*a,' * 999}1]\n", "task .*: expected at most 100,000"),
        ("x: !!timestamp soon\n", "task .*: expected values of the types that their tags"),
        ("include: /dev/zero\n", "task /dev/zero: expected a YAML file, got none"),
    ],
)
def test_damaged_task_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_task_file(tmp_path / "a.yaml")


def test_addresses_of_datasets_are_refused() -> None:
    local = {"data_files": {"test": ["a.json", "/b/c.json"]}, "num_proc": 2}
    check_addresses("task: dataset_kwargs", local)
    remote = {"data_files": {"test": ["a.json", "zip://x::https://host/y.zip"]}}
    with pytest.raises(
        ConfigError, match="task: dataset_kwargs: expected data on this disk, got zip"
    ):
        check_addresses("task: dataset_kwargs", remote)
    again: list[Any] = ["x"]
    for _ in range(99):
        again = [again, again]
    again.append(again)
    check_addresses("task: dataset_kwargs", again)
    assert is_task_path("a/b.yaml")
    assert not is_task_path("mmlu")


def test_hugging_face_is_offline_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with offline():
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
        if "datasets.config" in sys.modules:
            assert sys.modules["datasets.config"].HF_HUB_OFFLINE
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert "HF_HUB_OFFLINE" not in os.environ


def test_metrics_are_named_by_task_metric_and_filter() -> None:
    results = {
        "results": {
            "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 3},
            "two": {"exact_match,strict-match": 1, "f1,none": "N/A"},
        },
        "groups": {"all": {"acc,none": 0.75}},
    }
    assert metrics_of(results) == {
        "one/acc": 0.5,
        "two/exact_match_strict-match": 1.0,
        "all/acc": 0.75,
    }
