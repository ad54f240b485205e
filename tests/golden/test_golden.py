"""Files of commit 25d5a27 are read, resumed and written exactly as by that commit.

The files were made with torch 2.13 (CPU), megatron-core 0.16.1, Lightning 2.6.6 and transformers 5.23, by ``make.py``,
which is in the history (``git log -- tests/golden/make.py``). Records that an intended change breaks are excluded by
name, with the reason, in ``INTENDED``; they are not regenerated.
"""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Run
from tests.golden import runs
from tests.golden.interface import incompatibilities, interface
from tests.golden.runs import BERT, BLEND, RUNS, SHUFFLED, T5, WITHOUT_DROPOUT
from tests.ranks import run_ranks

HERE = Path(__file__).parent
FILES = HERE / "files"

_ONLY_WEIGHTS = (
    "optimizer states are not converted between formats, so replicas have no files of their own"
)

INTENDED: dict[str, str] = {
    "inspect --png": "matplotlib draws what --json prints",
    "preprocess --dataset-impl": "datasets of Megatron 1.x are read (convert-dataset), no longer written",
    "MegatronStrategy(load_data_on_every_rank)": "one rank of each replica reads, as by default before",
    "MegatronStrategy(on_save_failure)": "always 'warn'; a save that ends the run raises",
    "MegatronStrategy(process_group_backend)": "always the device's own, as by default before",
    "OptimizerOptions(momentum)": "None is 0.9 with sgd, as before, and 0.95 with muon",
    "OptimizerOptions(weight_decay)": "None is 0.01, as before, and 0.1 with muon",
    "fit YAML model.init_args.optimizer.momentum": "null is 0.9 with sgd, as before",
    "fit YAML model.init_args.optimizer.weight_decay": "null is 0.01, as before",
    "convert --dp": _ONLY_WEIGHTS,
    "convert --use-distributed-optimizer": _ONLY_WEIGHTS,
}
"""Intended changes to the public interface as ``incompatibilities`` names them, and the reason of each."""

# Tolerances of losses and gradient norms. On the machine of the records, a resume at the same layout is bitwise equal;
# other processors and layouts sum in another order (other layouts there: at most 2e-7 in fp32, 1e-4 and 8e-4 in bf16).
# Without the moments, their step count or the random states, losses are up to 3e-2 off and norms 1e-2 or more.
_FP32 = (1e-5, 1e-4)
_BF16 = (5e-4, 3e-3)


