"""Hugging Face hub: models are resolved from the cache or downloaded once, and pushed; errors say how to get them."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from lightning_megatron import MegatronModule
from lightning_megatron.checkpoint.find import find_newest
from lightning_megatron.cli import main
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.storage.hub import local_folder
from tests.convert.directories import save_as, tiny_gpt2
from tests.parity.training import (
    TP2,
    Case,
    common_result,
    loader_of,
    module_of,
    refusal,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.tokenizers import make_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty hub cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def _add_to_cache(
    cache: Path,
    repo: str,
    source: Path,
    branch: str = "main",
    commit: str = COMMIT,
) -> Path:
    """Add the files of ``source`` in the layout of the hub cache: links to blobs. Return the snapshot directory."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    for file in source.iterdir():
        blob = folder / "blobs" / f"{commit}-{file.name}"
        shutil.copyfile(file, blob)
        (folder / "snapshots" / commit / file.name).symlink_to(blob)
    return folder / "snapshots" / commit


def test_cached_model_and_tokenizer_are_loaded_and_converted(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_as(tiny_gpt2(vocab_size=300), tmp_path / "model", "sharded_safetensors")
    make_tokenizer(tmp_path / "model")
    snapshot = _add_to_cache(cache, "org/gpt", tmp_path / "model")
    other = "f" * 40
    changed = json.loads((tmp_path / "model" / "config.json").read_text()) | {"n_layer": 1}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(changed))
    _add_to_cache(cache, "org/gpt", tmp_path / "other", "small", other)

    assert MegatronModule(model="org/gpt", pretrained=True).pretrained_path == snapshot
    assert MegatronModule(model="org/gpt@small").model_config.num_layers == 1
    assert load_tokenizer("org/gpt").get_vocab() == load_tokenizer(tmp_path / "model").get_vocab()
    convert = [
        "convert",
        "--load-path",
        "org/gpt",
        "--save-path",
        str(tmp_path / "out"),
        "--to",
        "hf",
    ]
    assert main([*convert, "--tokenizer", "org/gpt"]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        snapshot / "tokenizer.json"
    ).read_bytes()
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()

    # An existing local path takes precedence over the hub.
    (tmp_path / "org" / "gpt").mkdir(parents=True)
    (tmp_path / "org" / "gpt" / "config.json").write_text(json.dumps(changed))
    assert MegatronModule(model="org/gpt").model_config.num_layers == 1
    assert main([*convert[:4], str(tmp_path / "again"), *convert[5:]]) == 2
    assert "got config.json; give one of these" in capfd.readouterr().err


def test_home_directory_is_expanded_in_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``~`` in a YAML file is not expanded by a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 311})
    )
    assert MegatronModule(model="~/model").model_config.vocab_size == 311
    assert load_tokenizer("~/model").encode("yes")
    assert f"{tmp_path}/a.ckpt" in refusal(find_newest, Path("~/a.ckpt"))


