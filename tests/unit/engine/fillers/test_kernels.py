"""Kernels in place of Transformer Engine's and Apex's beside their formulas, and what is kept for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP

from lightning_megatron.engine.fillers.experts import Dispatcher, _products
from lightning_megatron.engine.fillers.kernels import _LookUp, embedding, recomputes_activation, token_losses
from lightning_megatron.engine.patches import SWIGLU, WEIGHT_GRADIENTS, stand_ins
from lightning_megatron.engine.runtime import replaced
from lightning_megatron.models.gpt import hide_padded_vocab_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def world() -> Iterator[Any]:
    """A group of one rank in the pytest process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.gpu
def test_a_bias_that_the_product_adds_has_its_gradient(monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, gradient_accumulation_fusion=True,
        perform_initialization=False,
    )  # fmt: skip
    with replaced(stand_ins(WEIGHT_GRADIENTS)):
        linear = ColumnParallelLinear(
            8, 12, config=config, init_method=torch.nn.init.normal_, bias=True, tp_group=world
        )
        torch.nn.init.normal_(linear.weight)
        torch.nn.init.normal_(linear.bias)
        linear.weight.main_grad = torch.zeros(12, 8, device="cuda")
        x, upstream = torch.randn(5, 2, 8, device="cuda", requires_grad=True), torch.randn(5, 2, 12, device="cuda")
        got, _ = linear(x)
        gradients = torch.autograd.grad(got, (x, linear.bias), upstream)
    torch.testing.assert_close(got, F.linear(x, linear.weight, linear.bias), rtol=1e-5, atol=1e-5)
    expected = upstream @ linear.weight, upstream.sum((0, 1))
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
    weight_gradient = torch.einsum("sbo,sbi->oi", upstream, x)
    torch.testing.assert_close(linear.weight.main_grad, weight_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [True, False])
def test_an_embeddings_gradient_is_added_and_autograd_keeps_none(device: str, tied: bool) -> None:
    torch.manual_seed(0)
    weight: Any = torch.nn.Parameter(torch.randn(10, 4, device=device))
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.ones_like(weight), False, tied
    ids, upstream = torch.tensor([[1, 2, 2], [3, 1, 2]], device=device), torch.randn(2, 3, 4, device=device)
    rows = _LookUp.apply(ids, weight) if device == "cpu" else embedding(ids, weight)
    (rows * upstream).sum().backward()
    plain = weight.detach().clone().requires_grad_()
    (F.embedding(ids, plain) * upstream).sum().backward()
    torch.testing.assert_close(weight.main_grad - 1, plain.grad, rtol=1e-5, atol=1e-6)
    assert weight.grad_added_to_main_grad is not tied
    assert (weight.grad is None) is tied  # what is not None is looked at by nobody


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_the_formula(dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel.megatron")
    x = torch.randn(5, 2, 32, device="cuda").to(dtype).requires_grad_()
    with replaced(stand_ins(SWIGLU)):
        got = fused_bias_swiglu.bias_swiglu_impl(x, None)
    gate, up = x.float().chunk(2, -1)
    expected, tolerance = F.silu(gate) * up, max(1e-5, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected)
    gradient, reference = (torch.autograd.grad(each, x, upstream.to(each.dtype))[0] for each in (got, expected))
    torch.testing.assert_close(gradient.float(), reference.float(), rtol=2 * tolerance, atol=4 * tolerance)


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_products_are_those_of_each_expert_in_fp32(device: str) -> None:
    """One expert has no token. In bf16 (on a GPU) a product and its gradients are rounded once."""
    on_gpu = device == "cuda"
    sizes, width, rows = ([300, 0, 17, 195], 256, 384) if on_gpu else ([5, 0, 1, 4], 8, 12)
    tokens = torch.randn(sum(sizes), width, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    weights = torch.nn.Parameter(torch.randn(len(sizes), rows, width, device=device).to(tokens.dtype))
    tokens.requires_grad_()
    upstream = torch.randn(sum(sizes), rows, device=device).to(tokens.dtype)
    expected_inputs = [each.detach().float().requires_grad_() for each in (tokens, weights)]
    parts = zip(expected_inputs[0].split(sizes), expected_inputs[1], strict=True)
    expected = torch.cat([part @ weight.t() for part, weight in parts])
    expected.backward(upstream.float())

    weights.main_grad = torch.ones_like(weights, dtype=torch.float32)  # type: ignore[attr-defined]
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    got = _products(tokens, weights, ends)
    got.backward(upstream)

    rounded = {"rtol": 2**-7, "atol": 0.2} if on_gpu else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.float(), expected, **rounded)
    torch.testing.assert_close(tokens.grad.float(), expected_inputs[0].grad, **rounded)  # type: ignore[union-attr]
    torch.testing.assert_close(weights.main_grad - 1.0, expected_inputs[1].grad, **rounded)  # type: ignore[operator]
    assert weights.grad_added_to_main_grad  # type: ignore[attr-defined]
    again = _products(tokens, weights, ends)
    assert torch.equal(again, got)


# ---- what is made again ----------------------------------------------------------------------------------------------


def test_rows_of_experts_are_gathered_again_where_norms_are() -> None:
    tokens, probs = torch.randn(5, 1, 8), torch.rand(5, 2)
    chosen, weights = torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [3, 0]]), torch.randn(4, 8, 8)
    kept, gradients = [], []
    for modules in (["layernorm"], ["core_attn"]):
        config: Any = SimpleNamespace(recompute_granularity="selective", recompute_modules=modules)
        alone: Any = SimpleNamespace(ep=None, expt_tp=None, tp_ep=None)
        dispatcher = Dispatcher(4, [0, 1, 2, 3], config, alone)
        inputs = [each.clone().requires_grad_() for each in (tokens, probs, weights)]
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(inputs[0], chosen, inputs[1]))
        rows, ends, factors = dispatcher.dispatch_postprocess(*sent)
        outputs = dispatcher.combine_preprocess(_products(rows, inputs[2], ends) * factors[:, None])
        outputs = dispatcher.combine_postprocess(dispatcher.token_combine(outputs))
        kept.append(rows.untyped_storage().nbytes())
        gradients.append(torch.autograd.grad(outputs.square().sum(), inputs))
    assert kept == [0, 10 * 8 * 4]
    assert all(torch.equal(*each) for each in zip(*gradients, strict=True))


