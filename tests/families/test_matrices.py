"""What Muon takes for a matrix is a matrix of the Hugging Face model, in every family and at any layout.

Each element of a weight gets the number of its matrix, or NaN if it is in none, and the weights are then saved under
their Hugging Face names: a tensor must have one number, and no other tensor the same.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families import test_experts
from tests.families.cards import models
from tests.families.parity import MAKE_VOCAB_SIZE_DIVISIBLE_BY, Rows
from tests.families.parity import padded_sentences as sentences
from tests.marks import exhaustive
from tests.parity.hugging_face import tensors_of
from tests.parity.training import FOUR_RANKS, Case, Layout, trainer_of
from tests.ranks import run_ranks

FUSED = {
    "attn.c_attn.weight": 3,
    "query_key_value.weight": 3,
    "qkv_proj.weight": 3,
    "mlp.gate_up_proj.weight": 2,
    "linear_attn.in_proj_qkvz.weight": 4,
    "linear_attn.in_proj_qkv.weight": 3,
    "linear_attn.in_proj_ba.weight": 2,
}
"""Ends of names of tensors that hold several matrices in the files, too, and how many."""
NO_MATRICES = (
    "mlp.gate.weight",  # router
    "mlp.router.weight",
    "block_sparse_moe.gate.weight",
    "shared_expert_gate.weight",
    "relative_attention_bias.weight",
    "_proj_bias",  # of experts
    "linear_attn.conv1d.weight",
)
"""Ends of names of other tensors of layers with two or more axes."""


def _numbered(module: Any) -> dict[str, list[float]]:
    """The numbers in each tensor, by Hugging Face name; those of rank 0."""
    from lightning_megatron.models.matrices import matrices_of

    strategy = module.trainer.strategy
    matrices = matrices_of(module.model_chunks)
    first = 1000 * strategy.topology.pp_rank
    for buffer in module.model_chunks.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    for parameter in module.model_chunks.parameters():
        if parameter not in matrices:
            parameter.data.fill_(torch.nan)
            continue
        layout = matrices[parameter]
        rows = parameter.data.view(-1, layout.columns)
        begin = 0
        for number, count in layout.blocks:
            # The experts of another ep rank are other matrices.
            rows[begin : begin + count] = first + number
            begin += count
        assert begin == len(rows)
        first += layout.count
    return {name: tensor.unique().tolist() for name, tensor in tensors_of(module).items()}


def _numbers_of_families(
    families: list[tuple[str, Any, Rows]],
    layout: Layout,
) -> dict[str, dict[str, list[float]]]:
    from lightning_megatron import MegatronModule
    from lightning_megatron.models.matrices import matrices_of
    from lightning_megatron.planning.run import PlannedRun

    numbers = {}
    for name, config, rows in families:
        module = MegatronModule(
            model=config,
            make_vocab_size_divisible_by=MAKE_VOCAB_SIZE_DIVISIBLE_BY,
        )
        loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // layout.dp)  # type: ignore[arg-type]
        trainer_of(Case(layout=layout)).validate(module, loader, verbose=False)
        assert module.model_chunks is not None
        matrices = matrices_of(module.model_chunks)
        planned = PlannedRun(
            model=module.model_config,
            lengths=(16,),
            world_size=layout.world_size,
            parallel=module.megatron.parallel,
            uses_muon=True,
        )
        count = sum(planned.matrices(module.megatron.topology.pp_rank).values())
        assert count == sum(weight.numel() for weight in matrices), name
        with module.megatron.engine():
            numbers[name] = _numbered(module)
    return numbers


def _family(name: str) -> tuple[str, Any, Rows]:
    if name in test_experts.FAMILIES:
        return name, test_experts.mixture(name).config, sentences()
    hf_model, rows = models()[name]()
    return name, hf_model.config, rows


def _problems(tensors: dict[str, list[float]]) -> Iterator[str]:
    owners: dict[float, str] = {}
    fused = dict(FUSED)
    if any("linear_attn" in name for name in tensors):
        fused["self_attn.q_proj.weight"] = 2  # and gates
    for name, numbers in tensors.items():
        is_matrix = not all(number != number for number in numbers)
        if is_matrix != _is_expected(name):
            yield f"{name}: matrix={is_matrix}"
        if not is_matrix:
            continue
        expected = next((count for end, count in fused.items() if name.endswith(end)), 1)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue  # of all experts, gpt-oss
        if len(numbers) != expected:
            yield f"{name}: {len(numbers)} matrices, expected {expected}"
        for number in numbers:
            if number in owners:
                yield f"{name}: the matrix of {owners[number]}"
            owners[number] = name


def _is_expected(name: str) -> bool:
    is_in_layer = any(part in f".{name}" for part in (".layers.", ".layer.", ".h.", ".block."))
    is_norm = any(part in name for part in ("norm", "ln_", "LayerNorm", ".ln."))
    is_bias = name.endswith((".bias", "_bias", ".A_log", ".sinks", *NO_MATRICES))
    is_constant = ".act_fn." in name
    return is_in_layer and not is_norm and not is_bias and not is_constant


_IN_EVERY_RUN = ["phi3", "t5", "megatron-bert", "apertus"]
_WITH_EXPERTS = ["qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"]
_OTHERS = [
    name
    for name in chain(models(), test_experts.FAMILIES)
    if name not in (*_IN_EVERY_RUN, *_WITH_EXPERTS)
]


@pytest.mark.parametrize(
    ("families", "layout"),
    [
        pytest.param(_IN_EVERY_RUN, FOUR_RANKS, id="tp2 pp2"),
        pytest.param(_WITH_EXPERTS, Layout(tp=2, sequence_parallel=True), id="experts tp2"),
        exhaustive(_OTHERS, Layout(), id="others"),
        exhaustive(_OTHERS, Layout(tp=4), id="others tp4"),
    ],
)
def test_matrices_are_those_of_hugging_face(families: list[str], layout: Layout) -> None:
    tables = run_ranks(
        _numbers_of_families,
        layout.world_size,
        [_family(name) for name in families],
        layout,
        timeout=300,
    )[0]
    problems = {name: list(_problems(tensors)) for name, tensors in tables.items()}
    assert not any(problems.values()), {k: v for k, v in problems.items() if v}