def _record(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of ``NAME.ckpt``."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(HERE / "checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(
    ("run", "world_size", "record", "checkpoint", "tolerances"),
    [
        pytest.param(BLEND, 4, "blend", "blend", _BF16, id="blend, tp2 pp2 as before"),
        pytest.param(
            replace(WITHOUT_DROPOUT, strategy={"pp": 2}),
            4,
            "blend without dropout",
            "blend",
            _BF16,
            id="blend, pp2 dp2",
        ),
        pytest.param(
            WITHOUT_DROPOUT, 1, "blend without dropout", "blend", _BF16, id="blend, one rank"
        ),
        pytest.param(SHUFFLED, 2, "shuffled", "shuffled", _FP32, id="shuffled, dp2 as before"),
        pytest.param(
            replace(SHUFFLED, strategy={"tp": 2}),
            2,
            "shuffled",
            "shuffled",
            _FP32,
            id="shuffled, tp2",
        ),
        pytest.param(BERT, 2, "bert", "bert", _FP32, id="bert, tp2 as before"),
        pytest.param(
            replace(BERT, strategy={}),
            1,
            "bert",
            "bert",
            _FP32,
            id="bert, one rank",
        ),
        pytest.param(T5, 2, "t5", "t5", _FP32, id="t5, pp2 as before"),
        pytest.param(
            replace(T5, strategy={}),
            1,
            "t5",
            "t5",
            _FP32,
            id="t5, one rank",
        ),
    ],
)
def test_resume_equals_the_recorded_run(
    tmp_path: Path,
    checkpoints: Path,
    run: Run,
    world_size: int,
    record: str,
    checkpoint: str,
    tolerances: tuple[float, float],
) -> None:
    """Same samples, losses, gradient norms and learning rates as in the rest of the run that wrote the checkpoint."""
    expected = _record("steps")[record]

    resumed = run.but(ckpt_path=str(checkpoints / f"{checkpoint}.ckpt"))
    steps = runs.merge_ranks(
        resumed,
        run_ranks(runs.train, world_size, resumed, FILES, tmp_path),
    )

    assert list(steps) == list(expected)
    is_same_layout = (run, world_size) == RUNS[checkpoint]
    for step, values in steps.items():
        rows = values["rows"]
        recorded = expected[step]["rows"]
        assert rows == recorded if is_same_layout else _sorted(rows) == _sorted(recorded), (
            f"step {step}: other samples"
        )
        assert values["loss"] == pytest.approx(expected[step]["loss"], rel=tolerances[0])
        assert values["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=tolerances[1])
        assert values["lr"] == pytest.approx(expected[step]["lr"], rel=1e-6)


def _sorted(rows_of_replicas: list[str]) -> list[str]:
    return sorted(" ".join(rows_of_replicas).split())


def test_sample_order_equals_the_record(tmp_path: Path) -> None:
    """For GPT (blended, and over several epochs), BERT, T5 and instructions."""
    (orders,) = run_ranks(runs.samples, 1, FILES, tmp_path)
    assert orders == _record("samples")["orders"]


@pytest.fixture(scope="module")
def exported(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Current output of ``convert`` for each checkpoint."""
    return run_ranks(runs.exports, 1, checkpoints, tmp_path_factory.mktemp("exports"))[0]


@pytest.mark.parametrize("name", [f"{name}.ckpt" for name in (*RUNS, "words")])
def test_exports_equal_the_record_tensor_for_tensor(exported: Any, name: str) -> None:
    """To Hugging Face, to Megatron-LM's legacy files and back, and to Megatron-Core."""
    expected = _record("exports")[name]
    expected["legacy_export"] = _as_release(expected["legacy_export"])
    assert {kind: exported[name][kind] for kind in expected} == expected
    assert exported[name]["legacy_import"] == expected["hugging_face_export"]["tensors"]


def _as_release(export: dict[str, Any]) -> dict[str, Any]:
    """Apply intended changes: files without moments are a Megatron-LM release, which cannot be resumed.

    ``rotary_interleaved``, which a newer family needs, is written for all families, with Megatron-LM's default.
    """
    plain = export.pop("of all ranks")
    plain["arguments"] |= {"consumed_train_samples": "0", "rotary_interleaved": "False"}
    return {
        "of all ranks": plain,
        **{f"release/{name.partition('/')[2]}": tensors for name, tensors in export.items()},
    }


def _texts_and_equal_files(path: Path, work: Path) -> tuple[Any, dict[str, bool]]:
    runs.command("convert --to hf --load-path {} --save-path {}", path, work / "hf")
    companions = sorted((path / "hugging_face").iterdir())
    is_equal = {
        file.name: (work / "hf" / file.name).read_bytes() == file.read_bytes()
        for file in companions
    }
    return runs.texts(path), is_equal


def test_generated_texts_equal_the_record(tmp_path: Path, checkpoints: Path) -> None:
    ((texts, companions),) = run_ranks(
        _texts_and_equal_files, 1, checkpoints / "words.ckpt", tmp_path
    )
    assert texts == _record("texts")
    assert {"tokenizer.json", "generation_config.json"} <= companions.keys()
    assert all(companions.values()), companions


def test_datasets_equal_the_record_byte_for_byte(tmp_path: Path) -> None:
    run_ranks(runs.make_datasets, 1, FILES, tmp_path)
    expected = {path.name for path in FILES.iterdir() if path.suffix in (".bin", ".idx")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    for name in expected:
        assert (tmp_path / name).read_bytes() == (FILES / name).read_bytes(), name


def test_public_interface_is_backward_compatible() -> None:
    (now,) = run_ranks(interface, 1)
    changes = incompatibilities(_record("interface"), now)
    assert {name: change for name, change in changes.items() if name not in INTENDED} == {}
    assert INTENDED.keys() <= changes.keys(), "no longer incompatible: remove it from INTENDED"
