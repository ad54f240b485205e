"""Training of the Hugging Face model from the same weights: a reference that shares no code with the engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from tests.parity.sharding import Tensors
from tests.parity.training import (
    MODELS,
    SEED,
    Case,
    Outcome,
    Sentences,
    loader_of,
    module_of,
    train_module,
)


def train_in_hugging_face_names(case: Case) -> Outcome:
    """Train ``case``; on rank 0 the outcome has full tensors with the names and shapes of the Hugging Face model."""
    return train_module(module_of(case), case, loader_of(case), collect=tensors_of)


def tensors_of(module: Any) -> Tensors:
    """Gather a module's full tensors by Hugging Face name on rank 0. Collective over the world.

    tests/families compares them with transformers. Reads the parameters' ``data``, which may hold gradients.
    """
    from lightning_megatron.convert.weight_gatherer import WeightGatherer

    with module.megatron.engine():
        tensors = WeightGatherer(module.model_chunks, module.model_config).tensors()
        return {
            name: tensor.detach().float().cpu().clone()
            for name, tensor in tensors
            if tensor is not None
        }


def hugging_face_model(case: Case, weights: Tensors) -> Any:
    """Build the Hugging Face model of ``case`` with ``weights``, named as in Hugging Face."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = {**MODELS[case.model], **dict(case.model_fields)}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model


def train_hugging_face(
    case: Case,
    initial_weights: Tensors,
    prepare: Callable[[Any], None] | None = None,
) -> Outcome:
    """Train ``case`` with the Hugging Face model, optionally changed by ``prepare``, and torch's optimizer."""
    model = hugging_face_model(case, initial_weights)
    if prepare is not None:
        prepare(model)
    return train_transformers(case, model, initial_weights)


def train_transformers(
    case: Case,
    model: Any,
    initial_weights: Tensors,
) -> Outcome:
    """Train ``model`` on the rows of ``case``, with torch's optimizer; ``initial_weights`` are for the outcome."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch_optimizer(model, case)
    rows = Sentences(case.steps * case.global_batch_size, case.labels)
    # Lightning shuffles the training data of every distributed strategy with this sampler.
    order = torch.tensor(
        list(
            DistributedSampler(
                rows,
                num_replicas=1,
                rank=0,
                seed=SEED,
            )
        )
    )
    losses = []
    grad_norms = []
    gradients = {}
    for step, batch in enumerate(order.split(case.global_batch_size)):
        loss = model(
            input_ids=rows.tokens[batch],
            labels=rows.labels[batch],
        ).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items()}
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip or torch.inf)
        optimizer.step()
        losses.append(loss.item())
        grad_norms.append(norm.item())
    return Outcome(
        losses=losses,
        grad_norms=grad_norms,
        initial_weights=initial_weights,
        gradients=gradients,
        weights={name: p.detach() for name, p in model.named_parameters()},
    )


def torch_optimizer(model: torch.nn.Module, case: Case) -> torch.optim.Optimizer:
    """Torch's optimizer of the options of ``case``."""
    options = dict(case.optimizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": options["weight_decay"],
        },
        {
            "params": [p for p in parameters if p.dim() == 1],
            "weight_decay": 0.0,
        },
    ]
    if options.get("name") == "sgd":
        return torch.optim.SGD(
            groups,
            lr=case.lr,
            momentum=options["momentum"],
        )
    optimizer_class = torch.optim.Adam if options.get("name") == "adam" else torch.optim.AdamW
    return optimizer_class(
        groups,
        lr=case.lr,
        betas=(options["beta1"], options["beta2"]),
        eps=options["eps"],
    )
