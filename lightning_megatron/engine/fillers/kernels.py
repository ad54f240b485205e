"""Replacements of Transformer Engine's and Apex's kernels: norms, activations, weight gradients, losses, copies.

- norms for every norm slot, on CUDA fused with the bias, dropout and residual addition before them;
- recomputation of the outputs of norms and activations in the backward pass;
- weight gradients accumulated by one GEMM, cuBLAS's as in Apex's extension: without either, every gradient is written
  in bf16 and then added to the fp32 buffer by another kernel. The CPU accumulates in the same place, so that a laptop
  runs the same path;
- embedding gradients added to rows of that buffer;
- SwiGLU by liger-kernel's Triton kernel, if it is installed: the function that liger-kernel 0.8's
  ``apply_liger_kernel_to_megatron`` patches, too;
- vocabulary-parallel cross-entropy, and soft caps, compiled;
- copies of many tensors by torch._foreach_copy_, where megatron-core 0.16.1 launches a kernel for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.fillers.adam import MasterOptimizer

# ---- norms and residual additions ------------------------------------------------------------------------------------
# Megatron-Core's WrappedTorchNorm (megatron-core 0.16.1, transformer/torch_norm.py) refuses sequence parallelism and
# zero-centred weights, and creates float32 weights, for which torch does not use its fused kernels on bfloat16 inputs.

MAX_FUSED_COLUMNS = 16384
"""Maximum number of columns, which the kernel of ``Norm.add`` holds in registers."""


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm, as named by ``config.normalization``, over the last dimension.

    Parameters ``weight`` and, for LayerNorm, ``bias``: [hidden_size] in ``config.params_dtype``. With
    ``config.layernorm_zero_centered_gamma``, 1 is added to the weight, in float32 as in Gemma.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        has_bias: bool = True,
    ) -> None:
        """Create the parameters, on the same device as other layers.

        Args:
            config: Selects the norm, its dtype and its device.
            hidden_size: Size of the last dimension.
            eps: Added to the variance.
            has_bias: Whether a LayerNorm has a bias; for ``ModuleSpec.params``.
        """
        super().__init__()
        self.shape: tuple[int, ...] = (hidden_size,)
        self.eps = eps
        self.is_rms: bool = config.normalization == "RMSNorm"
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        # Initially scales by 1 and shifts by 0.
        self.weight = torch.nn.Parameter(
            torch.full(self.shape, 0.0 if self.zero_centered else 1.0, **options)
        )
        has_bias = has_bias and not self.is_rms
        self.bias = torch.nn.Parameter(torch.zeros(self.shape, **options)) if has_bias else None
        for parameter in self.parameters():
            # distributed/finalize_model_grads.py sums these gradients over TP: each rank has a shard of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._precomputed: tuple[Tensor, Tensor] | None = None
        """Sum computed by ``add``, and its norm."""

    def can_add(self, x: Tensor, residual: Tensor) -> bool:
        """Whether ``add`` supports these tensors; for training, which is not bound by kernel launches from Python."""
        is_plain = x.dtype == residual.dtype == self.weight.dtype and (
            self.is_rms or self.bias is not None
        )
        return is_plain and x.is_cuda and self.shape[0] <= MAX_FUSED_COLUMNS

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
        """Compute ``residual + dropout(x + bias)``, [..., hidden_size], and its norm for the next ``forward``.

        Args:
            x: [..., hidden_size], on CUDA, in the parameters' dtype.
            bias: [hidden_size]; None for none.
            residual: As ``x``.
            probability: Probability of dropping an element.
        """
        from lightning_megatron.engine.fillers.triton_kernels import (
            add_norm,
        )  # Triton is on GPUs only

        for hook in (
            self._forward_pre_hooks.values()
        ):  # DDP's, which waits for the all-gather of parameters
            hook(self, ())
        weight: Tensor = self.weight.float() + 1.0 if self.zero_centered else self.weight
        self._precomputed = add_norm(x, bias, residual, weight, self.bias, self.eps, probability)
        return self._precomputed[0]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x: [..., hidden_size], in the parameters' dtype."""
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is not None and precomputed[0] is x:
            return precomputed[1]
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.dtype != weight.dtype:  # fp32_residual_connection: float32 in, activation dtype out
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        scale = None if self.zero_centered else weight
        if self.is_rms:
            out = F.rms_norm(x, self.shape, scale, self.eps)
        else:
            out = F.layer_norm(x, self.shape, scale, None if self.zero_centered else bias, self.eps)
        if self.zero_centered:
            out = torch.addcmul(out if bias is None else out + bias, out, weight)
        return out.to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Kind, size and epsilon, for print(model)."""
        return f"{'RMSNorm' if self.is_rms else 'LayerNorm'}, {self.shape[0]}, eps={self.eps}"


class NormOfAllHeads(Norm):
    """RMSNorm over the queries or keys of all heads, across tensor-parallel ranks (OLMo 2).

    Every rank has the full weight, [num_heads * hn], and uses the slice of its heads; Megatron sums the gradients over
    TP, as for all norms of queries and keys. If there are more ranks than heads, neighbouring ranks hold the same head.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int
    ) -> None:
        """Create an RMSNorm over ``num_heads`` (of all ranks; for ``ModuleSpec.params``) x ``hidden_size`` columns."""
        super().__init__(config, num_heads * hidden_size, eps)
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads, [s, b, n/tp, hn]; all-reduces [s, b] over TP in forward and backward pass."""
        heads, tp = x.shape[2], parallel_state.get_tensor_model_parallel_world_size()
        replicas = heads * tp // self.num_heads
        first = parallel_state.get_tensor_model_parallel_rank() // replicas * heads
        squares = x.float().pow(2).sum((2, 3), keepdim=True) / replicas
        if tp > 1:
            squares = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(squares)
            )
        normalized = (x.float() * torch.rsqrt(squares / self.shape[0] + self.eps)).to(x.dtype)
        return normalized * self.weight.view(self.num_heads, -1)[first : first + heads]


class BiasDropoutAdd:
    """Megatron's bias, dropout and residual addition; on CUDA fused with the norm that follows."""

    def __init__(
        self, probability: float | None = None, multiplier: float = 1.0, config: Any = None
    ) -> None:
        """Set what differs from Megatron's, which passes ``config`` in one of its slots.

        Args:
            probability: Replaces the layer's dropout probability; None keeps it.
            multiplier: Factor of what is added to the residual, its bias included.
            config: Unused.
        """
        del config
        self.probability = probability
        self.multiplier = multiplier
        self.norm: Norm | None = None
        """Norm that reads the sum before anything else does; None if unknown."""

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Function that Megatron's layer calls with (x, bias), the residual and its config's dropout probability."""
        plain = get_bias_dropout_add(training, fused)

        def add(
            x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            probability = probability if self.probability is None else self.probability
            x, bias = x_with_bias
            if self.multiplier != 1.0:
                x, bias = x * self.multiplier, None if bias is None else bias * self.multiplier
            if self.norm is not None and training and self.norm.can_add(x, residual):
                return self.norm.add(x, bias, residual, probability)
            total: Tensor = plain((x, bias), residual, probability)
            return total

        return add


# ---- recomputation of cheap outputs ----------------------------------------------------------------------------------
# Flash attention saves little, so recomputing it gains nothing; of a layer of Llama-3-8B the outputs of both norms and
# of SwiGLU are 45 of 138 kB per token, and each is one memory-bound kernel. The linear that reads such an output saves
# it for its weight gradient: the storage is freed when the linear has run, and refilled when its gradient arrives.
#
# megatron-core 0.16.1, tensor_parallel/random.py:CheckpointWithoutOutput does the same, but saves and restores every
# random state around functions that draw no numbers, and needs Transformer Engine (its ``fp8 is not None`` is true of
# False).

_Output: TypeAlias = tuple[Tensor, Tensor | None]
"""Output of a linear: [s, b, h] and a bias that is not added yet."""


def recomputes_cheap_outputs(config: Any) -> bool:
    """Whether norms, activations and input rows of experts are recomputed: ``recompute="selective"``."""
    return config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules


class RecomputedOutput:
    """Call of a deterministic function whose output's storage is freed between forward and backward pass.

    Interface of Megatron's ``CheckpointWithoutOutput``. The output must own its storage; its readers must have run
    before it is discarded, and must not return it.
    """

    def __init__(self, fp8: object = None) -> None:
        """Start without a call."""
        del fp8
        self._recompute: Callable[[], Tensor] | None = None
        self._output: Tensor | None = None

    def checkpoint(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Call ``function(*inputs)`` and return its output."""
        output = self._output = function(*inputs)
        detached = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._recompute = partial(function, *detached)
        return output

    def discard_output_and_register_recompute(self, reader: Tensor) -> None:
        """Free the output until ``reader``, which was computed from it, has a gradient; no-op if it needs none."""
        if self._output is not None and reader.requires_grad:
            self._output.untyped_storage().resize_(0)
            reader.register_hook(self._restore)
        else:
            self._recompute = self._output = None

    def _restore(self, gradient: Tensor) -> None:
        if (
            self._recompute is None or self._output is None
        ):  # a nested backward pass calls hooks twice
            return
        with torch.no_grad():
            recomputed = self._recompute().untyped_storage()
        self._output.untyped_storage().resize_(recomputed.nbytes())
        self._output.untyped_storage().copy_(recomputed)
        self._recompute = self._output = None


