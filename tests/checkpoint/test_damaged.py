"""A checkpoint that cannot or must not be loaded is refused on all ranks in one line, and none of its code runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import damage
from tests.checkpoint.runs import LLAMA, Run, callback, checkpoints_at, fit, train_and_save
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

NO_DATA = r"is not loaded: it holds more than data \(posix.mkdir\)"
UNFIT = "does not fit this run, or is damaged: "
CASES: Mapping[str, tuple[damage.Damage, str]] = {
    "meta missing": (damage.missing("meta.pt"), "lacks its file meta.pt: it was never finished"),
    "meta malicious": (damage.malicious_torch_file("meta.pt"), f"meta.pt {NO_DATA}"),
    "meta a malicious pickle": (damage.malicious_pickle("meta.pt"), "meta.pt is damaged, or no file of torch.save"),
    "meta of another version": (damage.other_version, "format version 99, this program reads 1"),
    "meta of another strategy": (damage.another_strategys_meta, "was written by another strategy"),
    "common malicious": (damage.malicious_torch_file("common.pt"), f"common.pt {NO_DATA}"),
    "table cut": (damage.cut_in_half(".metadata"), "has an unreadable .metadata"),
    "table a malicious pickle": (damage.malicious_pickle(".metadata"), "it would run posix.mkdir when loaded"),
    "table malicious": (damage.malicious_table_of_contents, "it would run posix.mkdir when loaded"),
    "table pointing outside": (damage.pointing_outside, "it points outside itself, to '../other.ckpt/__0_0.distcp'"),
    "table without a tensor": (damage.without_tensor, f"{UNFIT}.*final_layernorm.weight"),
    "backends cut": (damage.cut_in_half("metadata.json"), "has an unreadable metadata.json"),
    "data missing": (damage.missing("__1_0.distcp"), f"{UNFIT}.*No such file.*__1_0.distcp"),
    "data cut": (damage.cut_in_half("__1_0.distcp"), f"{UNFIT}EOFError"),
    "malicious entry": (damage.malicious_data("_extra_state"), rf"is damaged: its entry .*_extra_state\S+ {NO_DATA}"),
    "malicious tensor": (damage.malicious_data("final_layernorm.weight"), f"is damaged: {NO_DATA.partition(': ')[2]}"),
    "random states missing": (damage.missing("rng_00001.pt"), "lacks its file rng_00001.pt"),
    "random states malicious": (damage.malicious_torch_file("rng_00001.pt"), f"rng_00001.pt {NO_DATA}"),
    "checkpoint of FSDP": (damage.fsdp_checkpoint, "lacks its file metadata.json: .* or another program wrote it"),
}
RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 1})


def _attempts(runs: Mapping[str, Run]) -> dict[str, tuple[str, str]]:
    """The kind and the text of what each run raises."""
    return {name: _attempt(run) for name, run in runs.items()}


def _attempt(run: Run) -> tuple[str, str]:
    try:
        fit(run)
    except BaseException as error:  # torch's are no Exceptions
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "a.ckpt"
    run_ranks(train_and_save, 2, RUN, path)
    return path


Outcomes = tuple[dict[str, Path], list[dict[str, tuple[str, str]]]]


@pytest.fixture(scope="module")
def outcomes(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Where the spoiled copies are, and what each rank made of each, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("spoiled")
    paths = {}
    for name, (spoil, _) in CASES.items():
        paths[name] = folder / f"{name.replace(' ', '_')}.ckpt"
        shutil.copytree(intact, paths[name])
        spoil(paths[name])
        # As somebody would do who means harm; test_files.py is about those who do not.
        damage.sum_up(paths[name])
    run = RUN.but(trainer={"max_steps": 2})
    runs = {name: run.but(ckpt_path=str(path)) for name, path in {**paths, "intact": intact}.items()}
    return paths, run_ranks(_attempts, 2, runs)


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_checkpoint_is_refused_alike_on_all_ranks(outcomes: Outcomes, name: str) -> None:
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


def test_the_intact_checkpoint_loads_in_the_same_processes_afterwards(outcomes: Outcomes) -> None:
    assert [outcome["intact"] for outcome in outcomes[1]] == [("", "")] * 2


def test_a_flipped_bit_in_any_file_is_refused_alike_on_all_ranks(intact: Path, tmp_path: Path) -> None:
    names = sorted(each.name for each in intact.iterdir())
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "rng_00001.pt", "meta.pt", "checksums.json"} <= set(names)
    assert json.loads((intact / "checksums.json").read_text())["files"].keys() == {*names} - {"checksums.json"}
    paths = {name: tmp_path / f"{name.strip('.')}.ckpt" for name in names}
    for name, path in paths.items():
        shutil.copytree(intact, path)
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 16
        (path / name).write_bytes(data)
    shutil.copytree(intact, tmp_path / "stripped.ckpt")
    (tmp_path / "stripped.ckpt" / "checksums.json").unlink()
    runs = {path.name: RUN.but(ckpt_path=str(path)) for path in tmp_path.iterdir()}

    first, second = run_ranks(_attempts, 2, runs)

    for name, path in paths.items():
        assert first[path.name][1].startswith(f"checkpoint {path} is damaged: {name} ")
        assert first[path.name][1].removesuffix(" (on rank 1)") == second[path.name][1].removesuffix(" (on rank 0)")
    assert "lacks its file checksums.json" in first["stripped.ckpt"][1]
    assert first["stripped.ckpt"] == second["stripped.ckpt"]


def _resume_from_what_is_exchanged(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Somebody waits until a file is checked and puts another in its place, and torch is told to be careless."""
    import torch.distributed as dist

    from lightning_megatron.checkpoint import load

    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    read_meta = load.read_meta

    def read_and_exchange(checked: Path) -> dict[str, Any]:
        meta = read_meta(checked)
        if dist.get_rank() == 0:
            spoil = damage.malicious_pickle if checked.stem == ".metadata" else damage.malicious_torch_file
            spoil(checked.stem)(checked)
        dist.barrier()
        return meta

    load.read_meta = read_and_exchange
    return [_attempt(run.but(ckpt_path=str(path))) for path in sorted(folder.iterdir())]


