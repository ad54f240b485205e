"""Public names and names of strategies: loaded in milliseconds, complete, registered in any order of imports."""

from __future__ import annotations

import os
import subprocess
import sys

import lightning_megatron
from lightning_megatron.startup import strategy_names
from tests.ranks import ROOT


def test_every_public_name_can_be_imported() -> None:
    for name in lightning_megatron.__all__:
        assert getattr(lightning_megatron, name).__name__ == name
        assert name in dir(lightning_megatron)


def test_the_package_is_imported_at_once_and_registers_its_strategies_when_lightning_comes() -> None:
    code = (
        "import sys, time\n"
        "before = len(sys.meta_path)\n"
        "started = time.process_time()\n"
        "import lightning_megatron\n"
        "print(time.process_time() - started)\n"
        "print(sorted({'torch', 'lightning', 'megatron', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "during = len(sys.meta_path)\n"
        "import lightning.pytorch.strategies as strategies\n"
        "print(during - before, [f for f in sys.meta_path if 'lightning_megatron' in type(f).__module__])\n"
        "print(type(strategies.__spec__.loader).__name__, type(strategies.__loader__).__name__)\n"
        "import inspect; print('_StrategyRegistry' in inspect.getsource(strategies))\n"
        "print('megatron' in sys.modules, 'lightning_megatron.strategy' in sys.modules)\n"
        "from lightning_megatron.startup import register_strategies\nregister_strategies()\n"
        "print('megatron_tp2_pp4' in strategies.StrategyRegistry)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, *rest = done.stdout.splitlines()
    assert float(seconds) < 0.1
    assert rest == ["[]", "1 []", "SourceFileLoader SourceFileLoader", "True", "False False", "True"]


def test_every_size_has_a_name() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    layouts = strategy_names()
    assert set(layouts) <= set(StrategyRegistry)
    assert layouts["megatron"] == layouts["megatron_tp1_pp1"] == {"tp": 1, "pp": 1}
    assert layouts["megatron_tp2_pp4"] == {"tp": 2, "pp": 4}
    for name in layouts:
        strategy = StrategyRegistry.get(name)
        assert {"tp": strategy.tp, "pp": strategy.pp} == layouts[name]