class _Linear(torch.nn.Linear):
    def forward(self, input_: torch.Tensor) -> Any:
        self.read = input_
        return super().forward(input_), None


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_does_not_keep_its_activation(gated: bool) -> None:
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
    mlp.linear_fc1, mlp.linear_fc2 = _Linear(4, 16 if gated else 8), _Linear(8, 4)
    hidden = torch.randn(3, 4)
    gradients = []
    for mlp.config.recompute_granularity in (None, "selective"):
        output, _ = recomputes_activation(MLP.forward)(mlp, hidden)
        is_empty = mlp.linear_fc2.read.untyped_storage().nbytes() == 0
        assert is_empty == (mlp.config.recompute_granularity == "selective")
        gradients.append(torch.autograd.grad(output.square().sum(), list(mlp.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# ---- the loss --------------------------------------------------------------------------------------------------------

VOCAB, S, B = 11, 6, 3


def _case(padded: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [s, b, padded], the padding the largest of all, labels of which two do not count, and loss weights."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(S, B, padded, generator=generator)
    logits[..., VOCAB:] = 50.0
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    labels[0, 0], labels[5, 2] = -100, -1
    return logits.to(dtype), labels, torch.randn(S, B, generator=generator)


def _dense(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their weighted sum, in float64 over the true vocabulary."""
    x = logits[..., :VOCAB].double().requires_grad_()
    counted = labels.masked_fill(labels < 0, -100)
    losses = F.cross_entropy(x.permute(1, 2, 0), counted.T, ignore_index=-100, reduction="none").T
    (gradient,) = torch.autograd.grad((losses * weights).sum(), x)
    return losses.detach(), F.pad(gradient, (0, logits.shape[-1] - VOCAB))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("padded", [VOCAB, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_rank_equals_a_dense_softmax(padded: int, dtype: torch.dtype, device: str, world: Any) -> None:
    logits, labels, weights = (x.to(device) for x in _case(padded, dtype))
    leaf = logits.clone().requires_grad_()
    # The product stands for the output layer: its result is no leaf, as in a model.
    losses = token_losses(hide_padded_vocab_(leaf * 1.0, VOCAB, 0), labels, world)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    expected_losses, expected_gradient = _dense(logits, labels, weights)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    # The softmax is computed in float32; only the gradient is rounded to the dtype of the logits.
    torch.testing.assert_close(losses.detach().double(), expected_losses, rtol=1e-5, atol=1e-5)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)
    assert not gradient[..., VOCAB:].any()
    assert losses[0, 0] == losses[5, 2] == 0
    assert not gradient[[0, 5], [0, 2]].any()


def test_the_compiled_loss_keeps_no_float32_copy_of_the_logits(world: Any) -> None:
    logits, labels, _ = _case(VOCAB, torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_losses(logits.requires_grad_(), labels, world)
    assert [x.dtype for x in kept if x.shape == logits.shape] == [torch.bfloat16]