def test_what_is_exchanged_after_the_check_runs_no_code(tmp_path: Path, intact: Path) -> None:
    paths = [tmp_path / ".metadata.ckpt", tmp_path / "common.pt.ckpt"]
    for path in paths:
        shutil.copytree(intact, path)
    for outcomes in run_ranks(_resume_from_what_is_exchanged, 2, RUN, tmp_path):
        for kind, message in outcomes:
            assert kind == "CheckpointError", message
            assert re.search(r"is not loaded: it (holds more than data \(|would run )posix.mkdir", message), message
    assert sorted(tmp_path.iterdir()) == paths, "code has run"


def _go_on_with_paths_of_others(run: Run, folder: Path, named: Mapping[str, str], stops: bool) -> tuple[Any, list[str]]:
    """Resume from a checkpoint whose state of ``ModelCheckpoint`` names folders elsewhere; exit code and warnings."""
    stop = callback(on_train_batch_end=lambda *_: os.kill(os.getpid(), signal.SIGTERM) if stops else None)
    keeper = checkpoints_at(folder, save_top_k=1, save_last=True, every_n_train_steps=100 if stops else 1)
    meta = Path(str(run.ckpt_path)) / "meta.pt"
    state = torch.load(meta, weights_only=True)
    state["lightning"]["callbacks"] = {keeper.state_key: {"best_model_score": None, **named}}  # and no dirpath
    torch.save(state, meta)
    damage.sum_up(meta.parent)
    code = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            fit(run, keeper, stop)
        except SystemExit as ended:
            code = ended.code
    return code, [text for each in caught if "it is no complete checkpoint within" in (text := str(each.message))]


@pytest.mark.parametrize("stops", [False, True], ids=["next save", "SIGTERM"])
def test_a_loaded_state_does_not_lead_out_of_the_folder_of_checkpoints(
    tmp_path: Path, intact: Path, stops: bool
) -> None:
    folder, documents, others = tmp_path / "checkpoints", tmp_path / "documents", tmp_path / "others.ckpt"
    for path in (tmp_path / "a.ckpt", others):
        shutil.copytree(intact, path)
    documents.mkdir()
    (documents / "thesis.txt").touch()
    before = {path: path.stat().st_mtime_ns for path in [*documents.iterdir(), *others.iterdir()]}
    named = {"best_model_path": f"{folder}/../others.ckpt", "last_model_path": f"{folder}/../documents"}
    if stops:
        named["last_model_path"] = named["best_model_path"]
    run = RUN.but(strategy={"tp": 1}, trainer={"max_steps": 4}, ckpt_path=str(tmp_path / "a.ckpt"))

    ((code, texts),) = run_ranks(_go_on_with_paths_of_others, 1, run, folder, named, stops)

    assert {path: path.stat().st_mtime_ns for path in [*documents.iterdir(), *others.iterdir()]} == before
    assert code == (143 if stops else None)
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt"] + ["step=4.ckpt"] * (not stops)
    assert len(texts) == (0 if stops else 2), texts  # each of both once


OTHER_RUNS: Mapping[str, tuple[dict[str, Any], str]] = {
    "heads": ({"model": {"n_head": 2}}, "num_attention_heads=4 there and 2 here"),
    "activation": ({"model": {"activation_function": "relu"}}, "activation=.* there and relu here"),
    "positions": ({"model": {"n_positions": 32}}, "does not fit this run, or is damaged: .*position_embeddings"),
    "family": ({"model": LLAMA}, "is of another model"),
    "sgd": ({"optimizer": {"name": "sgd"}}, "holds the state of another optimizer: algorithm adam there and sgd here"),
}


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(intact: Path) -> None:
    runs = {name: RUN.but(ckpt_path=str(intact), **changes) for name, (changes, _) in OTHER_RUNS.items()}

    for outcome in run_ranks(_attempts, 2, runs):
        for name, (kind, text) in outcome.items():
            assert kind == "CheckpointError", f"{name}: {kind}: {text}"
            assert re.search(OTHER_RUNS[name][1], text), text
