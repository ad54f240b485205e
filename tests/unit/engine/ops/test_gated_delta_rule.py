"""The gated delta rule in chunks equals transformers' and the recurrence, with states and documents."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.engine.ops.gated_delta_rule import CHUNK, gated_delta_rule
from lightning_megatron.engine.ops.unit_lower_inverse import unit_lower_inverse

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

HEADS = {"rows": 2, "keys": 2, "values": 4, "key": 8, "value": 12}


def _inputs(
    length: int,
    device: str = "cpu",
    width: int | None = None,
) -> dict[str, Tensor]:
    """Queries, keys, values, decays and rates of a sequence, and a state, [s, b, ...], which need gradients."""
    n = dict(HEADS)
    if width is not None:
        n |= {"key": width, "value": width}
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = (length, n["rows"], n["values"])
    inputs = {
        "query": random(
            length,
            n["rows"],
            n["keys"],
            n["key"],
        ),
        "key": random(
            length,
            n["rows"],
            n["keys"],
            n["key"],
        ),
        "value": random(*heads, n["value"]),
        # Some tokens forget all.
        "log_decay": -(random(*heads).exp() ** 2) * 0.2,
        "rate": random(*heads).sigmoid(),
        "state": random(
            n["rows"],
            n["values"],
            n["key"],
            n["value"],
        ),
    }
    return {name: tensor.to(device).requires_grad_() for name, tensor in inputs.items()}


def _reference(function: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Output, [s, b, ...], and last state of a function of transformers."""
    query, key, value, log_decay, rate = (
        inputs[name].transpose(0, 1) for name in ("query", "key", "value", "log_decay", "rate")
    )
    # transformers 5.5 leaves it to the layer.
    repeats = value.shape[2] // key.shape[2]
    output, last = function(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value,
        g=log_decay,
        beta=rate,
        initial_state=inputs.get("state"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output.transpose(0, 1), last


def _gradients(results: tuple[Tensor, ...], inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), device=results[0].device)
    for result in results:
        weights = torch.randn(result.shape, generator=generator).to(result.device)
        total = total + (result.float() * weights).sum()
    return torch.autograd.grad(total, list(inputs.values()))


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max())
    )


@pytest.mark.parametrize("length", [2, CHUNK, 2 * CHUNK + 11])
def test_chunks_equal_transformers(length: int) -> None:
    inputs = _inputs(length)
    actual = gated_delta_rule(**inputs)
    expected = _reference(modeling.torch_recurrent_gated_delta_rule, inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        _assert_close(ours, theirs)
    gradients = zip(_gradients(actual, inputs), _gradients(expected, inputs), strict=True)
    for ours, theirs in gradients:
        _assert_close(ours, theirs)


def test_tokens_one_by_one_equal_chunks() -> None:
    inputs = _inputs(CHUNK + 5)
    state = inputs.pop("state")
    outputs = []
    for token in zip(*(tensor.split(1) for tensor in inputs.values()), strict=True):
        output, state = gated_delta_rule(*token, state=state)
        outputs.append(output)
    expected, last = gated_delta_rule(**_inputs(CHUNK + 5))
    _assert_close(torch.cat(outputs), expected)
    _assert_close(state, last)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    length = 2 * CHUNK + 30
    inputs = _inputs(length)
    del inputs["state"]
    documents = torch.zeros(length, 2, dtype=torch.int64)
    # Within a chunk, at its end, in the next one, and over a whole one.
    for row, begins in enumerate(([20, 41, CHUNK], [CHUNK + 3])):
        for begin in begins:
            documents[begin:, row] += 1
    output, last = gated_delta_rule(**inputs, documents=documents)
    expected = torch.zeros_like(output)
    for row in range(2):
        for document in documents[:, row].unique():
            own = documents[:, row] == document
            alone = {name: tensor[own, row : row + 1] for name, tensor in inputs.items()}
            values, end = _reference(modeling.torch_chunk_gated_delta_rule, alone)
            expected[own, row] = values[:, 0]
        _assert_close(last[row], end[0])
    _assert_close(output, expected)
    results = zip(_gradients((output,), inputs), _gradients((expected,), inputs), strict=True)
    for ours, theirs in results:
        _assert_close(ours, theirs)


def test_inverse_of_equal_keys_has_all_digits() -> None:
    """Equal keys with rates of 1: powers of the matrix have entries of 10^18, the inverse of 1."""
    ones = torch.ones(CHUNK, CHUNK).tril(-1)
    inverse = unit_lower_inverse(ones)
    expected = torch.eye(CHUNK) - torch.eye(CHUNK).roll(1, 0).tril(-1)
    assert inverse.equal(expected)


def test_inverse_and_its_gradient_equal_those_of_torch() -> None:
    lower = torch.randn(3, 2, CHUNK, CHUNK, generator=torch.Generator().manual_seed(1)).tril(-1)
    lower = (0.3 * lower).requires_grad_()
    weights = torch.randn(lower.shape, generator=torch.Generator().manual_seed(2))
    inverse = unit_lower_inverse(lower)
    expected = torch.linalg.inv(lower + torch.eye(CHUNK))
    _assert_close(inverse, expected)
    (ours,) = torch.autograd.grad((inverse * weights).sum(), lower)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), lower)
    _assert_close(ours, theirs.tril(-1))


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_chunks_equal_the_cpu(dtype: torch.dtype, has_documents: bool) -> None:
    length = 5 * CHUNK + 7
    documents = None
    if has_documents:
        documents = torch.arange(length)[:, None].expand(-1, 2) // 50
    exact = _inputs(length, width=128)
    expected = gated_delta_rule(**exact, documents=documents)
    ours = _inputs(length, "cuda", 128)
    narrow = {
        name: tensor.to(dtype) if name in ("query", "key", "value") else tensor
        for name, tensor in ours.items()
    }
    moved = None if documents is None else documents.cuda()
    actual = gated_delta_rule(**narrow, documents=moved)
    assert actual[0].dtype == dtype
    limit = 1e-4 if dtype is torch.float32 else 2e-2
    results = (*actual, *_gradients(actual, ours))
    references = (*expected, *_gradients(expected, exact))
    for one, other in zip(results, references, strict=True):
        error = (one.float().cpu() - other).norm() / other.norm()
        assert error < limit, error
