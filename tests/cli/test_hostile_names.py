"""What a file may name: one hostile file per cell, and no address opened, no class imported, nothing written for it.

A server on this host stands for every address and for the hub; the tests count its requests. Classes that files name
would create a directory when they are imported.
"""

import contextlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from tests.checkpoint.damage import update_checksums
from tests.cli.command import run_all, run_cli
from tests.parity.training import refusal
from tests.ranks import run_ranks

_LISTED = ("/model/config.json", "/model/../../escaped.txt", r"/model/..\escaped.txt")
_LISTING = "".join(f'<a href="{name}">x</a>' for name in _LISTED)


class _Server(http.server.ThreadingHTTPServer):
    """Answers everything; a directory lists a file outside of itself."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Record the request."""
        self.server.requests.append(self.path)
        body = (_LISTING if self.path.rstrip("/") == "/model" else "{}").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Server]:
    """The server, which is also the hub, online, with an empty cache."""
    from huggingface_hub import constants

    # Now, so that the sockets of ranks are not below tmp_path: their paths are at most 107 bytes long.
    get_temp_dir()
    with _Server() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{server.address}/{{repo_id}}/{{revision}}/{{filename}}",
        )
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        (tmp_path / "tmp").mkdir()
        monkeypatch.chdir(tmp_path)
        yield server
        server.shutdown()


_NO_SUCH_PATH = "model"
"""Part of the messages for a path, which are those of any missing path."""


def _names(server: _Server) -> dict[str, str]:
    """Names that files give, and a part of the message that refuses them."""
    return {
        f"{server.address}/model": "got an address, which only you may give",
        f"{server.address.upper()}/model": "got an address, which only you may give",
        f"{server.address.replace('//', '/')}/model": "got an address, which only you may give",
        f"simplecache::{server.address}/model": "got an address, which only you may give",
        "memory://model": "got an address, which only you may give",
        "org/model": "what a file names is not downloaded; run `hf download org/model`, or give ",
        "org/model@main": "run `hf download org/model --revision main`, or give ",
        "org/model@../../../../model": _NO_SUCH_PATH,
        "../model": _NO_SUCH_PATH,
    }


# ---- addresses and names of the hub ----------------------------------------------------------------------------------


