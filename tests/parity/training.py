"""Small training runs on any layout, recorded tensor by tensor.

``outcome(case)`` starts the ranks of a ``Case``; each runs ``train``: a Trainer with MegatronStrategy on a
MegatronModule. It returns losses, gradient norms, full gradients of the first step and full weights, so that any
layout can be compared with one process.
"""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.checkpoint.runs import callback
from tests.models import GPT2, LLAMA, NO_DROPOUT, QUIET, T5, VOCAB_SIZE
from tests.parity.sharding import full_tensors, gradients_as_weights, shards
from tests.ranks import run_ranks

SEED = 11
SEQ_LENGTH = 16

Labels = Literal["all", "uneven", "short"]
"""``uneven``: the number of targets differs from row to row, from none to all. ``short``: one row of eight has all
targets, the others half, and batches are cut to their longest row, so that their length differs between replicas."""

# Weights of about 1/sqrt(h) give activations of size 1: attention and MLP are as nonlinear as in a real model.
_COMMON = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.2}
_LLAMA = {"model_type": "llama", **LLAMA, **_COMMON}
_LLAMA |= {"max_position_embeddings": SEQ_LENGTH, "tie_word_embeddings": False}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        **GPT2,
        **NO_DROPOUT,
        **_COMMON,
        "n_positions": SEQ_LENGTH,
    },
    "llama": _LLAMA,
    "glm4": {**_LLAMA, "model_type": "glm4", "head_dim": 8, "pad_token_id": None},
    # No load-balancing loss: it depends on which rows share a microbatch. tests/families compares it with transformers.
    "experts": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 20,
        "router_aux_loss_coef": 0.0,
    },
    "t5": {"model_type": "t5", **T5, "vocab_size": VOCAB_SIZE},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout: arguments of MegatronStrategy, and the number of replicas ``dp``."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    cp: int = 1
    cp_comm_type: Literal["auto", "a2a", "all_gather"] = "auto"
    sequence_parallel: bool = False
    num_microbatches: int = 1
    distributed_optimizer: bool = True
    overlap_communication: bool | None = None
    recompute: Literal["selective", "full"] | None = None
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1
    transformer_config_overrides: tuple[tuple[str, Any], ...] = ()
    optimizer_config_overrides: tuple[tuple[str, Any], ...] = ()
    ddp_config_overrides: tuple[tuple[str, Any], ...] = ()
    fp8: Literal["tensorwise"] | None = None
    cuda_graphs: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    ep: int = 1
    offload_optimizer: bool | float = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        """Fields that differ from the defaults, for test ids."""
        default = asdict(Layout())
        changed = {name: value for name, value in asdict(self).items() if value != default[name]}
        return "-".join(f"{name}={value}" for name, value in changed.items()) or "one_process"


