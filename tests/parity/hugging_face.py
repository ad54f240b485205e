"""What does the Hugging Face model with the same weights do? The reference that shares no code with the engine.

The mapping between the two namings is written out here by hand; it is linear, so that it maps gradients as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DistributedSampler

from tests.parity.sharding import Tensors
from tests.parity.training import MODELS, SEED, Case, Outcome, Sentences


def in_hugging_face_names(tensors: Tensors, case: Case) -> Tensors:
    """Megatron's whole tensors under the names, and in the shapes, of the Hugging Face model."""
    fields = _fields(case)
    renamed = _gpt2(tensors, fields) if fields["model_type"] == "gpt2" else _llama(tensors, fields)
    if "output_layer.weight" in tensors:
        renamed["lm_head.weight"] = tensors["output_layer.weight"]
    return renamed


def outcome_in_hugging_face_names(run: Outcome, case: Case) -> Outcome:
    """A run of ours with Hugging Face's names."""
    return Outcome(
        losses=run.losses,
        grad_norms=run.grad_norms,
        initial_weights=in_hugging_face_names(run.initial_weights, case),
        gradients=in_hugging_face_names(run.gradients, case),
        weights=in_hugging_face_names(run.weights, case),
    )


def _fields(case: Case) -> dict[str, Any]:
    return {**MODELS[case.model], **dict(case.model_fields)}


def _gpt2(tensors: Tensors, fields: dict[str, Any]) -> Tensors:
    heads = fields["n_head"]
    renamed = {
        "transformer.wte.weight": tensors["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": tensors["embedding.position_embeddings.weight"],
        "transformer.ln_f.weight": tensors["decoder.final_layernorm.weight"],
        "transformer.ln_f.bias": tensors["decoder.final_layernorm.bias"],
    }
    for i in range(fields["n_layer"]):
        layer, prefix = _layer(tensors, i), f"transformer.h.{i}"
        renamed |= {
            f"{prefix}.ln_1.weight": layer["self_attention.linear_qkv.layer_norm_weight"],
            f"{prefix}.ln_1.bias": layer["self_attention.linear_qkv.layer_norm_bias"],
            # Hugging Face's Conv1D keeps its matrices transposed.
            f"{prefix}.attn.c_attn.weight": _qkv(layer["self_attention.linear_qkv.weight"], heads, heads).t(),
            f"{prefix}.attn.c_attn.bias": _qkv(layer["self_attention.linear_qkv.bias"], heads, heads),
            f"{prefix}.attn.c_proj.weight": layer["self_attention.linear_proj.weight"].t(),
            f"{prefix}.attn.c_proj.bias": layer["self_attention.linear_proj.bias"],
            f"{prefix}.ln_2.weight": layer["mlp.linear_fc1.layer_norm_weight"],
            f"{prefix}.ln_2.bias": layer["mlp.linear_fc1.layer_norm_bias"],
            f"{prefix}.mlp.c_fc.weight": layer["mlp.linear_fc1.weight"].t(),
            f"{prefix}.mlp.c_fc.bias": layer["mlp.linear_fc1.bias"],
            f"{prefix}.mlp.c_proj.weight": layer["mlp.linear_fc2.weight"].t(),
            f"{prefix}.mlp.c_proj.bias": layer["mlp.linear_fc2.bias"],
        }
    return renamed


def _llama(tensors: Tensors, fields: dict[str, Any]) -> Tensors:
    heads, groups, ffn = fields["num_attention_heads"], fields["num_key_value_heads"], fields["intermediate_size"]
    head_dim = fields["hidden_size"] // heads
    renamed = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"],
        "model.norm.weight": tensors["decoder.final_layernorm.weight"],
    }
    for i in range(fields["num_hidden_layers"]):
        layer, prefix = _layer(tensors, i), f"model.layers.{i}"
        qkv = _qkv(layer["self_attention.linear_qkv.weight"], heads, groups)
        q, k, v = qkv.split([heads * head_dim, groups * head_dim, groups * head_dim])
        gate, up = layer["mlp.linear_fc1.weight"].split([ffn, ffn])
        renamed |= {
            f"{prefix}.input_layernorm.weight": layer["self_attention.linear_qkv.layer_norm_weight"],
            f"{prefix}.self_attn.q_proj.weight": q,
            f"{prefix}.self_attn.k_proj.weight": k,
            f"{prefix}.self_attn.v_proj.weight": v,
            f"{prefix}.self_attn.o_proj.weight": layer["self_attention.linear_proj.weight"],
            f"{prefix}.post_attention_layernorm.weight": layer["mlp.linear_fc1.layer_norm_weight"],
            f"{prefix}.mlp.gate_proj.weight": gate,
            f"{prefix}.mlp.up_proj.weight": up,
            f"{prefix}.mlp.down_proj.weight": layer["mlp.linear_fc2.weight"],
        }
    return renamed


def _layer(tensors: Tensors, index: int) -> Tensors:
    prefix = "decoder.layers."
    return {key.removeprefix(prefix): value[index] for key, value in tensors.items() if key.startswith(prefix)}


def _qkv(rows: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """All queries, then all keys, then all values; Megatron keeps each group's queries, key and value together."""
    queries = heads // groups
    by_group = rows.reshape(groups, queries + 2, -1, *rows.shape[1:])
    parts = (by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1])
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


# ---- on the rank ----------------------------------------------------------------------------------------------------


def hugging_face_model(case: Case, weights: Tensors) -> Any:
    """The Hugging Face model of ``case`` with ``weights``, which carry its own names."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    fields = _fields(case)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model


def train_hugging_face(case: Case, initial_weights: Tensors) -> Outcome:
    """``case`` trained by Hugging Face's model and torch's optimizer."""
    model = hugging_face_model(case, initial_weights)
    parameters = dict(model.named_parameters())
    optimizer = _torch_optimizer(list(parameters.values()), case)
    rows = Sentences(case.steps * case.global_batch_size, case.labels)
    # Lightning shuffles the training data of every distributed strategy with this sampler.
    order = torch.tensor(list(DistributedSampler(rows, num_replicas=1, rank=0, seed=SEED)))
    losses, grad_norms, gradients = [], [], {}
    for step, batch in enumerate(order.split(case.global_batch_size)):
        loss = model(input_ids=rows.tokens[batch], labels=rows.labels[batch]).loss
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
        weights={name: p.detach() for name, p in parameters.items()},
    )


def _torch_optimizer(parameters: list[torch.nn.Parameter], case: Case) -> torch.optim.Optimizer:
    options = dict(case.optimizer)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options["weight_decay"]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if options.get("name") == "sgd":
        return torch.optim.SGD(groups, lr=case.lr, momentum=options["momentum"])
    optimizer_class = torch.optim.Adam if options.get("name") == "adam" else torch.optim.AdamW
    return optimizer_class(groups, lr=case.lr, betas=(options["beta1"], options["beta2"]), eps=options["eps"])
