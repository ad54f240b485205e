"""Is a checkpoint that cannot or must not be loaded refused on all ranks in one line, without running its code?"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.engine.checkpoint_checksums import write_checksums
from tests.checkpoint import damage
from tests.checkpoint.runs import LLAMA, Run, fit
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

CASES: Mapping[str, tuple[damage.Damage, str]] = {
    "meta missing": (damage.missing("meta.pt"), "has no meta.pt: it was never finished, or another program wrote it"),
    "meta cut": (damage.cut_in_half("meta.pt"), "meta.pt is damaged"),
    "meta empty": (damage.empty("meta.pt"), "meta.pt is damaged"),
    "meta malicious": (
        damage.malicious_torch_file("meta.pt"),
        r"meta.pt is not loaded: it holds more than data \(posix.mkdir\)",
    ),
    "meta a malicious pickle": (damage.malicious_pickle("meta.pt"), "meta.pt is not loaded: it holds more than data"),
    "meta of another version": (damage.other_version, "has the format version 99, and this program reads 1"),
    "meta of another strategy": (damage.another_strategys_meta, "was written by another strategy"),
    "common missing": (damage.missing("common.pt"), "lacks its file common.pt: it is damaged"),
    "common cut": (damage.cut_in_half("common.pt"), "common.pt is damaged"),
    "common malicious": (
        damage.malicious_torch_file("common.pt"),
        r"common.pt is not loaded: it holds more than data \(posix.mkdir\)",
    ),
    "table missing": (damage.missing(".metadata"), "lacks its file .metadata: it is damaged"),
    "table cut": (damage.cut_in_half(".metadata"), "has an unreadable .metadata"),
    "table empty": (damage.empty(".metadata"), "has an unreadable .metadata"),
    "table a malicious pickle": (damage.malicious_pickle(".metadata"), "it would run posix.mkdir when loaded"),
    "table malicious": (damage.malicious_table_of_contents, "it would run posix.mkdir when loaded"),
    "table pointing outside": (damage.pointing_outside, "points outside itself"),
    "table without a tensor": (damage.without_tensor, "does not fit this run, or is damaged: .*final_layernorm.weight"),
    "backends missing": (damage.missing("metadata.json"), "lacks its file metadata.json: it is damaged"),
    "backends cut": (damage.cut_in_half("metadata.json"), "has an unreadable metadata.json"),
    "backends empty": (damage.empty("metadata.json"), "has an unreadable metadata.json"),
    "backends of another format": (damage.other_backend, "'sharded_backend': 'zarr'.* and this program reads"),
    "data missing": (damage.missing("__1_0.distcp"), "lacks its file __1_0.distcp: it is damaged"),
    "data cut": (damage.cut_in_half("__1_0.distcp"), r"__1_0.distcp has \d+ bytes and must have \d+"),
    "data with a malicious entry": (
        damage.malicious_entry,
        r"is damaged: its entry .*_extra_state\S+: it holds more than data \(posix.mkdir\)",
    ),
    "data with a malicious tensor": (
        damage.malicious_tensor,
        r"is damaged: it holds more than data \(posix.mkdir\)",
    ),
    "random states missing": (damage.missing("rng_00001.pt"), "rng_00001.pt is missing"),
    "random states cut": (damage.cut_in_half("rng_00001.pt"), "rng_00001.pt is damaged"),
    "random states malicious": (
        damage.malicious_torch_file("rng_00001.pt"),
        r"rng_00001.pt is not loaded: it holds more than data \(posix.mkdir\)",
    ),
    "checkpoint of FSDP": (damage.fsdp_checkpoint, "lacks its file metadata.json: .* or another strategy wrote it"),
}
RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 1})


def _train_and_save(run: Run, path: Path) -> None:
    trainer, _ = fit(run)
    trainer.save_checkpoint(path)


def _attempts(run: Run, paths: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    """For each path the kind and the text of what resuming from it raises."""
    return {name: _attempt(run.but(ckpt_path=str(path))) for name, path in paths.items()}


def _attempt(run: Run) -> tuple[str, str]:
    try:
        fit(run)
    except BaseException as error:  # torch's are no Exceptions
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "a.ckpt"
    run_ranks(_train_and_save, 2, RUN, path)
    return path


@pytest.fixture(scope="module")
def outcomes(
    intact: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], list[dict[str, tuple[str, str]]]]:
    """Where the spoiled copies are, and what each rank made of each, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("spoiled")
    paths = {}
    for name, (spoil, _) in CASES.items():
        paths[name] = folder / f"{name.replace(' ', '_')}.ckpt"
        shutil.copytree(intact, paths[name])
        spoil(paths[name])
        # As somebody would do who means harm; test_checksums.py is about those who do not.
        write_checksums(paths[name])
    run = RUN.but(trainer={"max_steps": 2})
    return paths, run_ranks(_attempts, 2, run, {**paths, "intact": intact})


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_checkpoint_is_refused_alike_on_all_ranks(
    outcomes: tuple[dict[str, Path], list[dict[str, tuple[str, str]]]], name: str
) -> None:
    paths, of_ranks = outcomes
    messages = set()
    for rank, outcome in enumerate(of_ranks):
        kind, message = outcome[name]
        assert kind == "CheckpointError", f"rank {rank}: {kind}: {message}"
        assert re.search(CASES[name][1], message), message
        assert str(paths[name]) in message
        assert "\n" not in message
        assert "weights_only" not in message
        messages.add(re.sub(r" \(on rank \d\)", "", message))
    assert len(messages) == 1
    assert not damage.marker_of(paths[name]).exists(), "code of the checkpoint has run"


