"""Damaged, malicious and foreign checkpoints are refused on all ranks in one line, and none of their code runs."""

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import damage
from tests.checkpoint.runs import LLAMA, Run, callback, checkpoints_at, fit, train
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

NO_DATA = r"is not loaded: it holds more than data \(posix.mkdir\)"
UNFIT = "does not fit this run, or is damaged: "
CASES: Mapping[str, tuple[damage.Damage, str]] = {
    "meta missing": (damage.missing("meta.pt"), "lacks its file meta.pt: it was never finished"),
    "meta malicious": (damage.malicious_torch_file("meta.pt"), f"meta.pt {NO_DATA}"),
    "meta a malicious pickle": (
        damage.malicious_pickle("meta.pt"),
        "meta.pt is damaged, or no file of torch.save",
    ),
    "meta of another version": (damage.other_version, "format version 99, this program reads 1"),
    "meta of another strategy": (damage.fsdp_meta, "was written by another strategy"),
    "common malicious": (damage.malicious_torch_file("common.pt"), f"common.pt {NO_DATA}"),
    "table cut": (damage.truncated(".metadata"), "has an unreadable .metadata"),
    "table a malicious pickle": (
        damage.malicious_pickle(".metadata"),
        "it would run posix.mkdir when loaded",
    ),
    "table pointing outside": (
        damage.pointing_outside,
        "it points outside itself, to '../other.ckpt/__0_0.distcp'",
    ),
    "table without a tensor": (damage.without_tensor, f"{UNFIT}.*final_layernorm.weight"),
    "backends cut": (damage.truncated("metadata.json"), "has an unreadable metadata.json"),
    "data missing": (damage.missing("__1_0.distcp"), f"{UNFIT}.*No such file.*__1_0.distcp"),
    "data cut": (damage.truncated("__1_0.distcp"), f"{UNFIT}.* in __1_0.distcp is damaged"),
    "malicious entry": (
        damage.malicious_data("_extra_state"),
        rf"is damaged: its entry .*_extra_state\S+ {NO_DATA}",
    ),
    "malicious tensor": (
        damage.malicious_data("final_layernorm.weight"),
        f"is damaged: {NO_DATA.partition(': ')[2]}",
    ),
    "random states missing": (damage.missing("rng_00001.pt"), "lacks its file rng_00001.pt"),
    "random states malicious": (
        damage.malicious_torch_file("rng_00001.pt"),
        f"rng_00001.pt {NO_DATA}",
    ),
    "checkpoint of FSDP": (
        damage.fsdp_checkpoint,
        "lacks its file metadata.json: .* or another program wrote it",
    ),
}
FILES = (
    "__0_0.distcp",
    "__0_1.distcp",
    "__0_2.distcp",
    "__0_3.distcp",
    "__1_0.distcp",
    "__1_1.distcp",
    "__1_2.distcp",
    "__1_3.distcp",
    ".metadata",
    "common.pt",
    "metadata.json",
    "rng_00000.pt",
    "rng_00001.pt",
    "meta.pt",
    "checksums.json",
)
FLIPPED = {
    name: (damage.flipped_bit(name), f"ckpt is damaged: {re.escape(name)} ") for name in FILES
}
"""One flipped bit in each file of a checkpoint."""
# It is read before its checksum is known, and what is in its middle depends on the fields of a model.
FLIPPED["meta.pt"] = (
    damage.flipped_bit("meta.pt"),
    "ckpt is damaged: meta.pt |meta.pt is damaged, or no file of torch.save",
)
OTHER_RUNS: Mapping[str, tuple[dict[str, Any], str]] = {
    "heads": ({"model": {"n_head": 2}}, "num_attention_heads=4 there and 2 here"),
    "activation": ({"model": {"activation_function": "relu"}}, "activation=.* there and relu here"),
    "positions": (
        {"model": {"n_positions": 32}},
        "does not fit this run, or is damaged: .*position_embeddings",
    ),
    "family": ({"model": LLAMA}, "is of another model"),
    "sgd": (
        {"optimizer": {"name": "sgd"}},
        "holds the state of another optimizer: algorithm adam there and sgd here",
    ),
    "muon": (
        {"optimizer": {"name": "muon"}},
        "holds the state of another optimizer: algorithm adam there and muon here",
    ),
}
"""Changes to the run that saved, and the expected message."""
RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 1})


def _attempts(runs: Mapping[str, Run]) -> dict[str, tuple[str, str]]:
    """Type and text of the error that each run raises."""
    return {name: _attempt(run) for name, run in runs.items()}


def _attempt(run: Run) -> tuple[str, str]:
    try:
        fit(run)
    except BaseException as error:  # not all of torch's errors are Exceptions
        return type(error).__name__, str(error)
    return "", ""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "a.ckpt"
    run_ranks(train, 2, RUN, path)
    return path


Outcomes = tuple[Path, list[dict[str, tuple[str, str]]]]
"""Directory of the damaged checkpoints; by rank and name, type and text of the error."""