TP2 = Layout(tp=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
TP2_DP2 = Layout(tp=2, dp=2)
TP2_PP2 = Layout(tp=2, pp=2, num_microbatches=2)
PP2 = Layout(pp=2, num_microbatches=2)
PP2_DP2 = Layout(pp=2, dp=2, num_microbatches=2)
FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)
INTERLEAVED = Layout(pp=2, vpp=2, num_microbatches=2)
RECOMPUTED = Layout(tp=2, sequence_parallel=True, recompute="full")
DP2 = Layout(dp=2)
CP2 = Layout(cp=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run. Cases that differ only in their layout must have equal outcomes."""

    layout: Layout = field(default_factory=Layout)
    model: str = "gpt2"
    model_fields: tuple[tuple[str, Any], ...] = ()
    """Fields of the model's config to change."""
    make_vocab_size_divisible_by: int = 8
    labels: Labels = "all"
    steps: int = 4
    global_batch_size: int = 12
    """A multiple of every dp x num_microbatches of the tests."""
    lr: float = 5e-3
    optimizer: tuple[tuple[str, Any], ...] = (("eps", 1e-3), ("weight_decay", 0.1))
    """Fields of OptimizerOptions. Adam divides by the gradient's size: with the usual eps of 1e-8 it would blow up the
    rounding errors of gradients that are mathematically zero (such as a key's bias) to full steps of ``lr``."""
    clip: float | None = None
    precision: str = "32-true"
    accelerator: Literal["cpu", "gpu"] = "cpu"

    @property
    def on_one_process(self) -> Self:
        """The same run on one process, the reference."""
        return replace(self, layout=Layout())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run; on a rank, with its shards instead of full tensors."""

    losses: list[float]
    """Loss of each step, before its update."""
    grad_norms: list[float]
    """Gradient norm of each step, before clipping."""
    initial_weights: Any
    gradients: Any
    """Gradients of the first step, before clipping."""
    weights: Any
    """Weights after the last step."""


@functools.cache
def outcome(case: Case) -> Outcome:
    """Run ``case`` on the ranks of its layout; cached for the session."""
    # The summation order of some bf16 CUDA kernels varies from run to run.
    copies_rtol = 0.0 if case.accelerator == "cpu" else 0.02
    return join_outcomes(
        run_ranks(train, case.layout.world_size, case, timeout=240),
        copies_rtol,
    )


def join_outcomes(ranks: list[Outcome], copies_rtol: float = 0.0) -> Outcome:
    """Combine the outcomes of all ranks into full tensors; losses and gradient norms must be equal on all ranks."""
    for rank in ranks[1:]:
        assert rank.losses == ranks[0].losses
        assert rank.grad_norms == ranks[0].grad_norms

    return Outcome(
        losses=ranks[0].losses,
        grad_norms=ranks[0].grad_norms,
        initial_weights=full_tensors([rank.initial_weights for rank in ranks], copies_rtol),
        gradients=full_tensors([rank.gradients for rank in ranks], copies_rtol),
        weights=full_tensors([rank.weights for rank in ranks], copies_rtol),
    )


def common_result(
    fn: Callable[..., Any],
    case: Case,
    *args: Any,
) -> Any:
    """Run ``fn(case, *args)`` on the ranks of the layout, assert that all return the same, and return it."""
    first, *others = run_ranks(
        fn,
        case.layout.world_size,
        case,
        *args,
        timeout=240,
    )
    assert all(other == first for other in others)
    return first


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def refusal(
    call: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> str:
    """Message of the ConfigError that a call raises; asserts that it is one line."""
    import pytest

    from lightning_megatron.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused_fit(case: Case, module: Any, **options: Any) -> str:
    """Message of the ConfigError that training ``module`` raises; ``options`` are arguments of the Trainer."""
    return refusal(trainer_of(case, **options).fit, module, loader_of(case))


def metrics_of(trainer: Any) -> dict[str, float]:
    """What callbacks see: all metrics logged last."""
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def recorded_rates(rates: list[float]) -> Any:
    """Callback that appends the learning rate of each step to ``rates``."""

    def append(trainer: Any, *_: Any) -> None:
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    return callback(on_train_batch_start=append)


class Sentences(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, identical in every process."""

    def __init__(self, num_rows: int, labels: Labels = "all") -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(
            0,
            VOCAB_SIZE,
            (num_rows, SEQ_LENGTH),
            generator=generator,
        )
        self.labels = self.tokens.clone()
        if labels == "uneven":
            for row in range(num_rows):
                # Ignore the first 0, 7, 14, 4, 11, 1, ... labels.
                self.labels[row, : (7 * row) % (SEQ_LENGTH + 1)] = -100
        if labels == "short":
            self.labels[torch.arange(num_rows) % 8 > 0, SEQ_LENGTH // 2 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def train(case: Case) -> Outcome:
    """Train ``case.steps`` steps on this rank."""
    return train_module(module_of(case), case, loader_of(case))


def train_module(
    module: Any,
    case: Case,
    loader: Any,
    collect: Any = shards,
    ckpt_path: Any = None,
    **options: Any,
) -> Outcome:
    """Train ``module`` on ``loader``; ``collect`` returns its tensors, ``options`` are arguments of the Trainer."""
    recorded: dict[str, Any] = {
        "losses": [],
        "grad_norms": [],
        "gradients": [],
    }

    def begin(trainer: Any, pl_module: Any) -> None:
        recorded["initial_weights"] = collect(pl_module)

    def step(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 0:
            with gradients_as_weights(pl_module):
                recorded["gradients"] = collect(pl_module)

    def end(
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        *_: Any,
    ) -> None:
        recorded["losses"].append(outputs["loss"].item())
        recorded["grad_norms"].append(trainer.strategy.optimizer_report.grad_norm)

    recorder = callback(on_train_start=begin, on_before_optimizer_step=step, on_train_batch_end=end)
    options["callbacks"] = [recorder, *options.pop("callbacks", ())]
    trainer_of(case, **options).fit(module, loader, ckpt_path=ckpt_path)
    return Outcome(**recorded, weights=collect(module))


def module_of(
    case: Case,
    module_class: type | None = None,
    **options: Any,
) -> Any:
    """Create the MegatronModule (or ``module_class``) of ``case``; ``options`` are further constructor arguments."""
    from lightning.pytorch import seed_everything

    from lightning_megatron import MegatronModule
    from lightning_megatron.engine.optimizer_options import OptimizerOptions

    seed_everything(SEED, verbose=False)
    return (module_class or MegatronModule)(
        model={**MODELS[case.model], **dict(case.model_fields)},
        lr=case.lr,
        optimizer=OptimizerOptions(**dict(case.optimizer)),
        make_vocab_size_divisible_by=case.make_vocab_size_divisible_by,
        **options,
    )


def trainer_of(case: Case, **options: Any) -> Any:
    """Create the Trainer of ``case``, which writes no files; ``options`` change or add arguments."""
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronPrecision, MegatronStrategy

    layout = {name: value for name, value in asdict(case.layout).items() if name != "dp"}
    arguments: dict[str, Any] = {
        "accelerator": case.accelerator,
        "devices": case.layout.world_size,
        "strategy": MegatronStrategy(**layout),
        "precision": case.precision,
        "gradient_clip_val": case.clip,
        "max_steps": case.steps,
    }
    if case.precision == "16-mixed" and case.accelerator == "cpu":
        # Lightning would use bf16-mixed.
        arguments |= {"precision": None, "plugins": [MegatronPrecision("16-mixed")]}
    return Trainer(**{**QUIET, **arguments, **options})


def loader_of(case: Case) -> DataLoader[dict[str, Tensor]]:
    """DataLoader with one epoch of ``case.steps`` global batches, the same for every layout."""
    rows = Sentences(case.steps * case.global_batch_size, case.labels)
    collate = _collate_short if case.labels == "short" else None
    return DataLoader(
        rows,
        batch_size=case.global_batch_size // case.layout.dp,
        collate_fn=collate,
    )


def _collate_short(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    end = SEQ_LENGTH if (batch["labels"][:, -1] != -100).any() else SEQ_LENGTH // 2
    return {name: tensor[:, :end] for name, tensor in batch.items()}
