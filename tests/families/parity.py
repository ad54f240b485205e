"""Comparison of a model family with Hugging Face on any layout.

``check_family`` takes a tiny Hugging Face model with random weights and a batch. On a layout's ranks it compares the
logits, the loss, the gradient of every parameter (under its Hugging Face name), and what ``save_pretrained`` writes::

    model = tiny_model(AutoModelForCausalLM, Qwen3Config(vocab_size=83, hidden_size=32, ...))
    check_family(model, Layout(tp=2), padded_sentences())

A new GPT family is a few lines in the tables of test_gpts.py.

The model: fp32, few layers (a multiple of 4 for ``LAYOUTS``), non-default sizes, a prime vocabulary size, no dropout.
Rows are the items of a DataLoader; the Hugging Face model gets them stacked as keyword arguments and computes its own
loss. So they have Hugging Face's names, which the train step must accept.

Logits come from the last pipeline stage: the train step runs as usual, but calls the model without ``labels``. They are
compared at real positions: where ``attention_mask`` is 1, or where an encoder-decoder's ``labels`` are targets. A model
whose embedding has a ``padding_idx`` must not have that token at a real position: torch drops its gradient.
"""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.convert.registry import model_config, rules_of
from lightning_megatron.convert.rules import LAYER, linear_rules
from tests.models import VOCAB_SIZE
from tests.parity.comparison import relative_error
from tests.parity.hugging_face import tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2,
    TP2,
    Case,
    Layout,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

Rows = list[dict[str, Tensor]]

LAYOUTS = (
    Layout(),
    TP2,
    PP2,
    FOUR_RANKS,
    INTERLEAVED,
)
"""Each way of splitting a model once; the rows must divide into two microbatches, the sequence into two parts."""

MAKE_VOCAB_SIZE_DIVISIBLE_BY = 8

# Logits are of size 1 to 10, after four layers with a different summation order.
_LOGITS_ATOL = 2e-5
_LOSS_RTOL = 2e-6
# Relative to each gradient's norm; and to the norm of all, for gradients that are mathematically zero (key biases).
_GRADIENT_RTOL = 2e-5
_GRADIENT_ATOL = 1e-6


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Results of the Hugging Face model."""

    outputs: list[Tensor]
    loss: float
    gradients: Tensors
    """By name in the saved files."""


@dataclass(frozen=True, kw_only=True)
class RankResult(Reference):
    """Results of one rank: fp32 outputs (rows first) on the last stage, and full gradients on rank 0 only."""

    tp_rank: int
    dp_rank: int
    cp_rank: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest errors of a successful comparison."""

    logits_error: float
    """Largest absolute difference."""
    loss_error: float
    """Relative error."""
    gradient_error: float
    """Norm of the difference, relative to a parameter's norm plus a twentieth of the norm of all; the largest."""


