"""xIELU: an activation function with two learned slopes for each layer, as in Apertus.

Huang and Schlag 2024 (arXiv 2411.13010). With alpha_p and alpha_n, the softplus of two parameters::

    x > 0:  alpha_p x^2 + beta x
    else:   (beta + alpha_n) (exp(min(x, eps)) - 1 - x) + beta x
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for

ALPHAS = "activation_func.alphas"
"""End of the name of both parameters in checkpoints."""
CONSTANTS = ("activation_func.beta", "activation_func.eps")
"""Ends of the names of the constants in checkpoints, which are not trained."""
_BETA = 0.5
_EPS = -1e-6
_INITIAL_SLOPE = 0.8
"""Both alpha_p and beta + alpha_n in a new model."""


class XIELU(MegatronModule):
    """The activation function of a layer; its parameters are replicated over tp.

    Attributes:
        alphas: [2]: parameters of positive and of negative inputs; alpha_p and alpha_n are their softplus.
        beta: [1], not trained.
        eps: [1], not trained.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        """Create the initial parameters and constants."""
        super().__init__(config=config)
        slopes = (_INITIAL_SLOPE, _INITIAL_SLOPE - _BETA)
        alphas = [math.log(math.expm1(slope)) for slope in slopes]
        dtype = config.params_dtype
        beta = torch.tensor([_BETA], dtype=dtype)
        eps = torch.tensor([_EPS], dtype=dtype)
        self.alphas = torch.nn.Parameter(torch.tensor(alphas, dtype=dtype))
        self.register_buffer("beta", beta)
        self.register_buffer("eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., ffn/tp]; computed in fp32. The backward pass is collective over the tp group."""
        alphas = self.alphas.float()
        if self.config.tensor_model_parallel_size > 1:
            # Each rank sees some of the columns: the gradients are summed.
            alphas = copy_to_tensor_model_parallel_region(alphas)
        function = compiled_for(x, _xielu)
        activated: Tensor = function(
            x,
            alphas,
            self.beta,
            self.eps,
        )
        return activated


def _xielu(
    x: Tensor,
    alphas: Tensor,
    beta: Tensor,
    eps: Tensor,
) -> Tensor:
    values = x.float()
    linear = beta.float() * values
    of_positive, of_negative = F.softplus(alphas)
    positive = of_positive * values * values
    below_zero = torch.expm1(torch.minimum(values, eps.float()))
    negative = (below_zero - values) * (beta.float() + of_negative)
    curved = torch.where(values > 0, positive, negative)
    return (curved + linear).to(x.dtype)
