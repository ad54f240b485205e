"""A checkpoint that cannot or must not be loaded is refused on all ranks in one line, and none of its code runs."""

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
from tests.checkpoint.runs import LLAMA, Run, callback, checkpoints_at, fit, train
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
FILES = (
    *("__0_0.distcp", "__0_1.distcp", "__0_2.distcp", "__0_3.distcp", "__1_0.distcp", "__1_1.distcp", "__1_2.distcp"),
    *("__1_3.distcp", ".metadata", "common.pt", "metadata.json", "rng_00000.pt", "rng_00001.pt", "meta.pt"),
    "checksums.json",
)
FLIPPED = {name: (damage.flipped_bit(name), f"ckpt is damaged: {re.escape(name)} ") for name in FILES}
"""Of each file of a checkpoint one bit."""
OTHER_RUNS: Mapping[str, tuple[dict[str, Any], str]] = {
    "heads": ({"model": {"n_head": 2}}, "num_attention_heads=4 there and 2 here"),
    "activation": ({"model": {"activation_function": "relu"}}, "activation=.* there and relu here"),
    "positions": ({"model": {"n_positions": 32}}, "does not fit this run, or is damaged: .*position_embeddings"),
    "family": ({"model": LLAMA}, "is of another model"),
    "sgd": ({"optimizer": {"name": "sgd"}}, "holds the state of another optimizer: algorithm adam there and sgd here"),
}
"""What differs from the run that saved, and what is said."""
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
    run_ranks(train, 2, RUN, path)
    return path


Outcomes = tuple[Path, list[dict[str, tuple[str, str]]]]


@pytest.fixture(scope="module")
def outcomes(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Where the spoiled copies are, and what each rank made of each, one after the other in the same processes."""
    folder = tmp_path_factory.mktemp("spoiled")
    for name, (spoil, _) in {**CASES, **FLIPPED}.items():
        shutil.copytree(intact, folder / f"{name}.ckpt")
        spoil(folder / f"{name}.ckpt")
        if name in CASES:  # as somebody would do who means harm
            damage.update_checksums(folder / f"{name}.ckpt")
    runs = {name: RUN.but(ckpt_path=str(folder / f"{name}.ckpt")) for name in (*CASES, *FLIPPED)}
    runs |= {name: RUN.but(ckpt_path=str(intact), **changes) for name, (changes, _) in OTHER_RUNS.items()}
    runs["intact"] = RUN.but(ckpt_path=str(intact), trainer={"max_steps": 2})
    return folder, run_ranks(_attempts, 2, runs)


@pytest.mark.parametrize("name", [*CASES, *FLIPPED, *OTHER_RUNS])
def test_what_cannot_or_must_not_be_loaded_is_refused_alike_on_all_ranks(outcomes: Outcomes, name: str) -> None:
    folder, of_ranks = outcomes
    path, (_, says) = folder / f"{name}.ckpt", {**CASES, **FLIPPED, **OTHER_RUNS}[name]
    for rank, outcome in enumerate(of_ranks):
        kind, message = outcome[name]
        assert kind == "CheckpointError", f"rank {rank}: {kind}: {message}"
        assert re.search(says, message), message
        assert name in OTHER_RUNS or str(path) in message
        assert "\n" not in message
        assert not re.search(r"\bweights_only", message)  # as torch would advise
    assert len({re.sub(r" \(on rank \d\)", "", outcome[name][1]) for outcome in of_ranks}) == 1
    assert not damage.marker_of(path).exists(), "code of the checkpoint has run"


def test_the_intact_checkpoint_loads_in_the_same_processes_afterwards(outcomes: Outcomes, intact: Path) -> None:
    assert [outcome["intact"] for outcome in outcomes[1]] == [("", "")] * 2
    names = {each.name for each in intact.iterdir()}
    assert names == FLIPPED.keys()
    assert json.loads((intact / "checksums.json").read_text())["files"].keys() == names - {"checksums.json"}


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
    damage.update_checksums(meta.parent)
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
