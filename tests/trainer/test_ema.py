"""EMA: torch's average at every layout, in checkpoints, in evaluations and in exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    LLAMA,
    NO_DROPOUT,
    VOCAB_SIZE,
    Run,
    callback,
    checkpoints_at,
    fit,
    make_module,
    make_trainer,
    read_tensors,
    rows_dataset,
    shuffled_loader,
)
from tests.marks import exhaustive, on_gpus
from tests.parity.training import refusal
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

DECAY = 0.7
EMA_ENTRY = "optimizer.state.ema."
MASTER_ENTRY = "optimizer.state.param."
SMALL: dict[str, Any] = {"n_layer": 2, **NO_DROPOUT}
LORA: dict[str, Any] = {"lora": {"rank": 2}}
EXPERTS: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}

BF16: dict[str, Any] = {"precision": "bf16-mixed"}


def _train(
    run: Run,
    folder: Path,
    options: dict[str, Any],
) -> int:
    """Train with EMA, save each step, and return the number of updates."""
    from lightning_megatron import EMA

    ema = EMA(decay=DECAY, **options)
    fit(run, ema, checkpoints_at(folder))
    return ema.num_updates


def _entries(path: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors by the name of their weight, without the rows that pad the vocabulary."""
    found = {}
    for name, tensor in read_tensors(path).items():
        if name.startswith(prefix):
            is_padded = "word_embeddings" in name or "output_layer" in name
            found[name.removeprefix(prefix)] = tensor[:VOCAB_SIZE] if is_padded else tensor
    return found


def _averaged(paths: list[Path]) -> dict[str, Tensor]:
    """Torch's average of the master weights in checkpoints."""
    model = torch.nn.ParameterDict()
    average: AveragedModel | None = None
    for path in paths:
        masters = _entries(path, MASTER_ENTRY)
        for name, master in masters.items():
            model[name.replace(".", "/")] = torch.nn.Parameter(master)
        if average is None:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average.update_parameters(model)
    assert average is not None
    averages = dict(average.module.named_parameters())
    return {name.replace("/", "."): each.detach() for name, each in averages.items()}


def _run(
    layout: dict[str, Any],
    steps: int,
    **changes: Any,
) -> Run:
    model = SMALL
    if changes.get("model", {}).get("model_type"):
        model = {}
    run = Run(strategy=layout, trainer={"max_steps": steps}, model=model)
    return run.but(**changes)


TP2 = {"tp": 2}
DP2: dict[str, Any] = {"num_microbatches": 1}
PP2 = {"pp": 2}