class _Lambda(torch.nn.Module):
    """Wraps a function in a module, which the engine requires from 0.17 on."""

    def __init__(self, function: Callable[..., _Output]) -> None:
        super().__init__()
        self.forward = function


def recompute_activation(original: Callable[..., _Output]) -> Callable[..., _Output]:
    """``MLP.forward`` that recomputes the activation, [s, b, ffn/tp], where norms are recomputed.

    Megatron's own forward runs with substitutes for the two linears, so that only the activation is left. After a
    dropout (T5) nothing is gained: the second linear saves the output of the dropout, not the activation.
    """

    def forward(
        self: Any, hidden_states: Tensor, per_token_scale: Any = None, **others: Any
    ) -> _Output:
        config = self.config
        recomputes = recomputes_cheap_outputs(config)
        if (
            not recomputes
            or per_token_scale is not None
            or getattr(self.linear_fc2, "input_dropout", 0.0) > 0.0
        ):
            return original(self, hidden_states, per_token_scale, **others)

        def activation(hidden: Tensor, bias: Tensor | None) -> Tensor:
            linears = {
                "linear_fc1": _Lambda(lambda _: (hidden, bias)),
                "linear_fc2": _Lambda(lambda x: (x, None)),
            }
            mlp = SimpleNamespace(config=config, activation_func=self.activation_func, **linears)
            return original(mlp, hidden)[0]

        recomputed = RecomputedOutput()
        output: _Output = self.linear_fc2(
            recomputed.checkpoint(activation, *self.linear_fc1(hidden_states))
        )
        recomputed.discard_output_and_register_recompute(output[0])
        return output

    return forward