def test_missing_model_error_says_how_to_download_it(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = refusal(MegatronModule, model="org/gpt")
    assert missing.startswith("org/gpt: expected a path ")
    assert "its config.json is not in the cache" in missing
    assert "hub (HF_HUB_OFFLINE is set)" in missing
    assert "hf download org/gpt --revision v1`" in refusal(local_folder, "org/gpt@v1", "config")
    assert "its tokenizer.json is not in the cache" in refusal(load_tokenizer, "org/gpt")
    save_as(tiny_gpt2(), tmp_path / "model", "sharded_safetensors")
    *_, last = sorted((tmp_path / "model").glob("*.safetensors"))
    last.unlink()
    _add_to_cache(cache, "org/gpt", tmp_path / "model")
    assert f"its {last.name} is not in the cache" in refusal(
        MegatronModule, model="org/gpt", pretrained=True
    )
    assert MegatronModule(model="org/gpt").model_config.num_layers
    for name in ("runs/last.ckpt", "../model", "a/b/c", "model", "/a/b"):
        assert local_folder(name, "model") == Path(name)  # reading it fails later
    capfd.readouterr()
    assert main(["generate", "--checkpoint", "org/nothing", "--prompt", "a"]) == 2
    assert re.fullmatch(r".*hf download org/nothing.*\n", capfd.readouterr().err)


def _load_on_rank(source: str, cache: str, log: str) -> str:
    """Load a model in the constructor of each rank's module, before there is a process group."""
    import time

    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def download(
        repo: str,
        *,
        revision: Any,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            return real(
                repo, revision=revision, allow_patterns=allow_patterns, local_files_only=True
            )
        with Path(log).open("a") as opened:
            opened.write(f"{' '.join(allow_patterns)}\n")
        time.sleep(1)  # long enough for the other ranks to arrive
        return str(_add_to_cache(Path(cache), repo, Path(source)))

    huggingface_hub.snapshot_download = download  # type: ignore[assignment]
    constants.HF_HUB_CACHE = cache
    constants.HF_HUB_OFFLINE = False
    return str(MegatronModule(model="org/gpt", pretrained=True).pretrained_path)


def test_ranks_without_a_process_group_download_once(cache: Path, tmp_path: Path) -> None:
    save_as(tiny_gpt2(), tmp_path / "model", "sharded_safetensors")
    paths = run_ranks(
        _load_on_rank,
        4,
        str(tmp_path / "model"),
        str(cache),
        str(tmp_path / "log"),
    )
    assert len(set(paths)) == 1
    (patterns,) = (tmp_path / "log").read_text().splitlines()
    assert [part in patterns for part in ("config.json", ".py", ".bin")] == [True, False, False]


def _train_and_push(case: Case, log: str, fails: bool) -> str:
    """Train a step and push; return the URL or the error on this rank."""
    import huggingface_hub

    class Api:
        def __init__(self, token: Any) -> None:
            assert token == "secret"

        def create_repo(
            self,
            repo_id: str,
            *,
            private: bool,
            exist_ok: bool,
        ) -> None:
            if fails:
                raise OSError("401 Client Error: not logged in.\nAnd more")

        def create_branch(
            self,
            repo_id: str,
            *,
            branch: str,
            exist_ok: bool,
        ) -> None:
            Path(log, "branch").write_text(branch)

        def upload_folder(self, *, folder_path: str, **rest: Any) -> Any:
            shutil.copytree(folder_path, Path(log, "uploaded"))
            Path(log, "request.json").write_text(json.dumps(rest))
            return type("Info", (), {"pr_url": None, "commit_url": "https://hub/commit/1"})

    huggingface_hub.HfApi = Api  # type: ignore[assignment, misc]
    module = module_of(case)
    assert "no model to save" in refusal(module.push_to_hub, "org/new")
    trainer_of(case).fit(module, loader_of(case))
    options: dict[str, Any] = {
        "token": "secret",
        "revision": "dev",
        "private": True,
        "commit_message": "One step",
    }
    push = partial(module.push_to_hub, "org/new", **options)
    return refusal(push) if fails else str(push())


def test_push_by_rank_0_and_its_failure_on_all_ranks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = Case(layout=TP2, steps=1)
    assert common_result(_train_and_push, case, str(tmp_path), False) == "https://hub/commit/1"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "uploaded")
    assert model.config.n_layer == 4
    assert all(torch.isfinite(weight).all() for weight in model.parameters())
    request = json.loads((tmp_path / "request.json").read_text())
    assert request == {
        "repo_id": "org/new",
        "commit_message": "One step",
        "revision": "dev",
        "create_pr": False,
    }
    assert (tmp_path / "branch").read_text() == "dev"
    for error in run_ranks(_train_and_push, 2, case, str(tmp_path), True):
        assert error.startswith(
            "org/new cannot be written on the Hugging Face hub (401 Client Error: not logged in);"
        )
        assert "hf auth login" in error
