"""Replacements of Transformer Engine's and Apex's kernels: values, gradients, and activations kept for backward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from lightning_megatron.engine.ops.experts import GroupedExperts, grouped_matmul
from lightning_megatron.engine.ops.gating import Gating
from lightning_megatron.engine.ops.loss import token_losses
from lightning_megatron.engine.ops.recompute import recompute_activation
from lightning_megatron.engine.ops.token_dispatch import Dispatcher
from lightning_megatron.engine.ops.weight_gradients import local_linear
from lightning_megatron.models.gpt import mask_padded_vocab_
from tests.marks import on_gpus

DEVICES = ["cpu", on_gpus(1, "cuda")]


# ---- linears ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("needs_input_gradient", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_linear_without_communication_adds_its_gradients_to_the_buffers(
    has_hook: bool, has_bias: bool, needs_input_gradient: bool, device: str
) -> None:
    def refuse(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("expected the way without communication")

    linear = local_linear(refuse)
    x = torch.randn(3, 2, 8, device=device, requires_grad=needs_input_gradient)
    weight: Any = torch.randn(16, 8, device=device, requires_grad=True)
    bias: Any = torch.randn(16, device=device, requires_grad=True) if has_bias else None
    present = [weight, bias] if has_bias else [weight]
    expected = F.linear(x, weight, bias)
    upstream = torch.randn_like(expected)
    inputs = [*present, x] if needs_input_gradient else present
    gradients = torch.autograd.grad(expected, inputs, upstream)
    before = [torch.randn_like(parameter) for parameter in present]
    for parameter, buffer in zip(present, before, strict=True):
        parameter.main_grad = buffer.clone()
        parameter.grad_added_to_main_grad = False
        parameter.is_reduced_in_backward = has_hook
    product = linear(x, weight, bias, True, False, False, tp_group=None)
    torch.testing.assert_close(product, expected)
    product.backward(upstream)
    # Without an input that needs a gradient, autograd would not come here without the parameters either.
    is_visited = has_hook or not needs_input_gradient
    for parameter, old, gradient in zip(present, before, gradients, strict=False):
        torch.testing.assert_close(parameter.main_grad, old + gradient)
        assert (parameter.grad is not None) == is_visited
        assert parameter.grad_added_to_main_grad == is_visited
    if needs_input_gradient:
        torch.testing.assert_close(x.grad, gradients[-1])
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight, bias, True, False, False), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"allreduce_dgrad": True},
        {"sequence_parallel": True},
        {"gradient_accumulation_fusion": False},
        {"grad_output_buffer": []},
        {"gtp_remat_size": 2},
    ],
)
def test_linear_with_communication_or_other_gradients_is_megatrons(options: dict[str, Any]) -> None:
    def original(*args: Any, **others: Any) -> str:
        return "Megatron-Core's"

    linear: Any = local_linear(original)  # type: ignore[arg-type]
    plain = {
        "gradient_accumulation_fusion": True,
        "allreduce_dgrad": False,
        "sequence_parallel": False,
    }
    x = torch.randn(3, 2, 8)
    weight = torch.randn(16, 8)
    assert linear(x, weight, None, **{**plain, **options}) == "Megatron-Core's"
    with torch.autocast("cpu"):
        assert linear(x, weight, None, **plain) == "Megatron-Core's"


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
@pytest.mark.parametrize("device", DEVICES)
def test_fused_activation_of_experts_is_that_of_the_config(activation: Any, device: str) -> None:
    config = SimpleNamespace(
        gated_linear_unit=True,
        activation_func=activation,
        bias_activation_fusion=True,  # as an override may set it
    )
    experts: Any = SimpleNamespace(config=config, activation=None)
    rows = torch.randn(5, 16, device=device)
    factors = torch.rand(5, device=device)
    ends = torch.tensor([2, 5], dtype=torch.int32, device=device)
    gate, up = rows.chunk(2, dim=-1)
    torch.testing.assert_close(
        GroupedExperts._activation(experts, rows, factors, ends),
        activation(gate) * up * factors[:, None],
    )


@pytest.mark.parametrize(
    ("dropout", "training", "draws"),
    [(None, True, False), (0.0, True, False), (0.1, True, True), (0.1, False, False)],
)
def test_only_dropout_of_adapters_keeps_the_first_product(
    dropout: float | None, training: bool, draws: bool
) -> None:
    experts: Any = SimpleNamespace(training=training)
    if dropout is not None:
        experts.linear_fc1_lora = SimpleNamespace(dropout=dropout)
    assert GroupedExperts._draws_numbers(experts) == draws


# ---- recomputation ---------------------------------------------------------------------------------------------------


def test_expert_rows_are_recomputed_if_norms_are() -> None:
    tokens = torch.randn(5, 1, 8)
    probs = torch.rand(5, 2)
    experts = torch.tensor(
        [
            [0, 3],
            [3, 1],
            [1, 0],
            [0, 1],
            [3, 0],
        ]
    )
    weights = torch.randn(4, 8, 8)
    saved_bytes = []
    gradients = []
    for modules in (["layernorm"], ["core_attn"]):
        config: Any = SimpleNamespace(recompute_granularity="selective", recompute_modules=modules)
        group: Any = SimpleNamespace(ep=None, expt_tp=None, tp_ep=None)
        dispatcher = Dispatcher(4, [0, 1, 2, 3], config, group)
        inputs = [each.clone().requires_grad_() for each in (tokens, probs, weights)]
        dispatched = dispatcher.token_dispatch(
            *dispatcher.dispatch_preprocess(inputs[0], experts, inputs[1])
        )
        rows, ends, factors = dispatcher.dispatch_postprocess(*dispatched)
        outputs = dispatcher.combine_preprocess(
            grouped_matmul(rows, inputs[2], ends) * factors[:, None]
        )
        outputs = dispatcher.combine_postprocess(dispatcher.token_combine(outputs))
        saved_bytes.append(rows.untyped_storage().nbytes())
        gradients.append(torch.autograd.grad(outputs.square().sum(), inputs))
    assert saved_bytes == [0, 10 * 8 * 4]
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


class _Linear(torch.nn.Linear):
    def forward(self, input_: Tensor) -> Any:
        self.read = input_
        return super().forward(input_), None


@pytest.mark.parametrize("gated", [True, False])
def test_mlp_recomputes_its_activation(gated: bool) -> None:
    mlp: Any = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(
        recompute_modules=["layernorm"],
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=gated,
        activation_func=F.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    )
    mlp.activation_func = F.silu
    mlp.linear_fc1 = _Linear(4, 16 if gated else 8)
    mlp.linear_fc2 = _Linear(8, 4)
    hidden = torch.randn(3, 4)
    gradients = []
    for mlp.config.recompute_granularity in (None, "selective"):
        output, _ = recompute_activation(MLP.forward)(mlp, hidden)
        is_empty = mlp.linear_fc2.read.untyped_storage().nbytes() == 0
        assert is_empty == (mlp.config.recompute_granularity == "selective")
        gradients.append(
            torch.autograd.grad(
                output.square().sum(),
                list(mlp.parameters()),
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- the loss --------------------------------------------------------------------------------------------------------

VOCAB = 11
S = 6
B = 3


def _inputs(padded: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [s, b, padded] with maximal padding logits, labels with two ignored positions, and loss weights."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(S, B, padded, generator=generator)
    logits[..., VOCAB:] = 50.0
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    labels[0, 0] = -100
    labels[5, 2] = -1
    return (
        logits.to(dtype),
        labels,
        torch.randn(S, B, generator=generator),
    )


def _dense_loss(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of their weighted sum, in float64 over the true vocabulary."""
    x = logits[..., :VOCAB].double().requires_grad_()
    counted = labels.masked_fill(labels < 0, -100)
    losses = F.cross_entropy(
        x.permute(1, 2, 0),
        counted.T,
        ignore_index=-100,
        reduction="none",
    ).T
    (gradient,) = torch.autograd.grad((losses * weights).sum(), x)
    return losses.detach(), F.pad(
        gradient,
        (0, logits.shape[-1] - VOCAB),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [VOCAB, 16])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16],
)
def test_token_losses_equal_a_dense_softmax(
    padded: int, dtype: torch.dtype, device: str, world: Any
) -> None:
    logits, labels, weights = (x.to(device) for x in _inputs(padded, dtype))
    leaf = logits.clone().requires_grad_()
    # The product makes the logits a non-leaf tensor, as after an output layer.
    losses = token_losses(mask_padded_vocab_(leaf * 1.0, VOCAB, 0), labels, world)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    expected_losses, expected_gradient = _dense_loss(logits, labels, weights)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    # The softmax is computed in float32; only the gradient is rounded to the dtype of the logits.
    torch.testing.assert_close(
        losses.detach().double(),
        expected_losses,
        rtol=1e-5,
        atol=1e-5,
    )
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(
        gradient.double(),
        expected_gradient,
        rtol=tolerance,
        atol=tolerance,
    )
    assert not gradient[..., VOCAB:].any()
    assert losses[0, 0] == losses[5, 2] == 0
    assert not gradient[[0, 5], [0, 2]].any()


def test_loss_keeps_no_float32_copy_of_the_logits(world: Any) -> None:
    logits, labels, _ = _inputs(VOCAB, torch.bfloat16)
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        token_losses(logits.requires_grad_(), labels, world)
    assert [x.dtype for x in saved if x.shape == logits.shape] == [torch.bfloat16]


# ---- router ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_logits_of_bfloat16_tokens_are_as_exact_as_float32(device: str) -> None:
    tokens = torch.randn(50, 64, device=device).bfloat16().requires_grad_()
    weight = torch.randn(16, 64, device=device).bfloat16().requires_grad_()
    upstream = torch.randn(50, 16, device=device)
    logits: Tensor = Gating.apply(tokens, weight)  # type: ignore[no-untyped-call]
    gradients = torch.autograd.grad(logits, (tokens, weight), upstream)
    exact = tokens.double() @ weight.double().t()
    exact_gradients = torch.autograd.grad(exact, (tokens, weight), upstream.double())
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, exact.float(), rtol=1e-5, atol=1e-5)
    for got, expected in zip(gradients, exact_gradients, strict=True):
        # With upstream gradients rounded to bf16 two fifths would differ.
        assert (got == expected).float().mean() > 0.98
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-4)