# ---- weight gradients ------------------------------------------------------------------------------------------------


def accumulate_weight_gradient(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_output.t() @ total_input`` to ``main_grad`` in place.

    Args:
        total_input: The layer's input, [s * b, in].
        grad_output: Gradient of its output, [s * b, out], in the dtype of ``total_input``.
        main_grad: [out, in], in the same dtype or float32.
    """
    if main_grad.dtype == total_input.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    elif main_grad.is_cuda:
        # torch >= 2.10: accumulates half-precision products in float32, in the GEMM's epilogue.
        torch.addmm(
            main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad
        )
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))


def reduce_over_tp(output: Tensor, linear: Any) -> Tensor:
    """Reduce the output of a row-parallel linear that is set not to communicate, as Megatron's own linear does.

    Args:
        output: This rank's addend of the sum over the tp group, [s, b, h].
        linear: The linear.

    Returns:
        The sum, [s, b, h], or under sequence parallelism this rank's shard of it, [s/tp, b, h]. Generation during
        training turns sequence parallelism off.
    """
    reduce = (
        reduce_scatter_to_sequence_parallel_region
        if linear.sequence_parallel
        else reduce_from_tensor_model_parallel_region
    )
    reduced: Tensor = reduce(output, group=linear.tp_group)
    return reduced


def placeholder_gradient(weight: Any) -> Tensor | None:
    """Gradient that autograd gets for ``weight``, whose real gradient was added to ``main_grad``.

    megatron-core 0.16.1, tensor_parallel/layers.py: any tensor, so that the hook that reduces gradients runs; zeros for
    a tied weight, as autograd adds them to the gradient of its other use.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight)