@pytest.mark.parametrize(
    ("first", "then", "changes"),
    [
        pytest.param(TP2, DP2, {}, id="tp2-dp2"),
        pytest.param(PP2, DP2 | {"distributed_optimizer": False}, {"trainer": BF16}, id="pp2-bf16"),
        exhaustive(TP2 | {"sequence_parallel": True}, PP2, {}, id="sp-pp2"),
        exhaustive(PP2 | {"vpp": 2}, DP2, {"model": {"n_layer": 4}}, id="vpp2-dp2"),
        exhaustive({"cp": 2}, PP2 | {"vpp": 2}, {"model": {"n_layer": 4}}, id="cp2-vpp2"),
        exhaustive(DP2, TP2, {"trainer": BF16}, id="dp2-tp2-bf16"),
        exhaustive({"ep": 2}, DP2, {"model": EXPERTS}, id="ep2-dp2"),
        exhaustive(TP2, PP2, {"module": LORA}, id="lora"),
        exhaustive(TP2, DP2, {"optimizer": {"name": "muon"}}, id="muon"),
        exhaustive(DP2 | {"overlap_communication": True}, TP2, {}, id="overlap"),
    ],
)
def test_average_equals_torchs_and_resumes_at_another_layout(
    first: dict[str, Any],
    then: dict[str, Any],
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    run = _run(first, 2, **changes)
    run_ranks(_train, 2, run, tmp_path, {})
    middle = tmp_path / "step=2.ckpt"
    resumed = _run(
        then,
        4,
        **changes,
    ).but(ckpt_path=str(middle))
    assert run_ranks(_train, 2, resumed, tmp_path, {"device": "cpu"}) == [4, 4]
    paths = [tmp_path / f"step={step}.ckpt" for step in range(1, 5)]
    expected = _averaged(paths)
    found = _entries(paths[-1], EMA_ENTRY)
    assert expected.keys() == found.keys()
    masters = _entries(paths[-1], MASTER_ENTRY)
    for name, average in found.items():
        torch.testing.assert_close(
            average,
            expected[name],
            rtol=1e-6,
            atol=1e-8,
            msg=name,
        )
        if "lora" not in changes.get("module", {}):
            assert not torch.equal(average, masters[name]), name


@pytest.mark.parametrize(
    "device",
    [on_gpus(1, None), on_gpus(1, "cpu")],
    ids=str,
)
def test_average_on_gpus_equals_torchs(device: str | None, tmp_path: Path) -> None:
    """In the memory of the GPU, and copied to the host's at each update."""
    run = _run({}, 4, trainer={**BF16, "accelerator": "gpu"})
    assert run_ranks(_train, 1, run, tmp_path, {"device": device}) == [4]
    paths = [tmp_path / f"step={step}.ckpt" for step in range(1, 5)]
    expected = _averaged(paths)
    found = _entries(paths[-1], EMA_ENTRY)
    assert expected.keys() == found.keys()
    for name, average in found.items():
        torch.testing.assert_close(
            average.cpu(),
            expected[name],
            rtol=1e-6,
            atol=1e-8,
            msg=name,
        )


def test_updates_are_those_of_the_options(tmp_path: Path) -> None:
    options = {"every_n_steps": 2, "start_step": 3}
    (count,) = run_ranks(
        _train,
        1,
        _run({}, 6),
        tmp_path,
        options,
    )
    assert count == 2
    assert not _entries(tmp_path / "step=3.ckpt", EMA_ENTRY)
    expected = _averaged([tmp_path / "step=4.ckpt", tmp_path / "step=6.ckpt"])
    for name, average in _entries(tmp_path / "step=6.ckpt", EMA_ENTRY).items():
        assert torch.equal(average, expected[name]), name


def _rolled_back(folder: Path) -> tuple[list[int], bool]:
    """Counts of updates before and after a rollback, and whether it restores the average."""
    from lightning_megatron import EMA

    ema = EMA(decay=DECAY)
    counts: list[int] = []
    averages: list[list[Tensor]] = []

    def record(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            counts.append(ema.num_updates)
            trainer.strategy.checkpointing.roll_back(before=3)
        if trainer.global_step >= 2:
            counts.append(ema.num_updates)
            with ema.average_parameters():
                averages.append(_weights(module))

    fit(
        _run({}, 3),
        ema,
        callback(on_train_batch_end=record),
        checkpoints_at(folder),
    )
    return counts, _are_equal(*averages)


def test_rollback_restores_the_average(tmp_path: Path) -> None:
    assert run_ranks(_rolled_back, 1, tmp_path) == [([2, 3, 2], True)]


def _weights(module: Any) -> list[Tensor]:
    from lightning_megatron.engine.wrap import finish_parameter_gathers

    with module.megatron.engine(), torch.inference_mode(False), torch.no_grad():
        finish_parameter_gathers(list(module.model_chunks))
    return [
        weight.detach().clone() for chunk in module.model_chunks for weight in chunk.parameters()
    ]


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def _evaluated(
    run: Run,
    folder: Path,
    freezes: bool,
) -> dict[str, Any]:
    """Train, validate after each step, and evaluate in all other ways; return what was found.

    Args:
        run: The run.
        folder: For checkpoints and an export.
        freezes: Whether the first layer is frozen, which checkpoints store in one tensor with the others.
    """
    from torch.utils.data import DataLoader

    from lightning_megatron import EMA, MegatronModule
    from lightning_megatron.engine.wrap import unwrap

    class Freezing(MegatronModule):
        def configure_model(self) -> None:
            super().configure_model()
            for chunk in map(unwrap, self.model_chunks):  # type: ignore[arg-type]
                chunk.decoder.layers[0].requires_grad_(False)

    seen: dict[str, Any] = {"trained": [], "validated": [], "kept": []}

    def on_train_batch_end(trainer: Any, module: Any, *_: Any) -> None:
        seen["trained"].append(_weights(module))

    def on_validation_end(trainer: Any, module: Any) -> None:
        # Weights-only, too: ModelCheckpoint saves the whole run right after this hook.
        seen["validated"].append(_weights(module))
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        assert _are_equal(_weights(module), seen["validated"][-1])

    def on_train_batch_start(trainer: Any, module: Any, *_: Any) -> None:
        seen["kept"].append(_weights(module))

    def on_train_end(trainer: Any, module: Any) -> None:
        seen["kept"].append(_weights(module))

    ema = EMA(decay=DECAY)
    hooks = callback(
        on_train_batch_end=on_train_batch_end,
        on_validation_end=on_validation_end,
        on_train_batch_start=on_train_batch_start,
        on_train_end=on_train_end,
    )
    saver = checkpoints_at(
        folder,
        every_n_train_steps=None,
        monitor="val_loss",
        save_on_train_epoch_end=False,
    )
    module_class = Freezing if freezes else MegatronModule
    trainer, _ = fit(run, hooks, ema, saver, module_class=module_class)
    module = trainer.lightning_module
    trained = seen["trained"][-1]
    loader = DataLoader(rows_dataset(GLOBAL_BATCH), batch_size=GLOBAL_BATCH // 2)
    found: dict[str, Any] = {
        "kept": all(map(_are_equal, seen["trained"], seen["kept"][1:])),
        "differs": not _are_equal(seen["validated"][-1], trained),
        "test": trainer.test(module, loader, verbose=False),
    }
    found["kept_in_test"] = _are_equal(_weights(module), trained)
    prompt = torch.tensor([[1, 2, 3]])
    with ema.average_parameters():
        found["average"] = _are_equal(_weights(module), seen["validated"][-1])
        found["generated"] = module.generate(prompt, max_new_tokens=4).tolist()
        module.save_pretrained(folder / "hf")
    found["kept_at_end"] = _are_equal(_weights(module), trained)
    without = make_trainer(run)
    found["test_of_weights"] = without.test(module, loader, verbose=False)
    saved = str(folder / "step=3.ckpt")
    found["test_of_checkpoint"] = trainer.test(
        module,
        loader,
        ckpt_path=saved,
        verbose=False,
    )
    found["generated_of_checkpoint"] = module.generate(prompt, max_new_tokens=4).tolist()
    found["loaded"] = _are_equal(_weights(module), seen["validated"][-1])
    return found


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        pytest.param(DP2, {}, id="dp2"),
        exhaustive(DP2, {"trainer": BF16}, id="dp2-bf16"),
        exhaustive(PP2, {"trainer": BF16}, id="pp2-bf16"),
        exhaustive(DP2 | {"overlap_communication": True}, {"trainer": BF16}, id="overlap"),
        exhaustive({"ep": 2}, {"model": EXPERTS}, id="experts"),
        exhaustive(TP2, {"trainer": BF16}, id="frozen"),
        exhaustive(DP2 | {"async_save": True}, {}, id="async"),
    ],
)
def test_evaluations_use_the_average_and_training_goes_on_with_the_weights(
    strategy: dict[str, Any],
    changes: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    from lightning_megatron.convert import ConvertOptions
    from lightning_megatron.convert.convert import convert

    run = _run(
        strategy,
        3,
        validate=True,
        **changes,
    ).but(trainer={"val_check_interval": 1})
    freezes = "frozen" in request.node.name
    for found in run_ranks(_evaluated, 2, run, tmp_path, freezes):
        for name in ("kept", "kept_in_test", "kept_at_end", "differs", "average", "loaded"):
            assert found[name], name
        assert found["test_of_checkpoint"] == found["test"] != found["test_of_weights"]
        assert found["generated"] == found["generated_of_checkpoint"]
    saved = tmp_path / "step=3.ckpt"
    expected = _averaged([tmp_path / f"step={step}.ckpt" for step in (1, 2, 3)])
    trained = read_tensors(saved)
    weights_only = read_tensors(tmp_path / "weights.ckpt")
    for name, average in _entries(saved, EMA_ENTRY).items():
        first = 1 if freezes and ".layers." in name else 0  # of a stack, the layers with an average
        torch.testing.assert_close(
            average[first:],
            expected[name][first:],
            rtol=1e-6,
            atol=1e-8,
        )
        again = weights_only[EMA_ENTRY + name][: len(average)]
        assert torch.equal(average[first:], again[first:]), name
        assert torch.equal(trained[name], weights_only[name]), name
    options = ConvertOptions(
        load_path=saved,
        save_path=tmp_path / "ema",
        to="hf",
        ema=True,
    )
    convert(options)
    converted = load_file(tmp_path / "ema" / "model.safetensors")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == exported.keys()
    for name, weight in exported.items():
        assert torch.equal(converted[name].to(weight.dtype), weight), name


def _adapted(folder: Path) -> None:
    """Train adapters of a base model; save them in a checkpoint of weights alone, and the averaged ones for peft."""
    from lightning_megatron import EMA

    trainer, _ = fit(_run({}, 1))
    trainer.lightning_module.save_pretrained(folder / "base")
    base: dict[str, Any] = {"model": str(folder / "base"), "pretrained": True}
    ema = EMA(decay=DECAY)
    trainer, _ = fit(
        _run(
            TP2,
            3,
            module={**base, **LORA},
        ),
        ema,
    )
    trainer.save_checkpoint(folder / "adapters.ckpt", weights_only=True)
    with ema.average_parameters():
        trainer.lightning_module.save_pretrained(folder / "peft")


@pytest.mark.exhaustive
def test_averaged_adapters_are_in_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from lightning_megatron.convert import ConvertOptions
    from lightning_megatron.convert.convert import convert

    run_ranks(_adapted, 2, tmp_path)
    adapters: dict[bool, dict[str, Tensor]] = {}
    for ema in (False, True):
        folder = tmp_path / f"converted {ema}"
        saved = tmp_path / "adapters.ckpt"
        convert(
            ConvertOptions(
                load_path=saved,
                save_path=folder,
                to="peft",
                ema=ema,
            )
        )
        adapters[ema] = load_file(folder / "adapter_model.safetensors")
    exported = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert exported.keys() == adapters[True].keys()
    for name, weight in exported.items():
        assert torch.equal(adapters[True][name], weight), name
        assert not torch.equal(adapters[False][name], weight), name


def _failed(run: Run) -> tuple[bool, bool]:
    """Whether weights differed in a validation that failed on rank 0 alone, and whether they are back then."""
    import os

    from lightning_megatron import EMA

    seen: dict[str, Any] = {}

    def fail(trainer: Any, module: Any, *_: Any) -> None:
        seen["averaged"] = _weights(module)
        if trainer.global_step == 2:
            raise RuntimeError("of the user")

    def keep(trainer: Any, module: Any, *_: Any) -> None:
        seen["module"] = module
        seen["trained"] = _weights(module)

    hooks = callback(on_validation_batch_start=fail, on_train_batch_end=keep)
    with pytest.raises(RuntimeError, match="of the user"):
        fit(run, EMA(decay=DECAY), hooks)
    assert os.environ["WORLD_SIZE"] == "2"
    now = _weights(seen["module"])
    return _are_equal(seen["averaged"], seen["trained"]), _are_equal(now, seen["trained"])


def test_weights_come_back_after_an_error_in_a_validation() -> None:
    run = _run(
        DP2,
        3,
        validate=True,
    ).but(trainer={"val_check_interval": 1, **BF16})
    assert run_ranks(_failed, 2, run) == [(False, True)] * 2


def _refusals(folder: Path) -> dict[str, Any]:
    import lightning.pytorch as pl

    from lightning_megatron import EMA, SpikeGuard

    module = make_module(_run({}, 1))
    plain = pl.Trainer(accelerator="cpu", logger=False, barebones=False)
    ema = EMA()
    run = _run({}, 1)
    saver = checkpoints_at(folder)
    fit(run, saver)

    ended = EMA()
    trainer, _ = fit(run, ended)
    module = trainer.lightning_module
    with ended.average_parameters():
        trainer.save_checkpoint(folder / "averaged.ckpt")
        inside = refusal(trainer.fit, module, shuffled_loader(1))
    with recorded_warnings("EMA") as dropped:
        fit(_run({}, 2).but(ckpt_path=str(folder / "averaged.ckpt")))
    evaluated = make_trainer(run, EMA())
    from torch.utils.data import DataLoader

    loader = DataLoader(rows_dataset(GLOBAL_BATCH), batch_size=GLOBAL_BATCH)
    saved = str(folder / "step=1.ckpt")
    with recorded_warnings("EMA") as warnings:
        evaluated.validate(make_module(run), loader, ckpt_path=saved, verbose=False)
        # The weights of another checkpoint are not those that the average is of.
        results = [
            trainer.validate(module, loader, ckpt_path=saved, verbose=False),
            trainer.validate(module, loader, verbose=False),
        ]
    return {
        "plain": refusal(ema.setup, plain, module, "fit"),
        "several": refusal(fit, run, EMA(), EMA()),
        "order": refusal(fit, run, SpikeGuard(), EMA(), saver),
        "inside": inside,
        "early": refusal(EMA().average_parameters().__enter__),
        "decay": refusal(EMA, decay=1.5),
        "device": refusal(EMA, device="cuda:7"),
        "of_others": refusal(ended.average_parameters().__enter__),
        "results": results,
        "warnings": warnings,
        "dropped": dropped,
    }


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(_refusals, 1, tmp_path)
    assert "EMA: expected MegatronStrategy" in found["plain"]
    assert "expected one of these callbacks, got several" in found["several"]
    assert "expected it before SpikeGuard" in found["order"]
    assert "fit: expected the trained weights" in found["inside"]
    assert "expected an update of the average before" in found["early"]
    assert "decay=1.5 must be at most 1" in found["decay"]
    assert "device='cuda:7': expected cpu" in found["device"]
    (dropped,) = found["dropped"]
    assert "averaged.ckpt has the average of 1 updates" in dropped
    first, second = found["results"]
    assert first == second
    assert "expected an update of the average before" in found["of_others"]
    *missing, none = found["warnings"]
    for warning in missing:
        assert "step=1.ckpt has no average of the weights" in warning
    assert "expected an average of the weights, got none in this process" in none