def _adapter(folder: Path, base: str) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(
        {"base_model.model.h.0.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors"
    )
    config = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "lora_dropout": 0,
        "base_model_name_or_path": base,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _forged(
    source: Path,
    target: Path,
    changes: dict[str, Any],
    lightning: dict[str, Any],
) -> Path:
    """Copy a ``*.ckpt`` with other values in ``meta.pt``, and the right checksums."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    meta = torch.load(target / "meta.pt", weights_only=True)
    meta |= changes
    meta["lightning"] |= lightning
    torch.save(meta, target / "meta.pt")
    update_checksums(target)
    return target


def test_base_of_adapters_is_no_address_and_is_not_downloaded(
    server: _Server, checkpoints: Path, tmp_path: Path
) -> None:
    from lightning_megatron.convert.formats import open_source

    for name, reason in _names(server).items():
        adapter = _adapter(tmp_path / "adapter", name)
        assert reason in refusal(open_source, adapter)
        own = _forged(
            checkpoints / "run.ckpt", tmp_path / "a.ckpt", {"part": "adapters", "base": name}, {}
        )
        assert reason in refusal(open_source, own)
    assert server.requests == []
    assert sorted(path.name for path in tmp_path.rglob("*") if "escaped" in path.name) == []


def test_names_in_arguments_of_a_checkpoint_are_not_opened(
    server: _Server, checkpoints: Path, tmp_path: Path
) -> None:
    from lightning_megatron import MegatronModule

    config = json.loads((checkpoints / "hf/config.json").read_text())
    forge = partial(_forged, checkpoints / "run.ckpt", tmp_path / "a.ckpt")
    for name, reason in _names(server).items():
        cells: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {"model": name}),
            ({"part": "adapters", "base": name}, {"model": config}),
        ]
        for changes, arguments in cells:
            path = forge(changes, {"hyper_parameters": arguments})
            assert reason in refusal(MegatronModule.load_from_checkpoint, path)
        arguments = {"model": config, "generation": {"tokenizer": name}}
        path = forge({}, {"hyper_parameters": arguments})
        MegatronModule.load_from_checkpoint(path)
        arguments["generation"] = {"tokenizer": name, "stop_strings": "x"}
        path = forge({}, {"hyper_parameters": arguments})
        if reason != _NO_SUCH_PATH:
            assert reason in refusal(MegatronModule.load_from_checkpoint, path)
    assert server.requests == []


def test_the_user_gives_the_base_of_adapters(
    server: _Server, checkpoints: Path, tmp_path: Path
) -> None:
    from lightning_megatron.convert.formats import open_source

    adapter = _adapter(tmp_path / "adapter", f"{server.address}/model")
    # The base is found; then the forged adapter does not fit it.
    assert "targets: expected linears of gpt2 layers" in refusal(
        open_source, adapter, base=checkpoints / "hf"
    )
    assert "base=org/x would do nothing" in refusal(
        open_source, checkpoints / "hf", base=Path("org/x")
    )
    options = f"--load-path {adapter} --save-path out --to hf"
    code, _, err = run_cli(tmp_path, "convert", *options.split())
    assert (code, f"give: --base {server.address}/model" in err) == (2, True), err
    assert server.requests == []


def test_tokenizer_and_config_files_send_no_requests(
    server: _Server, checkpoints: Path, tmp_path: Path
) -> None:
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.data.tokenizer import load_tokenizer

    shutil.copytree(checkpoints / "hf", tmp_path / "m")
    (tmp_path / "code.py").write_text(
        "import os\nos.mkdir('code_was_run')\nclass Tokenizer: pass\n"
    )
    shutil.copyfile(tmp_path / "code.py", tmp_path / "m/code.py")
    plain = {
        name: json.loads((tmp_path / "m" / name).read_text())
        for name in ("config.json", "tokenizer_config.json")
    }
    for name in _names(server):
        hostile = {
            "name_or_path": name,
            "_name_or_path": name,
            "tokenizer_file": name,
            "vocab_file": name,
            "fast_tokenizer_files": [name],
            "chat_template": "{% include '" + name + "' %}",
            "auto_map": {
                "AutoTokenizer": [f"{name}--code.Tokenizer", None],
                "AutoConfig": "code.Tokenizer",
            },
            "attn_implementation": name,
            "transformers_weights": name,
        }
        for key, value in hostile.items():
            for file, fields in plain.items():
                (tmp_path / "m" / file).write_text(json.dumps(fields | {key: value}))
            with contextlib.suppress(ConfigError):
                load_tokenizer(tmp_path / "m").encode("a b")
            with contextlib.suppress(ConfigError):
                model_config(tmp_path / "m")
    assert server.requests == []
    assert not list(tmp_path.rglob("code_was_run"))


def test_addresses_in_states_of_callbacks_are_forgotten(server: _Server) -> None:
    from lightning_megatron.run.lightning_state import forget_addresses
    from lightning_megatron.storage.paths import as_path

    mine = as_path("memory://mine/run")
    names = [
        f"{server.address}/a.ckpt",
        "memory://other/a.ckpt",
        "memory://mine/run/../a.ckpt",
        "a::b",
    ]
    for name in names:
        state = {
            "best_model_path": name,
            "best_k_models": {name: 1.0, "/disk/b.ckpt": 2.0},
            "last_model_path": "x",
        }
        with pytest.warns(UserWarning, match="forgotten"):
            forget_addresses({"callbacks": {"ModelCheckpoint": state}}, [mine])
        assert state == {
            "best_model_path": "",
            "best_k_models": {"/disk/b.ckpt": 2.0},
            "last_model_path": "x",
        }
    own = {"best_model_path": "memory://mine/run/a.ckpt"}
    forget_addresses({"callbacks": {"ModelCheckpoint": own}}, [mine])
    assert own == {"best_model_path": "memory://mine/run/a.ckpt"}
    assert server.requests == []


# ---- listings --------------------------------------------------------------------------------------------------------


def test_listing_of_a_typed_address_writes_nothing_outside(server: _Server, tmp_path: Path) -> None:
    from lightning_megatron.storage.hub import local_folder

    assert "expected a listing of files below it, got" in refusal(
        local_folder, f"{server.address}/model", "model"
    )
    assert server.requests  # it was typed
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "name",
    [
        "/root/../x",
        "/root/a/../../x",
        "/rootx",
        "/x",
        "/root//x",
        "/root/./x",
        "/root/a\\..\\x",
        "/root/C:x",
        "/root/\0",
    ],
)
def test_names_of_a_listing_stay_below_its_root(name: str) -> None:
    from lightning_megatron.storage.stores import _listed_name

    assert "got" in refusal(_listed_name, name, "file", "/root/")
    assert "(link)" in refusal(_listed_name, "/root/a", "link", "/root")
    assert _listed_name("/root/a/b.json", "file", "/root/") == "a/b.json"
    assert _listed_name("/root", "file", "/root") == ""


# ---- classes -------------------------------------------------------------------------------------------------------


def test_ckpt_path_imports_nothing_and_changes_no_setting(corpus: Path, tmp_path: Path) -> None:
    from tests.cli.corpus import configuration

    (tmp_path / "code.py").write_text("import os\nos.mkdir('code_was_run')\nclass Model: pass\n")
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(configuration(corpus, tmp_path)))
    arguments = [
        {"_class_path": "code.Model"},
        {"class_path": "code.Model"},
        {"lr": 7.0},
        {"model": {"class_path": "code.Model"}},
    ]
    for number, hyper_parameters in enumerate(arguments):
        torch.save(
            {"hyper_parameters": hyper_parameters, "state_dict": {}}, tmp_path / f"{number}.ckpt"
        )
    whole = (tmp_path / "0.ckpt").read_bytes()
    (tmp_path / "4.ckpt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "5.ckpt").write_bytes(whole.replace(b"class_path", b"class-path"))
    (tmp_path / "6.ckpt").write_bytes(b"PK\x03\x04" + bytes(50))
    cases = [
        ("fit", number, strategy)
        for number in range(7)
        for strategy in ("auto", "MegatronStrategy")
    ]
    cases += [(command, 0, "auto") for command in ("validate", "test", "predict")]
    commands = [
        [
            command,
            "--config",
            config,
            "--ckpt_path",
            tmp_path / f"{number}.ckpt",
            "--trainer.strategy",
            strategy,
        ]
        for command, number, strategy in cases
    ]
    for command, (code, _, err) in zip(commands, run_all(tmp_path, commands), strict=True):
        assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), (command, err)
    assert not (tmp_path / "code_was_run").exists()


# ---- forged with the right checksums ---------------------------------------------------------------------------------


_PLACES: list[tuple[str, ...]] = [
    ("layout",),
    ("layout", "tp"),
    ("has_optimizer",),
    ("optimizer_format",),
    ("model_description",),
    ("time",),
    ("part",),
    ("num_averaged",),
    ("base",),
    ("hugging_face_config",),
    ("lightning",),
    ("lightning", "epoch"),
    ("lightning", "global_step"),
    ("lightning", "pytorch-lightning_version"),
    ("lightning", "state_dict"),
    ("lightning", "hyper_parameters"),
    ("lightning", "loops"),
    ("lightning", "loops", "fit_loop"),
    ("lightning", "loops", "fit_loop", "state_dict"),
    ("lightning", "loops", "fit_loop", "epoch_progress"),
    ("lightning", "loops", "fit_loop", "epoch_progress", "total"),
    ("lightning", "loops", "fit_loop", "epoch_progress", "total", "ready"),
    ("lightning", "loops", "fit_loop", "epoch_loop.batch_progress"),
    ("lightning", "loops", "fit_loop", "epoch_loop.batch_progress", "is_last_batch"),
    ("lightning", "callbacks"),
    ("lightning", "callbacks", "Checkpoint"),
    ("lightning", "callbacks", "Checkpoint", "best_model_path"),
    ("lightning", "optimizer_states"),
    ("lightning", "lr_schedulers"),
]
"""Keys of a checkpoint, each of which is left out, and replaced by a value of another type (all pairs were tried)."""
_VALUES: tuple[Any, ...] = (
    7.5,
    "text",
    [1],
    {"a": "b"},
    None,
)


def _resume_all(folder: str) -> list[tuple[str, str]]:
    """Resume from forged copies of a checkpoint; returns what was neither refused in one line nor harmless."""
    import copy
    import functools
    import io
    import operator

    from tests.checkpoint.runs import Run, checkpoints_at, fit

    run = Run(trainer={"max_steps": 1})
    callback = checkpoints_at(Path(folder) / "kept")
    with contextlib.redirect_stdout(io.StringIO()):
        trainer, _ = fit(run, callback)
        trainer.save_checkpoint(f"{folder}/good.ckpt")
    good = torch.load(f"{folder}/good.ckpt/meta.pt", weights_only=True)
    (key,) = (name for name in good["lightning"]["callbacks"] if name.startswith("ModelCheckpoint"))
    wrong: list[tuple[str, str]] = []
    for number, place in enumerate(_PLACES):
        path = [key if name == "Checkpoint" else name for name in place]
        value_of_another_type = _VALUES[number % len(_VALUES)]
        changes: list[tuple[str, Any]] = [("without", None), ("with", value_of_another_type)]
        for kind, value in changes:
            meta = copy.deepcopy(good)
            section = functools.reduce(operator.getitem, path[:-1], meta)
            if kind == "without":
                del section[path[-1]]
            else:
                section[path[-1]] = value
            target = _forged(
                Path(folder, "good.ckpt"),
                Path(folder, "forged.ckpt"),
                {},
                {},
            )
            torch.save(meta, target / "meta.pt")
            update_checksums(target)
            try:
                fit(
                    run.but(trainer={"max_steps": 2}, ckpt_path=str(target)),
                    checkpoints_at(Path(folder) / "kept"),
                )
            except ConfigError as error:
                if "\n" in str(error):
                    wrong.append((f"{kind} {value} at {place}", str(error)))
            except Exception as error:
                wrong.append((f"{kind} {value} at {place}", repr(error)))
    return wrong


def test_forged_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    (wrong,) = run_ranks(_resume_all, 1, str(tmp_path))
    assert not wrong, "\n".join(map(str, wrong))


# ---- links -----------------------------------------------------------------------------------------------------------


def _planted(folder: Path) -> dict[str, str]:
    """Names of files and directories that commands write first, each with a command that does so."""
    text = f"{folder}/text.txt"
    convert = "convert --load-path hf --to"
    unsaved = "--trainer.enable_checkpointing false"
    return {
        ".new.ckpt.partial": f"{convert} megatron --save-path new.ckpt",
        ".new.partial": f"{convert} hf --save-path new",
        ".legacy.partial": f"{convert} megatron-legacy --save-path legacy",
        ".mean.ckpt.partial": "average --load-path hf hf --save-path mean.ckpt",
        ".corpus_text_document.partial": f"preprocess --input {text} --output-prefix corpus --tokenizer hf",
        ".both.partial": f"merge --input {folder}/c_text_document {folder}/c_text_document --output-prefix both",
        "tok/.tokenizer.json.partial": f"train-tokenizer --input {text} --vocab-size 300 --output tok",
        "fit.yaml": "config --template gpt2_small --output fit.yaml --overwrite",
        "plan.yaml": "plan --model hf --gpus 1 --seq-length 8 --output plan.yaml --overwrite",
        "plan.png": "plan --model hf --gpus 1 --seq-length 8 --picture plan.png --overwrite",
        "loss_curve.png": f"{_FIT} {unsaved} --trainer.callbacks LossCurve",
        "config.yaml": f"{_FIT} {unsaved}",
        "checkpoints/epoch=0-step=2.ckpt.partial": _FIT,
        "two/checkpoints/other.ckpt.partial": f"{_FIT} --trainer.default_root_dir two",
    }


_FIT = "fit --config fit/own.yaml --trainer.logger false --trainer.default_root_dir ."


def test_planted_links_are_neither_emptied_nor_written_through(
    corpus: Path, checkpoints: Path, tmp_path: Path
) -> None:
    from tests.cli.corpus import configuration

    victim = tmp_path / "victim"
    shutil.copytree(checkpoints / "hf", tmp_path / "hf")
    (tmp_path / "text.txt").write_text("some text " * 50)
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{corpus}{suffix}", tmp_path / f"c_text_document{suffix}")
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit/own.yaml").write_text(json.dumps(configuration(corpus, tmp_path)))
    commands = _planted(tmp_path)
    for number, name in enumerate(commands):
        victim = tmp_path / f"victim{number}"
        victim.mkdir()
        (victim / "precious").write_text("mine")
        link = tmp_path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        is_file = link.suffix in (".yaml", ".png")
        link.symlink_to(victim / "precious" if is_file else victim)
    results = run_all(tmp_path, [command.split() for command in commands.values()])
    for (name, command), (code, _, err) in zip(commands.items(), results, strict=True):
        is_staging = name.endswith(".partial") and "other" not in name
        assert code == (2 if is_staging else 0), (command, err)
        assert not is_staging or "got a link or a file; remove it" in err, (command, err)
    for number in range(len(commands)):
        victim = tmp_path / f"victim{number}"
        assert [path.name for path in victim.iterdir()] == ["precious"]
        assert (victim / "precious").read_text() == "mine"
