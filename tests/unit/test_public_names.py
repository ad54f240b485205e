"""Import of the package: fast, with lazily registered strategies and filtered warnings."""

import importlib
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_megatron
from lightning_megatron.cli.train import MegatronCLI
from lightning_megatron.registration import FORMER_HOMES, hide_known_warnings, strategy_names
from tests.marks import needs_transformers
from tests.models import GPT2, VOCAB_SIZE
from tests.ranks import ROOT, run_ranks
from tests.recording import recorded_log


def test_import_is_fast_and_strategies_register_when_lightning_is_imported() -> None:
    code = (
        "import sys, time\n"
        "before = len(sys.meta_path)\n"
        "started = time.process_time()\n"
        "import lightning_megatron\n"
        "print(time.process_time() - started)\n"
        "print(sorted({'torch', 'lightning', 'megatron', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "during = len(sys.meta_path)\n"
        "import lightning.pytorch.strategies as strategies\n"
        "print(during - before, [f for f in sys.meta_path if type(f).__name__ == '_RegisterAfterImport'])\n"
        "print(type(strategies.__spec__.loader).__name__, type(strategies.__loader__).__name__)\n"
        "import inspect; print('_StrategyRegistry' in inspect.getsource(strategies))\n"
        "print('megatron' in sys.modules, 'lightning_megatron.strategy' in sys.modules)\n"
        "from lightning_megatron.registration import register_strategies\nregister_strategies()\n"
        "print('megatron_tp2_pp4' in strategies.StrategyRegistry)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    seconds, *lines = result.stdout.splitlines()
    assert float(seconds) < 0.1
    assert lines == [
        "[]",
        "2 []",
        "SourceFileLoader SourceFileLoader",
        "True",
        "False False",
        "True",
    ]


def test_strategy_names_cover_every_layout() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    layouts = strategy_names()
    assert set(layouts) <= set(StrategyRegistry)
    assert layouts["megatron"] == layouts["megatron_tp1_pp1"] == {"tp": 1, "pp": 1}
    assert layouts["megatron_tp2_pp4"] == {"tp": 2, "pp": 4}
    for name in layouts:
        strategy = StrategyRegistry.get(name)
        assert {"tp": strategy.tp, "pp": strategy.pp} == layouts[name]


# ---- former homes of public names -----------------------------------------------------------------------------------

ADDED = {
    "ClassificationTrainStep",
    "DPOTrainStep",
    "DecoderNames",
    "DistillationTrainStep",
    "EMA",
    "Family",
    "HarnessEvaluation",
    "HarnessOptions",
    "MegatronLM",
    "PreferenceDataModule",
    "RewardTrainStep",
    "StreamingTextDataModule",
    "TopLogitsDataset",
    "TopLogitsWriter",
    "register_family",
}
"""Public names that the first layout did not have."""
FORMER_PATHS = [(module, name) for module, names in FORMER_HOMES.items() for name in names]


@pytest.mark.parametrize(("module", "name"), FORMER_PATHS)
def test_former_import_paths_lead_to_the_public_names(module: str, name: str) -> None:
    present = getattr(lightning_megatron, name)
    assert getattr(importlib.import_module(module), name) is present


def test_every_public_name_of_the_first_layout_has_its_former_path() -> None:
    names = {name for _, name in FORMER_PATHS}
    assert sorted(names | ADDED) == lightning_megatron.__all__
    assert not names & ADDED
    with pytest.raises(ImportError, match="no_such_module"):
        importlib.import_module("lightning_megatron.no_such_module")
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = importlib.import_module("lightning_megatron.engine.heartbeat").no_such_name


def test_a_saved_configuration_with_former_class_paths_runs(tmp_path: Path) -> None:
    config = {
        "model": {
            "class_path": "lightning_megatron.module.MegatronModule",
            "init_args": {
                "model": {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, **GPT2},
                "train_step": {"class_path": "lightning_megatron.steps.gpt.GPTTrainStep"},
                "lr_schedule": {
                    "class_path": "lightning_megatron.engine.lr_schedule.LRSchedule",
                    "init_args": {"warmup_steps": 1},
                },
            },
        },
        "data": {
            "class_path": "lightning_megatron.datamodules.indexed.IndexedDataModule",
            "init_args": {"data_path": "unused", "seq_length": 8},
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "strategy": {
                "class_path": "lightning_megatron.strategy.MegatronStrategy",
                "init_args": {"heartbeat": {"setup": 60}},
            },
            "callbacks": [
                {"class_path": "lightning_megatron.callbacks.spike_guard.SpikeGuard"},
                {"class_path": "lightning_megatron.callbacks.progress_line.ProgressLine"},
            ],
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli: Any = MegatronCLI(["--config", str(tmp_path / "config.yaml")], run=False)
    assert type(cli.datamodule) is lightning_megatron.IndexedDataModule
    assert any(isinstance(each, lightning_megatron.SpikeGuard) for each in cli.trainer.callbacks)


# ---- filtered warnings ----------------------------------------------------------------------------------------------

_NORM = ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends")
# Caused by the user through transformer_config_overrides.
_GRAPHS = ("enable_cuda_graph is deprecated", "megatron.core.transformer.transformer_config")


@pytest.mark.parametrize(
    ("warning", "filters", "count"),
    [
        (_NORM, (), 0),
        (_NORM, ("always",), 1),
        (_GRAPHS, (), 1),
    ],
)
def test_repeated_megatron_warnings_are_hidden_by_default(
    warning: tuple[str, str],
    filters: tuple[Any, ...],
    count: int,
) -> None:
    message, module = warning
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for action in filters:
            warnings.simplefilter(action)
        hide_known_warnings()
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module=module)
    assert len(caught) == count


def test_lightning_advertisement_is_filtered_from_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=log.name):
        log.info("💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]")
        for name in ("RichModelSummary", "ModelSummary, RichModelSummary", "ModelCheckpoint"):
            log.info(
                f"The following callbacks returned in `configure_callbacks` override those of the Trainer: {name}"
            )
        log.info("GPU available: False")
    assert "GPU available: False" in caplog.text
    assert "litmodels" not in caplog.text
    assert "ModelSummary" not in caplog.text
    assert "override those of the Trainer: ModelCheckpoint" in caplog.text


def _reported_special_tokens() -> int:
    from lightning_megatron.convert.registry import config_object

    with recorded_log("transformers.configuration_utils") as log:
        for _ in range(2):
            config_object({"model_type": "gpt2", "vocab_size": 100, "eos_token_id": 0})
    return log.getvalue().count("bos_token_id must be")


@needs_transformers("5.17", "transformers does not report them")
def test_special_tokens_outside_of_the_vocabulary_are_reported_by_rank_0_once() -> None:
    assert run_ranks(_reported_special_tokens, 2) == [1, 0]
