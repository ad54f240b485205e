"""Incompatible settings, models and callbacks are refused in one line before anything is built."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_megatron import MegatronModule, OptimizerOptions, SpikeGuard
from lightning_megatron.run.check import check_loaders
from tests.checkpoint.runs import (
    EXPERT_BIAS,
    LLAMA,
    Run,
    fit,
    make_module,
    make_trainer,
    rows_dataset,
    shuffled_loader,
)
from tests.parity.training import refusal
from tests.ranks import run_ranks

MIXTRAL = Run(model={**LLAMA, "model_type": "mixtral", "num_local_experts": 4})
FP8 = Run(strategy={"fp8": "tensorwise"})
NARROW = {**LLAMA, "intermediate_size": 48}
ODD = {**LLAMA, "head_dim": 6}
ODD_EXPERTS = {"hidden_size": 36, "head_dim": 8}
SELECTIVE = Run(strategy={"recompute": "selective"})
FALCON = SELECTIVE.but(
    model={
        "model_type": "falcon",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
    }
)
BF16 = {"precision": "bf16-mixed"}
SCALER = torch.amp.GradScaler("cpu", init_scale=4.0)
FP16 = {"precision": "16-mixed"}
SCALING = {
    "initial_loss_scale": 4.0,
    "min_loss_scale": 2.0,
    "loss_scale_window": 10,
    "loss_scale_hysteresis": 1,
}
"""Options of the dynamic loss scale, and values that are not their defaults."""


def _override(run: Run, config: str = "transformer", **fields: Any) -> Run:
    return run.but(strategy={f"{config}_config_overrides": fields})


def _without_dynamic_scale() -> Iterator[tuple[str, Run]]:
    """A run for each option of the loss scale that has none, or a constant one."""
    constant = _override(Run(trainer=FP16), "optimizer", loss_scale=64.0)
    of_32_bits = r": expected the dynamic loss scale of .*, got weights in float32"
    for name, value in SCALING.items():
        yield name + f"={value}{of_32_bits}", Run(optimizer={name: value})
        yield name + ".* the constant loss_scale=64.0", constant.but(optimizer={name: value})
    in_bf16 = Run(optimizer={"initial_loss_scale": 1.0}, trainer=BF16)
    yield "initial_loss_scale=1.0: .* got weights in bfloat16", in_bf16
    unscaled = _override(Run(), "optimizer", loss_scale=64.0)
    not_sharded = unscaled.but(strategy={"distributed_optimizer": False})
    yield "loss_scale=64.0: expected precision='16-mixed'", not_sharded


def _single_pass(dp: int) -> Any:
    """Generator of two batches, which cannot be read a second time."""
    rows = torch.stack([row["input_ids"] for row in rows_dataset(16)])
    yield from ({"input_ids": batch} for batch in rows.split(8))


def _uneven(dp: int) -> Any:
    return torch.utils.data.DataLoader(rows_dataset(6), batch_size=3)


BUCKETS = _override(Run(), "ddp", bucket_size=1000)


REFUSED: dict[int, tuple[tuple[str, Run], ...]] = {
    1: (
        *_without_dynamic_scale(),
        (
            r"the weights of this model \(768,.* parameters\) take .* GiB on 1 rank of",
            Run(model={"n_embd": 4 * 10**6}),
        ),
        (
            "of 3 rows cannot be cut into num_microbatches=2 of equal size; give the DataLoader a batch_size that is a "
            "multiple of 2, or choose num_microbatches from 1, 3",
            Run(loader=_uneven, strategy={"num_microbatches": 2}),
        ),
        ("fp8='rowwise' is unknown; choose from tensorwise", Run(strategy={"fp8": "rowwise"})),
        ("fp8: expected precision='bf16-mixed'", FP8),
        (
            r"num_attention_heads \* kv_channels / tp .* got 24; choose",
            FP8.but(model=ODD, trainer=BF16),
        ),
        ("cuda_graphs=True: expected tp=1, .* on GPUs.*a cpu", Run(strategy={"cuda_graphs": True})),
        ("ep=2: expected a divisor of the 1 ranks", MIXTRAL.but(strategy={"ep": 2})),
        ("expected at most num_experts=4, got 5", MIXTRAL.but(model={"num_experts_per_tok": 5})),
        ("together, got one of", _override(MIXTRAL, moe_router_score_function="sigmoid")),
        (
            "moe_token_dispatcher_type='flex' is unknown",
            _override(MIXTRAL, moe_token_dispatcher_type="flex"),
        ),
        (
            "moe_router_bias_update_rate: expected a model with",
            Run(model=LLAMA, strategy=EXPERT_BIAS),
        ),
        ("router_jitter_noise=0.1", MIXTRAL.but(model={"router_jitter_noise": 0.1})),
        (
            "hidden_size=36: expected a multiple of 8 in bfloat16",
            MIXTRAL.but(model=ODD_EXPERTS, trainer=BF16),
        ),
        (
            "experts' ffn_hidden_size=46: expected a multiple of 4 in",
            MIXTRAL.but(model={"intermediate_size": 46}),
        ),
        (
            "recompute_modules with 'mlp': expected MLPs without biases",
            _override(SELECTIVE, recompute_modules=["mlp"]),
        ),
        (
            r"recompute_modules=\['moe'\]: expected parts of the model, got 'moe', which no layer",
            _override(SELECTIVE, recompute_modules=["moe"]),
        ),
        (
            "reduce_scatter_with_fp32_accumulation=True: expected distributed_optimizer=True",
            _override(
                Run(strategy={"distributed_optimizer": False}),
                "ddp",
                reduce_scatter_with_fp32_accumulation=True,
            ),
        ),
        (
            r"\['mlp'\] is not supported by a layer with parallel",
            _override(FALCON, recompute_modules=["mlp"]),
        ),
        (
            "expected bf16-mixed or 32-true, got 16-mixed",
            MIXTRAL.but(trainer={"precision": "16-mixed"}),
        ),
        (
            "overrides: got bias_activation_fusion=True, and Megatron says: ",
            _override(Run(), bias_activation_fusion=True),
        ),
        (
            r"recompute_modules=\['core_attn'\]: expected recompute='selective', whose",
            _override(Run(), recompute_modules=["core_attn"]),
        ),
        (
            "distribute_saved_activations=True: expected recompute='full' and tp > 1",
            _override(Run(), distribute_saved_activations=True),
        ),
        (
            "tp_comm_overlap=True: expected sequence_parallel=True and tp > 1",
            _override(Run(), tp_comm_overlap=True),
        ),
        (
            "microbatch_group_size_per_vp_stage=2: expected vpp",
            _override(Run(), microbatch_group_size_per_vp_stage=2),
        ),
        (
            "moe_router_bias_update_rate=0.1: expected moe_router_enable_expert_bias=True",
            _override(MIXTRAL, moe_router_bias_update_rate=0.1),
        ),
        ("moe_z_loss_coeff.* nothing reads it here", _override(Run(), moe_z_loss_coeff=0.1)),
        (
            "moe_aux_loss_coeff.* set it in the model's config",
            _override(Run(), moe_aux_loss_coeff=0.1),
        ),
        (
            r"expected no 'lr', got lr=0\.1; use MegatronModule\(lr=\)$",
            _override(Run(), "optimizer", lr=0.1),
        ),
        (
            "Megatron's OptimizerConfig, got 'loss_scal'; did you",
            _override(Run(), "optimizer", loss_scal=1.0),
        ),
        (
            "loss_scale='1e3' must be a number, and is a str",
            _override(Run(), "optimizer", loss_scale="1e3"),
        ),
        (
            r"use MegatronStrategy\(offload_optimizer=\)$",
            _override(Run(), "optimizer", optimizer_cpu_offload=True),
        ),
        (
            "it is Transformer Engine's Adam",
            _override(Run(), "optimizer", exp_avg_dtype=torch.bfloat16),
        ),
        (
            r"use MegatronStrategy\(overlap_communication=\)$",
            _override(Run(), "ddp", overlap_grad_reduce=True),
        ),
        *(
            (
                f"bucket_size=1000: expected gradients .* got {name}={value}",
                BUCKETS.but(strategy={name: value}),
            )
            for name, value in (("overlap_communication", False), ("cuda_graphs", True))
        ),
        (
            "max_skips_in_a_row=3: expected on_nan='skip', or the overflows of precision='16-mixed'",
            Run(strategy={"max_skips_in_a_row": 3}),
        ),
        (
            "load_weights_only=True: expected ckpt_path, whose weights",
            Run(strategy={"load_weights_only": True}),
        ),
        (r"gradient_clip_val=-1\.0 must be at least 0", Run(trainer={"gradient_clip_val": -1.0})),
        (
            "gradient_clip_algorithm='value' is not supported: Megatron clips by norm",
            Run(trainer={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
        ),
        (
            "recompute_method='block', .*: expected recompute='full', .*, got 'selective'",
            Run(strategy={"recompute": "selective", "recompute_method": "block"}),
        ),
        (
            "recompute_num_layers=2: expected recompute='full', .*, got None",
            Run(strategy={"recompute_num_layers": 2}),
        ),
        ("detect_anomaly=True: expected False.*on_nan=", Run(trainer={"detect_anomaly": True})),
        (
            "val_check_interval=a time: expected steps",
            Run(trainer={"val_check_interval": {"minutes": 5}}),
        ),
        ("sync_batchnorm=True: expected False", Run(trainer={"sync_batchnorm": True})),
        (
            r"MixedPrecision\(scaler=...\): expected none.*OptimizerOptions\(initial_loss_scale=",
            Run(trainer={"plugins": [MixedPrecision("16-mixed", "cpu", scaler=SCALER)]}),
        ),
        (
            "checkpoint plugin AsyncCheckpointIO: expected none",
            Run(trainer={"plugins": [AsyncCheckpointIO()]}),
        ),
        (
            "expected a loader for several passes.* got a generator",
            Run(loader=_single_pass, trainer={"max_steps": 5}),
        ),
    ),
    2: (
        (
            "fp8: expected ffn_hidden_size / tp",
            FP8.but(
                model=NARROW,
                strategy={"tp": 2},
                trainer=BF16,
            ),
        ),
        ("ep=2: expected a model with experts, got llama", Run(model=LLAMA, strategy={"ep": 2})),
        ("trained with sequence_parallel=True", MIXTRAL.but(strategy={"tp": 2})),
    ),
    3: (("ep=3 .*num_experts=4", MIXTRAL.but(strategy={"ep": 3})),),
}
"""By number of ranks: regular expression of the message, and the run."""


def _refusals(runs: tuple[Run, ...]) -> list[str]:
    return [refusal(fit, run) for run in runs]


def test_every_option_of_the_loss_scale_is_tried() -> None:
    names = {each.name for each in fields(OptimizerOptions)}
    assert {name for name in names if "loss_scale" in name} == SCALING.keys()


@pytest.mark.parametrize("ranks", REFUSED)
def test_incompatible_settings_are_refused_on_every_rank(ranks: int) -> None:
    patterns, runs = zip(*REFUSED[ranks], strict=True)
    for messages in run_ranks(_refusals, ranks, runs):
        for pattern, message in zip(patterns, messages, strict=True):
            assert re.search(pattern, message), message


def _train_without_effect(folder: Path) -> int:
    """Steps of a run with options that only another device, or a later start of the job, honours."""
    trainer = {"max_steps": 1, "default_root_dir": folder}
    run = BUCKETS.but(strategy={"load_weights_only": True}, trainer=trainer)
    return int(fit(run.but(ckpt_path="last"))[0].global_step)


def test_options_that_act_elsewhere_are_no_mistake(tmp_path: Path) -> None:
    assert run_ranks(_train_without_effect, 1, tmp_path) == [1]


class Unfreezing(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None: ...

    def finetune_function(
        self,
        pl_module: Any,
        epoch: int,
        optimizer: object,
    ) -> None: ...


class ManualOptimization(MegatronModule):
    automatic_optimization = False


CALLBACKS: tuple[tuple[Any, str], ...] = (
    (
        callbacks.GradientAccumulationScheduler({4: 2}),
        "Scheduler does not work with MegatronStrategy.*num_microbatches",
    ),
    (
        callbacks.StochasticWeightAveraging(1e-2),
        "StochasticWeightAveraging copies the module.*remove it",
    ),
    (callbacks.EMAWeightAveraging(), "EMAWeightAveraging copies the module.*remove it"),
    (
        callbacks.ModelPruning("l1_unstructured", amount=0.5),
        "ModelPruning masks whole weights.*remove it",
    ),
    (Unfreezing(), "Unfreezing adds parameters to the optimizer.*requires_grad_"),
    (
        SpikeGuard(),
        r"SpikeGuard has no checkpoint to roll back to; add ModelCheckpoint\(every_n_train_steps=",
    ),
)


def _check_callbacks_and_modules() -> None:
    run = Run(trainer={"max_steps": 1})
    trainer, _ = fit(run, callbacks.GradientAccumulationScheduler({0: 1}))
    assert trainer.global_step == 1
    for hook, pattern in CALLBACKS:
        assert re.search(pattern, refusal(fit, run, hook))
    manual = refusal(fit, run, module_class=ManualOptimization)
    assert "automatic_optimization=False does not work" in manual
    compiled = torch.compile(make_module(run))
    assert "pass the module itself" in refusal(make_trainer(run).fit, compiled, shuffled_loader(1))


class WithExample(MegatronModule):
    example_input_array = torch.zeros(1, 4, dtype=torch.long)


def _of_one_rank(folder: Path) -> list[str]:
    """Messages about what Lightning would do with the batches, or the model, of one rank."""
    run = Run(strategy={"pp": 2}, trainer={"max_steps": 1})
    monitor = callbacks.ThroughputMonitor(batch_size_fn=len)
    drawing = run.but(trainer={"logger": TensorBoardLogger(folder, log_graph=True)})
    iterating = [
        refusal(fit, run, module_class=type("Own", (MegatronModule,), {step: _iterate}))
        for step in STEPS
    ]
    return [
        refusal(fit, run, monitor),
        refusal(fit, drawing, module_class=WithExample),
        *iterating,
    ]


STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _iterate(self: object, dataloader_iter: object) -> None:
    """Would be a step that takes its batches itself."""


def test_what_takes_one_rank_for_a_replica_is_refused(tmp_path: Path) -> None:
    for monitor, drawing, *iterating in run_ranks(_of_one_rank, 2, tmp_path):
        for step, message in zip(STEPS, iterating, strict=True):
            assert f"Own.{step} with dataloader_iter would read another batch" in message
        assert "ThroughputMonitor counts the batch of a replica once on each of its" in monitor
        assert "log_graph=True): expected False, since rank 0 alone would run the model" in drawing


ITEMS = [*rows_dataset(8)]
ZEROS = torch.zeros(4, 8, dtype=torch.long)
NO_LOADERS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "train_dataloaders: expected a DataLoader, got a list of dict; give DataLoader(",
        {"train_dataloaders": ITEMS},
    ),
    (
        "got a TensorDataset; give DataLoader(",
        {"train_dataloaders": torch.utils.data.TensorDataset(ZEROS)},
    ),
    ("got a dict of Tensor; give", {"train_dataloaders": {"input_ids": ZEROS}}),
    ("got a str; give", {"train_dataloaders": "corpus_text_document"}),
    ("got an int; give", {"train_dataloaders": 5}),
    (
        "val_dataloaders: expected a DataLoader, got a list of dict",
        {"train_dataloaders": shuffled_loader(1), "val_dataloaders": ITEMS},
    ),
    (
        "datamodule: expected a LightningDataModule, got a DataLoader; pass loaders as train_dataloaders",
        {"datamodule": shuffled_loader(1)},
    ),
)
"""Message, and arguments of ``Trainer.fit``."""


def _check_loaders() -> None:
    run = Run(trainer={"max_steps": 1})
    for message, arguments in NO_LOADERS:
        error = refusal(make_trainer(run).fit, make_module(run), **arguments)
        assert message in error, error
    for loader in (
        shuffled_loader(1),
        [shuffled_loader(1)],
        {"a": shuffled_loader(1)},
        _single_pass(1),
    ):
        check_loaders({"train_dataloaders": loader, "val_dataloaders": None})


def test_datasets_in_place_of_loaders_are_refused() -> None:
    run_ranks(_check_loaders, 1)


def test_unsupported_callbacks_and_modules_are_refused() -> None:
    run_ranks(_check_callbacks_and_modules, 1)
