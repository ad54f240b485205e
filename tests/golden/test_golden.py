"""Files of commit 25d5a27 are read, resumed and written as that commit did.

The files were made with torch 2.13 (CPU), megatron-core 0.16.1, Lightning 2.6.6 and transformers 5.23, by ``make.py``,
which the history has (``git log -- tests/golden/make.py``). A record that an intended change breaks is taken out of the
comparison by name, with its reason, in ``INTENDED``; it is not made anew.
"""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Run
from tests.golden import runs
from tests.golden.interface import broken, interface
from tests.golden.runs import BERT, BLEND, RUNS, SHUFFLED, T5, WITHOUT_DROPOUT
from tests.ranks import run_ranks

HERE = Path(__file__).parent
FILES = HERE / "files"

_ONLY_WEIGHTS = "optimizer states do not travel between formats, so that copies of the model have no files of their own"

INTENDED: dict[str, str] = {
    "inspect --png": "matplotlib draws what --json prints",
    "preprocess --dataset-impl": "datasets of Megatron 1.x are read (convert-dataset), no longer written",
    "MegatronStrategy(load_data_on_every_rank)": "one rank of each copy of the model reads, as it did by default",
    "MegatronStrategy(on_save_failure)": "'warn' is the behavior; a save that ends the run raises",
    "MegatronStrategy(process_group_backend)": "always the device's own, as it was by default",
    "convert --dp": _ONLY_WEIGHTS,
    "convert --use-distributed-optimizer": _ONLY_WEIGHTS,
}
"""What of the public interface is gone on purpose, as ``broken`` names it, and why."""

# Of losses and of gradient norms. On the machine that made the records, a run at the same layout goes on to the last
# bit; another processor or layout adds up in another order (other layouts there: at most 2e-7 in fp32, 1e-4 and 8e-4 in
# bf16). Without the moments, their step count or the random states, losses are up to 3e-2 off and norms 1e-2 or more.
_FP32 = (1e-5, 1e-4)
_BF16 = (5e-4, 3e-3)


def _record(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of ``NAME.ckpt``."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(HERE / "checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    ("run", "world_size", "record", "checkpoint", "tolerances"),
    [
        pytest.param(BLEND, 4, "blend", "blend", _BF16, id="blend, tp2 pp2 as before"),
        pytest.param(
            *(replace(WITHOUT_DROPOUT, strategy={"pp": 2}), 4, "blend without dropout", "blend", _BF16),
            id="blend, pp2 dp2",
        ),
        pytest.param(WITHOUT_DROPOUT, 1, "blend without dropout", "blend", _BF16, id="blend, one rank"),
        pytest.param(SHUFFLED, 2, "shuffled", "shuffled", _FP32, id="shuffled, dp2 as before"),
        pytest.param(replace(SHUFFLED, strategy={"tp": 2}), 2, "shuffled", "shuffled", _FP32, id="shuffled, tp2"),
        pytest.param(BERT, 2, "bert", "bert", _FP32, id="bert, tp2 as before"),
        pytest.param(replace(BERT, strategy={}), 1, "bert", "bert", _FP32, id="bert, one rank"),
        pytest.param(T5, 2, "t5", "t5", _FP32, id="t5, pp2 as before"),
        pytest.param(replace(T5, strategy={}), 1, "t5", "t5", _FP32, id="t5, one rank"),
    ],
)
def test_a_run_goes_on(
    tmp_path: Path,
    checkpoints: Path,
    run: Run,
    world_size: int,
    record: str,
    checkpoint: str,
    tolerances: tuple[float, float],
) -> None:
    """With the samples, losses, gradient norms and learning rates that followed in the run which wrote the file."""
    expected = _record("steps")[record]

    resumed = run.but(ckpt_path=str(checkpoints / f"{checkpoint}.ckpt"))
    steps = runs.merged(resumed, run_ranks(runs.trained, world_size, resumed, FILES, tmp_path))

    assert list(steps) == list(expected)
    is_same_layout = (run, world_size) == RUNS[checkpoint]
    for step, numbers in steps.items():
        rows, there = numbers["rows"], expected[step]["rows"]
        assert rows == there if is_same_layout else _sorted(rows) == _sorted(there), f"step {step} took other samples"
        assert numbers["loss"] == pytest.approx(expected[step]["loss"], rel=tolerances[0])
        assert numbers["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=tolerances[1])
        assert numbers["lr"] == pytest.approx(expected[step]["lr"], rel=1e-6)


def _sorted(copies: list[str]) -> list[str]:
    return sorted(" ".join(copies).split())


def test_samples_are_the_same(tmp_path: Path) -> None:
    """Of GPT, blended and over several passes and epochs, BERT, T5 and instructions."""
    (found,) = run_ranks(runs.samples, 1, FILES, tmp_path)
    assert found == _record("samples")["orders"]


@pytest.fixture(scope="module")
def exported(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``convert`` makes of each checkpoint now."""
    return run_ranks(runs.exports, 1, checkpoints, tmp_path_factory.mktemp("exports"))[0]


@pytest.mark.parametrize("name", [f"{name}.ckpt" for name in (*RUNS, "words")])
def test_exports_are_equal_tensor_for_tensor(exported: Any, name: str) -> None:
    """As Hugging Face's, as Megatron-LM's legacy files, there and back, and as Megatron-Core's."""
    expected = _record("exports")[name]
    expected["legacy_export"] = _of_weights_alone(expected["legacy_export"])
    assert {kind: exported[name][kind] for kind in expected} == expected
    assert exported[name]["legacy_import"] == expected["hugging_face_export"]["tensors"]


def _of_weights_alone(export: dict[str, Any]) -> dict[str, Any]:
    """Intended: without moments Megatron-LM's files are a release, from which no run goes on in the middle.

    An argument that a family has needed since says of all others what Megatron-LM takes for granted.
    """
    plain = export.pop("of all ranks")
    plain["arguments"] |= {"consumed_train_samples": "0", "rotary_interleaved": "False"}
    return {"of all ranks": plain, **{f"release/{name.partition('/')[2]}": each for name, each in export.items()}}


def _texts_and_companions(path: Path, work: Path) -> tuple[Any, dict[str, bool]]:
    runs.command("convert --to hf --load-path {} --save-path {}", path, work / "hf")
    companions = sorted((path / "hugging_face").iterdir())
    same = {each.name: (work / "hf" / each.name).read_bytes() == each.read_bytes() for each in companions}
    return runs.texts(path), same


def test_a_checkpoint_with_a_tokenizer_writes_the_same_texts(tmp_path: Path, checkpoints: Path) -> None:
    ((texts, companions),) = run_ranks(_texts_and_companions, 1, checkpoints / "words.ckpt", tmp_path)
    assert texts == _record("texts")
    assert {"tokenizer.json", "generation_config.json"} <= companions.keys()
    assert all(companions.values()), companions


def test_datasets_are_equal_byte_for_byte(tmp_path: Path) -> None:
    run_ranks(runs.make_datasets, 1, FILES, tmp_path)
    expected = {path.name for path in FILES.iterdir() if path.suffix in (".bin", ".idx")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    for name in expected:
        assert (tmp_path / name).read_bytes() == (FILES / name).read_bytes(), name


def test_nothing_of_the_public_interface_is_gone() -> None:
    (now,) = run_ranks(interface, 1)
    found = broken(_record("interface"), now)
    assert {name: how for name, how in found.items() if name not in INTENDED} == {}
    assert INTENDED.keys() <= found.keys(), "no longer broken: take it out of INTENDED"