class WeightGradient:
    """Functions of Apex's ``fused_weight_gradient_mlp_cuda`` that the engine calls."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


def fuse_linear_bias(original: Callable[..., Tensor]) -> Any:
    """``LinearWithGradAccumulationAndAsyncCommunication.forward`` with the bias added by the GEMM.

    Its own addition is a pass over the output at a third of the memory bandwidth: H200, 12,288 x 3,840, 0.12 ms.
    """

    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
    ) -> Tensor:
        if bias is None:
            return original(ctx, input, weight, bias, *options)
        fuses, reduces, is_sequence_parallel, *others = options
        original(
            ctx, input[:0], weight, bias, fuses, reduces, False, *others
        )  # prepares ctx for backward
        ctx.save_for_backward(input, weight)
        ctx.sequence_parallel = is_sequence_parallel
        if is_sequence_parallel:
            group = ctx.tp_group  # not by position: 0.19 has another option after it
            gathered = input.new_empty(group.size() * input.shape[0], *input.shape[1:])
            dist.all_gather_into_tensor(gathered, input.contiguous(), group=group)
            input = gathered
        product = torch.addmm(bias, input.flatten(0, -2), weight.t())
        # Not a view, whose padding columns could not be overwritten (models/gpt.py).
        output: Tensor = torch.ops.aten._unsafe_view(product, [*input.shape[:-1], len(weight)])
        return output

    return staticmethod(forward)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        rows = upstream[0].reshape(-1, weight.shape[1]).to(weight.main_grad.dtype)
        weight.main_grad.index_put_((ids.flatten(),), rows, accumulate=True)
        # For a tied weight the output layer returns the zeros to autograd.
        return None, None if getattr(weight, "zero_out_wgrad", False) else placeholder_gradient(
            weight
        )


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of ``weight`` [v/tp, h]; gradients are added to ``main_grad`` if it exists.

    Otherwise a gradient of the full table is zeroed, filled, and added to the buffer in every microbatch: on an H200,
    128,256 x 4096 and 8,192 tokens, 2.74 ms instead of 0.27. As in the engine's linears, autograd gets a placeholder,
    because the hook that reduces gradients asserts that there is one.
    """
    if torch.is_grad_enabled() and weight.requires_grad and hasattr(weight, "main_grad"):
        rows: Tensor = _Embedding.apply(ids, weight)  # type: ignore[no-untyped-call]
        return rows
    return F.embedding(ids, weight)


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def liger_swiglu(original: Any) -> type:
    """Replacement of the engine's autograd function, of which only ``apply`` is used."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    class LigerSwiGLU:
        """SwiGLU of [tokens, 2 * ffn] -> [tokens, ffn]."""

        @staticmethod
        def apply(
            input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False
        ) -> Tensor:
            if (
                fp8_input_store or cpu_offload_input
            ):  # both change what the engine saves for backward
                result: Tensor = original.apply(input, fp8_input_store, cpu_offload_input)
            else:
                result = LigerFusedGateUpSiLUMulFunction.apply(input, False)
            return result

    return LigerSwiGLU


# ---- losses ----------------------------------------------------------------------------------------------------------
# Vocabulary-parallel cross-entropy by torch.compile, over a vocabulary that is padded to a multiple of tp.
#
# It saves the logits themselves for the backward pass instead of a float32 softmax: per logit the forward pass reads 4
# bytes (the second time mostly from the cache), the backward pass reads 2 and writes 2. liger-kernel 0.8 and
# megatron-core 0.16.1 move 22 and more, and save 4 bytes per logit.
#
# megatron-core 0.16.1 has three more faults here. Vocabulary padding takes part in the softmax, so the loss is not that
# of the Hugging Face model: models mask it in their logits (models/gpt.py). The fused variant casts its gradient to
# bfloat16 whatever the dtype of the logits (fusions/fused_cross_entropy.py). And an ignored label has a gradient unless
# the caller masks its loss.


def row_statistics(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """A vocabulary shard's statistics per token: largest logit, sum of exp(logit - largest), and the label's logit.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], token ids of the full vocabulary.
        first: Token id of the shard's first column.

    Returns:
        Three tensors [s, b], float32; the last is 0 where the label is in another shard.
    """
    width = logits.shape[-1]
    scores = logits.float()
    # A shard of only padding is all -inf, and -inf - (-inf) is NaN.
    largest = scores.amax(-1).clamp(min=torch.finfo(torch.float32).min)
    total = (scores - largest.unsqueeze(-1)).exp().sum(-1)
    column = labels - first
    own = logits.gather(-1, column.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1).float()
    return largest, total, torch.where((column >= 0) & (column < width), own, 0.0)


def logits_gradient(
    logits: Tensor, labels: Tensor, first: int, log_sum: Tensor, upstream: Tensor
) -> Tensor:
    """Gradient of the logits, (softmax - one-hot) * upstream: [s, b, v/tp], in the logits' dtype.

    Args:
        logits: [s, b, v/tp].
        labels: [s, b], token ids of the full vocabulary.
        first: Token id of the shard's first column.
        log_sum: [s, b], float32: log-sum-exp of the logits over the full vocabulary.
        upstream: [s, b], gradients of the token losses.
    """
    softmax = (logits.float() - log_sum.unsqueeze(-1)).exp()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    one_hot = (columns == (labels - first).unsqueeze(-1)).float()
    return ((softmax - one_hot) * upstream.float().unsqueeze(-1)).to(logits.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    """Compile once per process; on a GPU the eager form would write several float32 copies of the logits."""
    return torch.compile(function)


def compiled_for(logits: Tensor, function: Any) -> Any:
    """``function``, compiled if ``logits`` are on a GPU."""
    return _compiled(function) if logits.is_cuda else function


class VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy of each token over a vocabulary that is sharded over a TP group; collective over it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
        """Losses [s, b], float32, of logits [s, b, v/tp] and labels [s, b]."""
        ctx.first = dist.get_rank(tp_group) * logits.shape[-1]
        largest, total, own = compiled_for(logits, row_statistics)(logits, labels, ctx.first)
        if dist.get_world_size(tp_group) > 1:
            largest_of_shard = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
            sums = torch.stack([total * (largest_of_shard - largest).exp(), own])
            dist.all_reduce(sums, group=tp_group)
            total, own = sums.unbind()
        log_sum = largest + total.log()
        ctx.save_for_backward(logits, labels, log_sum)
        loss: Tensor = log_sum - own
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the logits; no communication."""
        logits, labels, log_sum = ctx.saved_tensors
        gradient = compiled_for(logits, logits_gradient)(
            logits, labels, ctx.first, log_sum, upstream[0]
        )
        return gradient, None, None