def test_the_intact_checkpoint_loads_in_the_same_processes_afterwards(
    outcomes: tuple[dict[str, Path], list[dict[str, tuple[str, str]]]],
) -> None:
    assert [outcome["intact"] for outcome in outcomes[1]] == [("", "")] * 2


@pytest.mark.parametrize("malicious", [damage.malicious_pickle, damage.malicious_torch_file])
def test_the_malicious_files_of_these_tests_would_really_run_code(tmp_path: Path, malicious: Any) -> None:
    malicious("file")(tmp_path)
    with contextlib.suppress(RuntimeError):  # it is no torch file, which torch notices too late
        torch.load(tmp_path / "file", weights_only=False)
    assert damage.marker_of(tmp_path).exists()


def test_the_malicious_entry_of_these_tests_would_really_run_code(tmp_path: Path, intact: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path = tmp_path / "a.ckpt"
    shutil.copytree(intact, path)
    damage.malicious_entry(path)
    entries: dict[str, Any] = {
        name: None for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata if "_extra" in name
    }
    dcp.load(entries, checkpoint_id=path, no_dist=True)
    assert damage.marker_of(path).exists()


def _resume(run: Run) -> tuple[str, str]:
    return _attempt(run)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist; give the path of a *.ckpt directory"),
        (lambda path: torch.save({"state_dict": {}}, path), "is a file, not a directory that this strategy wrote"),
        (lambda path: (path / "weights").mkdir(parents=True), "has no meta.pt"),
    ],
    ids=["nothing", "torch file", "foreign folder"],
)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "a.ckpt"
    make(path)

    for kind, text in run_ranks(_resume, 2, RUN.but(ckpt_path=str(path))):
        assert kind == "CheckpointError"
        assert message in text


OTHER_RUNS: Mapping[str, tuple[dict[str, Any], str]] = {
    "wider": ({"model": {"n_embd": 64}}, "is of another model: hidden_size=32 there and 64 here"),
    "vocabulary": ({"model": {"vocab_size": 101}}, "vocab_size=100 there and 101 here"),
    "deeper": ({"model": {"n_layer": 8}}, "num_layers=4 there and 8 here"),
    "heads": ({"model": {"n_head": 2}}, "num_attention_heads=4 there and 2 here"),
    "activation": ({"model": {"activation_function": "relu"}}, "activation=.* there and relu here"),
    "untied": ({"model": {"tie_word_embeddings": False}}, "share_embeddings_and_output_weights=True there and False"),
    "positions": ({"model": {"n_positions": 32}}, "does not fit this run, or is damaged: .*position_embeddings"),
    "family": ({"model": LLAMA}, "is of another model"),
    "sgd": ({"optimizer": {"name": "sgd"}}, "holds the state of another optimizer: algorithm adam there and sgd here"),
}


def _resume_others(runs: Mapping[str, Run]) -> dict[str, tuple[str, str]]:
    return {name: _attempt(run) for name, run in runs.items()}


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(intact: Path) -> None:
    runs = {name: RUN.but(ckpt_path=str(intact), **changes) for name, (changes, _) in OTHER_RUNS.items()}

    for outcome in run_ranks(_resume_others, 2, runs):
        for name, (kind, text) in outcome.items():
            assert kind == "CheckpointError", f"{name}: {kind}: {text}"
            assert re.search(OTHER_RUNS[name][1], text), text