def tiny_model(auto_class: Any, config: Any, seed: int = 3) -> Any:
    """Create a model with weights as varied as trained ones: no norm is 1, no bias 0, no two rows are equal."""
    torch.manual_seed(seed)
    is_auto = hasattr(auto_class, "_model_mapping")
    model = (
        auto_class.from_config(config, attn_implementation="eager")
        if is_auto
        else auto_class(config)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                # About 1/sqrt(h): activations of size 1, so attention and MLP are as nonlinear as in a real model.
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
            if name.endswith("act_fn.beta"):
                buffer += 0.25
            if name.endswith("act_fn.eps"):
                buffer -= 0.125
    return model.float().eval()


def padded_sentences(
    lengths: tuple[int, ...] = (16, 9, 5, 12),
    seq_length: int = 16,
    side: str = "right",
) -> Rows:
    """Rows of ``input_ids``, ``attention_mask`` and ``labels`` (-100 on and right after padding) for causal models."""
    tokens = torch.randint(
        1,
        VOCAB_SIZE,
        (len(lengths), seq_length),
        generator=torch.Generator().manual_seed(5),
    )
    rows = []
    for row, length in zip(tokens, lengths, strict=True):
        mask = torch.zeros_like(row)
        mask[slice(None, length) if side == "right" else slice(-length, None)] = 1
        is_target = (mask == 1) & (mask.roll(1) == 1)
        rows.append(
            {"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(~is_target, -100)}
        )
    return rows


def check_family(
    hf_model: Any, layout: Layout, rows: Rows, *, adapters: bool = False
) -> Comparison:
    """Assert that this package's model with the weights of ``hf_model`` equals it on ``layout``.

    Args:
        hf_model: The Hugging Face model with its head; see ``tiny_model``.
        layout: Layout of this package's model; up to four ranks.
        rows: A complete batch; each row with the argument names of the Hugging Face model.
        adapters: Add ``peft`` adapters to all linears (with experts, to those of attention); compare their gradients
            and saved files.

    Returns:
        The largest errors.
    """
    with tempfile.TemporaryDirectory(prefix="family_") as path:
        directory = Path(path)
        lora = None
        hf_model.save_pretrained(directory / "source")
        if adapters:
            hf_model = with_adapters(
                copy.deepcopy(hf_model), directory
            )  # peft modifies it, and other tests share it
            lora = str(directory / "adapter")
        case = Case(layout=layout, steps=1)
        results: list[RankResult] = run_ranks(
            run_family,
            layout.world_size,
            path,
            case,
            rows,
            lora,
        )
        reference = reference_of(hf_model, rows)
        real = real_positions(hf_model, rows)
        logits_error = _compare_outputs(results, reference, real, layout)
        for result in results:
            torch.testing.assert_close(
                result.loss,
                reference.loss,
                rtol=_LOSS_RTOL,
                atol=0.0,
            )
        buffers = dict(hf_model.named_buffers())
        actual = {
            name: gradient
            for name, gradient in results[0].gradients.items()
            if name not in buffers and not name.endswith("e_score_correction_bias")
        }
        expected = reference.gradients
        if adapters:
            expected = _trained_with_adapters(expected)
            actual = {name: actual[name] for name in expected}
            _compare_saved_adapters(directory)
        else:
            _compare_saved(directory / "saved", hf_model)
        return Comparison(
            logits_error=logits_error,
            loss_error=abs(results[0].loss / reference.loss - 1.0),
            gradient_error=_compare_gradients(actual, expected),
        )


def _trained_with_adapters(gradients: Tensors) -> Tensors:
    """Gradients of adapters and of a head by our names of their weights."""
    trained = {}
    for name, gradient in gradients.items():
        if ".lora_" in name:
            trained[f"base_model.model.{name.replace('.default', '')}"] = gradient
        if ".modules_to_save." in name:
            trained[name.replace(".modules_to_save.default", "")] = gradient
    return trained


_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""Tasks in which ``peft`` trains the head, by the ends of transformers' classes."""


def with_adapters(hf_model: Any, directory: Path) -> Any:
    """Add ``peft`` adapters to ``hf_model``, of ``directory/source``, and save them to ``directory/adapter``."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    model = model_config(directory / "source")
    linears = linear_rules(rules_of(model))
    ends = {
        name.removesuffix(".weight").split(f"{LAYER}.")[1]
        for r in linears.values()
        for name in r.hugging_face
    }
    if model.experts is not None:
        # peft scales adapters of MLPs otherwise in a model with experts, also those of its dense layers.
        ends = {end for end in ends if end.startswith("self_attn.")}
    config = LoraConfig(
        r=3,
        lora_alpha=5,
        target_modules=sorted(ends),
        init_lora_weights=False,
        task_type=next(
            (kind for end, kind in _TASK_TYPES.items() if type(hf_model).__name__.endswith(end)),
            None,
        ),
    )
    adapted = get_peft_model(hf_model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".modules_to_save." in name:
                weight *= 1.5  # not the head of the base
    adapted.save_pretrained(directory / "adapter")
    return hf_model


def _compare_saved_adapters(directory: Path) -> None:
    from safetensors.torch import load_file

    saved, initial = (
        load_file(directory / name / "adapter_model.safetensors") for name in ("saved", "adapter")
    )
    assert saved.keys() == initial.keys()
    assert all(saved[name].equal(initial[name]) for name in initial)


def reference_of(hf_model: Any, rows: Rows) -> Reference:
    """Run ``hf_model`` on its device in its dtype; return results on the CPU in fp32."""
    from transformers.core_model_loading import revert_weight_conversion

    hf_model.zero_grad(set_to_none=True)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    output = hf_model(**{name: tensor.to(hf_model.device) for name, tensor in batch.items()})
    output.loss.float().backward()
    # A parameter that does not affect the loss has no gradient in torch, and a gradient of zeros here.
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in hf_model.named_parameters()
        if not name.endswith("e_score_correction_bias")  # frozen in ERNIE 4.5
    }
    # transformers holds all experts of a layer in one tensor, but saves one tensor per expert.
    gradients = revert_weight_conversion(hf_model, gradients)
    named = ("logits", "prediction_logits", "seq_relationship_logits")
    outputs = [output[name] for name in named if output.get(name) is not None]
    if "start_logits" in output:
        outputs.append(torch.stack([output.start_logits, output.end_logits], dim=-1))
    return Reference(
        outputs=[tensor.detach().float().cpu() for tensor in outputs],
        loss=output.loss.item(),
        gradients={name: gradient.float().cpu() for name, gradient in gradients.items()},
    )


def real_positions(hf_model: Any, rows: Rows) -> Tensor | None:
    if hf_model.config.is_encoder_decoder:
        return torch.stack([row["labels"] for row in rows]) != -100
    if "attention_mask" not in rows[0]:
        return None
    return torch.stack([row["attention_mask"] for row in rows]).bool()


def _compare_outputs(
    results: list[RankResult],
    reference: Reference,
    real: Tensor | None,
    layout: Layout,
) -> float:
    errors = [0.0]
    last = [result for result in results if result.outputs]
    last.sort(key=lambda result: (result.cp_rank, result.dp_rank, result.tp_rank))
    assert {len(result.outputs) for result in last} == {len(reference.outputs)}
    # The ranks of a context-parallel group have complete, equal rows.
    others = last[layout.dp * layout.tp :]
    last = last[: layout.dp * layout.tp]
    for first, other in zip(last * (layout.cp - 1), others, strict=True):
        assert all(map(torch.equal, first.outputs, other.outputs))
    for i, expected in enumerate(reference.outputs):
        outputs = []
        for begin in range(0, len(last), layout.tp):
            parts = [result.outputs[i] for result in last[begin : begin + layout.tp]]
            outputs.append(_join_over_tp(parts, expected.shape[-1]))
        # Rows are assigned to replicas round-robin.
        actual = torch.stack(outputs, dim=1).flatten(0, 1)
        assert actual.shape == expected.shape
        if real is not None and actual.dim() == 3:
            actual = actual[real]
            expected = expected[real]
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=_LOGITS_ATOL)
        errors.append((actual - expected).abs().max().item())
    return max(errors)


def _join_over_tp(parts: list[Tensor], width: int) -> Tensor:
    if parts[0].shape[-1] == width:  # not split
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    full = torch.cat(parts, dim=-1)
    assert (full[..., width:] == -torch.inf).all(), "vocabulary padding has finite logits"
    return full[..., :width]


def _compare_gradients(actual: Tensors, expected: Tensors) -> float:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors = {}
    for name, gradient in expected.items():
        assert actual[name].shape == gradient.shape, name
        limit = _GRADIENT_RTOL * gradient.norm() + _GRADIENT_ATOL * total
        errors[name] = float((actual[name] - gradient).norm() / limit)
    wrong = []
    for name, error in errors.items():
        if error > 1:
            wrong.append(f"{name}: {relative_error(actual[name], expected[name]):.2g}")
    assert not wrong, f"gradients differ, relative to their norms: {', '.join(wrong)}"
    return max(errors.values()) * _GRADIENT_RTOL


def _compare_saved(directory: Path, hf_model: Any) -> None:
    """Assert that saved weights equal the loaded ones and that transformers reports no missing or unexpected keys."""
    loaded, report = type(hf_model).from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    assert not report["mismatched_keys"], report
    expected = hf_model.state_dict()
    actual = loaded.state_dict()
    assert actual.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert not different, f"weights differ: {', '.join(different)}"
    assert loaded.config.architectures == [type(hf_model).__name__]


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def run_family(
    directory: str,
    case: Case,
    rows: Rows,
    lora: str | None = None,
) -> RankResult:
    """Load ``directory/source``, compute outputs of the rows, save to ``directory/saved``, and train one step."""
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows) // case.layout.dp)  # type: ignore[arg-type]
    module = pretrained_module(directory + "/source", lora=lora)
    module.train_step = recorder = record_outputs(module.train_step)
    trainer = trainer_of(case)
    trainer.validate(module, loader, verbose=False)
    topology = trainer.strategy.topology
    module.save_pretrained(Path(directory) / "saved")
    run = train_module(
        pretrained_module(directory + "/source", lora=lora), case, loader, collect=tensors_of
    )
    return RankResult(
        outputs=[torch.cat(parts) for parts in zip(*recorder.outputs, strict=True)],
        tp_rank=topology.tp_rank,
        dp_rank=topology.dp_rank,
        cp_rank=topology.cp_rank,
        loss=run.losses[0],
        gradients=run.gradients,
    )


def pretrained_module(directory: str, **options: Any) -> Any:
    """Create a module with the weights of ``directory``."""
    from lightning_megatron import MegatronModule

    options.setdefault("make_vocab_size_divisible_by", MAKE_VOCAB_SIZE_DIVISIBLE_BY)
    return MegatronModule(model=directory, pretrained=True, **options)


def record_outputs(train_step: Any) -> Any:
    """Return ``train_step`` changed to call the model without labels and to record its outputs."""
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm

    step_class: Any = type(train_step)

    class OutputRecorder(step_class):
        def __init__(self) -> None:
            self.__dict__.update(train_step.__dict__)
            self.outputs: list[list[Tensor]] = []

        def forward_step(
            self,
            data_iterator: Iterator[Batch],
            model: Any,
        ) -> tuple[Any, LossFunc]:
            def without_labels(*args: Any, **kwargs: Any) -> Any:
                return model(*args, **{k: None if k == "labels" else v for k, v in kwargs.items()})

            output, _ = super().forward_step(data_iterator, without_labels)
            return output, partial(self.loss_func, {})

        def loss_func(
            self,
            batch: Batch,
            output: Any,
        ) -> dict[str, LossTerm]:
            parts = output if isinstance(output, tuple | list) else (output,)
            outputs = [part for part in parts if part is not None]
            self.outputs.append([part.float().cpu() for part in outputs])
            zero = torch.zeros((), device=outputs[0].device)
            return {name: LossTerm(zero, zero + 1) for name in self.loss_terms}

        def metrics(self) -> dict[str, Any]:
            return {}

        def update_metrics(self, metrics: Any, batch: Batch, output: Any) -> None:
            """No metrics."""

    return OutputRecorder()