def token_losses(logits: Tensor, labels: Tensor, tp_group: Any) -> Tensor:
    """Cross-entropy of each token: [s, b], float32, the same on every TP rank.

    Args:
        logits: [s, b, v/tp]; may be overwritten.
        labels: [s, b], token ids; a negative label has the loss 0 and no gradient.
        tp_group: The TP group.
    """
    losses: Tensor = VocabParallelLoss.apply(logits, labels, tp_group)  # type: ignore[no-untyped-call]
    return losses.masked_fill(labels < 0, 0.0)


def language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """``LanguageModule.compute_language_model_loss``: losses [b, s] of labels [b, s] and logits [s, b, v/tp]."""
    loss = token_losses(logits, labels.transpose(0, 1).contiguous(), self.pg_collection.tp)
    return loss.transpose(0, 1).contiguous()


# ---- soft caps -------------------------------------------------------------------------------------------------------
# Values bounded smoothly by cap * tanh(x / cap): attention scores and logits of Gemma 2. Bello et al. 2016 (arXiv
# 1611.09940), section 5; Gemma Team 2024, Gemma 2 (arXiv 2408.00118), section 2.


def _soft_cap(x: Tensor, cap: float) -> Tensor:
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


def _soft_cap_gradient(x: Tensor, upstream: Tensor, cap: float) -> Tensor:
    return (upstream.float() * (1.0 - torch.tanh(x.float() / cap).square())).to(x.dtype)


class _SoftCap(torch.autograd.Function):
    """Saves its input, not its output, which is overwritten to mask the logits of vocabulary padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.cap = cap
        capped: Tensor = compiled_for(x, _soft_cap)(x, cap)
        return capped

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return compiled_for(x, _soft_cap_gradient)(x, upstream[0], ctx.cap), None


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Soft-cap ``x``: ``cap * tanh(x / cap)``, in its shape and dtype, computed in float32."""
    capped: Tensor = _SoftCap.apply(x, cap)  # type: ignore[no-untyped-call]
    return capped


# ---- copies of many tensors ------------------------------------------------------------------------------------------


def copy(
    this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Tensor | None = None
) -> None:
    """Copy each tensor of ``this`` into its partner in ``that``; the dtypes may differ."""
    if this:
        torch._foreach_copy_(list(that), list(this))


def _shard_in_buffer(optimizer: Any, parameter: Tensor) -> Tensor:
    buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
    shard = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    bucket: Tensor = optimizer.buffers[buffer_index].buckets[bucket_index].param_data
    return bucket.view(-1)[shard.start : shard.end]


@torch.no_grad()
def copy_shards(self: Any) -> None:
    """``DistributedOptimizer._copy_main_params_to_model_params`` with one copy of all updated shards.

    Shards of float32 weights are views of the weights' buffer and need no copy.
    """
    if self.is_stub_optimizer:
        return
    masters: MasterOptimizer = self.optimizer
    if masters.model_params is None:  # built once: the GPU may be idle while the host is here
        masters.model_params = {
            main: _shard_in_buffer(self, parameter)
            for pair in zip(
                self.shard_fp32_from_float16_groups, self.model_float16_groups, strict=True
            )
            for main, parameter in zip(*pair, strict=True)
        }
    if not masters.has_copied:
        copy(list(masters.model_params), list(masters.model_params.values()))
    masters.has_copied = False
