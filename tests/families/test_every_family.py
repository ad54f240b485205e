"""Checks of every family: its row of docs/families.md, LoRA against ``peft``, parameter counts and initial weights."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.convert.registry import known_families
from lightning_megatron.engine.ops.xielu import ALPHAS, CONSTANTS
from lightning_megatron.models.gated_delta_net import DECAYS, STEPS
from lightning_megatron.models.t5_layout import t5_layout
from lightning_megatron.planning.parameters import rank_parameters
from tests.families.cards import ELSEWHERE, LAYOUTS, PAGE, description, lines_of_page, models, page
from tests.families.parity import check_family, padded_sentences
from tests.families.test_gpts import CONFIGS
from tests.marks import exhaustive
from tests.parity.training import FOUR_RANKS, MODELS, Case, Layout, trainer_of
from tests.ranks import run_ranks

# ---- docs/families.md is up to date ---------------------------------------------------------------------------------

_COMMAND = "python -m tests.families.cards"
_LARGEST = (2e-5,) * len(LAYOUTS) + (2e-6, 2e-5)
"""Tolerances of tests/families/parity.py."""


def _cells() -> dict[str, list[str]]:
    cells = {}
    for family, line in lines_of_page().items():
        _, *row = (cell.strip() for cell in line.strip("|").split(" | "))
        cells[family] = row
    return cells


def test_page_matches_registry_and_has_every_family() -> None:
    assert PAGE.read_text() == page(lines_of_page().values()), _COMMAND
    assert set(_cells()) == set(models()) == set(known_families()) - ELSEWHERE, _COMMAND


@pytest.mark.parametrize("family", models())
def test_row_matches_family_and_its_errors_are_small(family: str) -> None:
    row = _cells()[family]
    hf_model, _ = models()[family]()
    assert " | ".join(row[:3]) == description(hf_model), _COMMAND
    for error, largest in zip(row[3:8], _LARGEST, strict=True):
        assert float(error) <= largest


# ---- adapters -------------------------------------------------------------------------------------------------------

_IN_EVERY_RUN = ("phi3", "t5")
"""phi3: its linears are fused in the files as well, unlike those of tests/parity/test_lora.py."""


@pytest.mark.parametrize(
    "family",
    [name if name in _IN_EVERY_RUN else exhaustive(name) for name in models()],
)
def test_adapters_equal_peft(family: str) -> None:
    model, rows = models()[family]()
    check_family(model, FOUR_RANKS, rows, adapters=True)


# ---- parameter counts and initial weights on the ranks --------------------------------------------------------------

_SPECIAL_SHARDING = ("gpt2", "bloom", "falcon 40b", "gemma2", "olmo2", "opt", "t5")
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


@pytest.mark.parametrize(
    "layout",
    [Layout(), FOUR_RANKS],
    ids=str,
)
def test_new_models_have_expected_parameter_counts_and_initial_weights(layout: Layout) -> None:
    families = (*CONFIGS, "t5") if layout.world_size == 1 else _SPECIAL_SHARDING
    for problems in run_ranks(_check_new_models, layout.world_size, families, layout):
        assert not problems


def _check_new_models(families: tuple[str, ...], layout: Layout) -> list[str]:
    return [problem for name in families for problem in _check_new_model(name, layout)]


def _check_new_model(name: str, layout: Layout) -> list[str]:
    """Return wrong parameter counts and initial weights on this rank."""
    from lightning_megatron import MegatronModule
    from tests.parity.sharding import shards

    fields = {**CONFIGS, "t5": MODELS["t5"]}[name]
    std_field = {"opt": "init_std", "t5": "initializer_factor"}.get(
        fields["model_type"], "initializer_range"
    )
    module = MegatronModule(model={**fields, std_field: 0.1}, make_vocab_size_divisible_by=8)
    trainer = trainer_of(Case(layout=layout))
    trainer.validate(
        module,
        DataLoader(padded_sentences(), batch_size=4),  # type: ignore[arg-type]
        verbose=False,
    )
    assert module.model_chunks is not None
    count = sum(
        parameter.numel() for chunk in module.model_chunks for parameter in chunk.parameters()
    )
    pp_rank = trainer.strategy.topology.pp_rank
    model = module.model_config
    parallel = trainer.strategy.parallel
    is_t5 = name == "t5"
    cut = t5_layout(model, parallel) if is_t5 else parallel.layers_per_chunk(model.num_layers)
    expected = rank_parameters(model, cut, parallel, pp_rank)
    problems = (
        []
        if count == expected
        else [f"{name}: {count} parameters on stage {pp_rank}, {expected} counted"]
    )
    # T5's matrices have different standard deviations.
    for shard in () if is_t5 else shards(module):
        std = 0.1
        if model.scaled_residual_init and shard.key.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * model.num_layers)
        if shard.key.endswith(STEPS):
            is_right = bool((shard.data == 1).all())
        elif shard.key.endswith(DECAYS):
            is_right = bool(
                (shard.data >= math.log(0.01)).all() and (shard.data < math.log(16)).all()
            )
            is_right = is_right and bool(shard.data.std() > 0)
        elif shard.key.endswith("out_norm.weight"):
            is_right = bool((shard.data == 1).all())
        elif shard.key.endswith("bias"):
            is_right = bool((shard.data == 0).all())
        elif shard.key.endswith(ALPHAS):
            of_slopes = torch.log(torch.expm1(torch.tensor([0.8, 0.8 - 0.5])))
            is_right = torch.allclose(shard.data, of_slopes.expand_as(shard.data))
        elif shard.key.endswith(CONSTANTS):
            constant = 0.5 if shard.key.endswith("beta") else -1e-6
            is_right = torch.allclose(shard.data, torch.tensor(constant))
        elif "norm" in shard.key:
            is_right = bool((shard.data == (0 if model.zero_centered_norms else 1)).all())
        else:
            # At least hundreds of values, apart from vocabulary padding.
            values = shard.data[shard.data != 0]
            is_right = values.numel() == 0 or abs(values.std().item() / std - 1) < 0.2
        if not is_right:
            problems.append(
                f"{name}: {shard.key} has the mean {shard.data.mean():.3g} and std {shard.data.std():.3g}"
            )
    return problems