@pytest.fixture(scope="module")
def outcomes(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Resume from every damaged checkpoint in turn, in the same two processes."""
    folder = tmp_path_factory.mktemp("damaged")
    for name, (apply, _) in {**CASES, **FLIPPED}.items():
        shutil.copytree(intact, folder / f"{name}.ckpt")
        apply(folder / f"{name}.ckpt")
        if name in CASES:  # as an attacker would
            damage.update_checksums(folder / f"{name}.ckpt")
    run = RUN.but(ckpt_path=str(intact))
    runs = {name: RUN.but(ckpt_path=str(folder / f"{name}.ckpt")) for name in (*CASES, *FLIPPED)}
    runs |= {name: run.but(**changes) for name, (changes, _) in OTHER_RUNS.items()}
    runs["intact"] = run.but(trainer={"max_steps": 2})
    return folder, run_ranks(_attempts, 2, runs)


@pytest.mark.parametrize("name", [*CASES, *FLIPPED, *OTHER_RUNS])
def test_damaged_and_foreign_checkpoints_are_refused_on_every_rank(
    outcomes: Outcomes, name: str
) -> None:
    folder, by_rank = outcomes
    path = folder / f"{name}.ckpt"
    _, expected = {**CASES, **FLIPPED, **OTHER_RUNS}[name]
    for rank, outcome in enumerate(by_rank):
        kind, message = outcome[name]
        assert kind == "CheckpointError", f"rank {rank}: {kind}: {message}"
        assert re.search(expected, message), message
        assert name in OTHER_RUNS or str(path) in message
        assert "\n" not in message
        assert not re.search(r"\bweights_only", message)  # torch's advice to disable it
    assert len({re.sub(r" \(on rank \d\)", "", outcome[name][1]) for outcome in by_rank}) == 1
    assert not damage.marker_path(path).exists(), "code of the checkpoint has run"


def test_intact_checkpoint_loads_after_the_refusals(outcomes: Outcomes, intact: Path) -> None:
    assert [outcome["intact"] for outcome in outcomes[1]] == [("", "")] * 2
    names = {file.name for file in intact.iterdir()}
    assert names == FLIPPED.keys()
    checksums = json.loads((intact / "checksums.json").read_text())
    assert checksums["files"].keys() == names - {"checksums.json"}


def _resume_with_swapped_files(run: Run, folder: Path) -> list[tuple[str, str]]:
    """Replace a file after its checksum was verified, while torch is told to unpickle anything."""
    import torch.distributed as dist

    from lightning_megatron.checkpoint import load

    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    read_meta = load.read_meta

    def read_and_swap(path: Path) -> dict[str, Any]:
        meta = read_meta(path)
        if dist.get_rank() == 0:
            make = damage.malicious_torch_file
            if path.stem == ".metadata":
                make = damage.malicious_pickle
            make(path.stem)(path)
        dist.barrier()
        return meta

    load.read_meta = read_and_swap
    return [_attempt(run.but(ckpt_path=str(path))) for path in sorted(folder.iterdir())]


def test_files_swapped_after_verification_run_no_code(tmp_path: Path, intact: Path) -> None:
    paths = [tmp_path / ".metadata.ckpt", tmp_path / "common.pt.ckpt"]
    for path in paths:
        shutil.copytree(intact, path)
    expected = r"is not loaded: it (holds more than data \(|would run )posix.mkdir"
    for outcomes in run_ranks(_resume_with_swapped_files, 2, RUN, tmp_path):
        for kind, message in outcomes:
            assert kind == "CheckpointError", message
            assert re.search(expected, message), message
    assert sorted(tmp_path.iterdir()) == paths, "code has run"


def _times(*folders: Path) -> dict[Path, int]:
    """When each file of the folders was changed last."""
    return {file: file.stat().st_mtime_ns for folder in folders for file in folder.iterdir()}


def _resume_with_foreign_paths(
    run: Run, folder: Path, paths: Mapping[str, str], stops: bool
) -> tuple[Any, list[str]]:
    """Resume with a ``ModelCheckpoint`` state that names ``paths`` elsewhere; return exit code and warnings."""

    def stop(*_: Any) -> None:
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)

    keeper = checkpoints_at(
        folder,
        save_top_k=1,
        save_last=True,
        every_n_train_steps=100 if stops else 1,
    )
    meta = Path(str(run.ckpt_path)) / "meta.pt"
    state = torch.load(meta, weights_only=True)
    # And no dirpath.
    state["lightning"]["callbacks"] = {keeper.state_key: {"best_model_score": None, **paths}}
    torch.save(state, meta)
    damage.update_checksums(meta.parent)
    code = None
    with recorded_warnings("it is no complete checkpoint within") as texts:
        try:
            fit(run, keeper, callback(on_train_batch_end=stop))
        except SystemExit as ended:
            code = ended.code
    return code, texts


@pytest.mark.parametrize(
    "stops",
    [False, True],
    ids=["next save", "SIGTERM"],
)
def test_callback_state_cannot_touch_files_outside_the_checkpoint_directory(
    tmp_path: Path, intact: Path, stops: bool
) -> None:
    folder = tmp_path / "checkpoints"
    documents = tmp_path / "documents"
    others = tmp_path / "others.ckpt"
    for path in (tmp_path / "a.ckpt", others):
        shutil.copytree(intact, path)
    documents.mkdir()
    (documents / "thesis.txt").touch()
    before = _times(documents, others)
    paths = {
        "best_model_path": f"{folder}/../others.ckpt",
        "last_model_path": f"{folder}/../documents",
    }
    if stops:
        paths["last_model_path"] = paths["best_model_path"]
    run = RUN.but(
        strategy={"tp": 1},
        trainer={"max_steps": 4},
        ckpt_path=str(tmp_path / "a.ckpt"),
    )

    ((code, texts),) = run_ranks(
        _resume_with_foreign_paths,
        1,
        run,
        folder,
        paths,
        stops,
    )

    assert _times(documents, others) == before
    assert code == (143 if stops else None)
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt"] + ["step=4.ckpt"] * (
        not stops
    )
    assert len(texts) == (0 if stops else 2), texts  # one for each path
