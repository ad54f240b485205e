"""The batch that transformers and each layout compute: random tokens with padding, and labels for the model's task."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from lightning_megatron.models.config import CLASSIFICATION, ModelConfig
from lightning_megatron.verify.job import Job

Batch = dict[str, torch.Tensor]
_IGNORED = -100
_SHARES = (1.0, 0.6, 0.35, 0.8)
"""Length of each row as a share of the longest, repeated."""
_MAX_PROMPTS = 4
MAX_NEW_TOKENS = 16


def make_batch(job: Job, model: ModelConfig) -> Batch:
    """The whole batch, by the argument names of the Hugging Face model.

    Args:
        job: Sizes, seed, and the padding token, which real positions do not have.
        model: The model.
    """
    pad_token_id = job.pad_token_id
    generator = torch.Generator().manual_seed(job.seed)
    rows = job.batch_size
    length = job.seq_length
    tokens = _tokens(model, pad_token_id, (rows, length), generator)
    mask = (torch.arange(length) < _lengths(rows, length)[:, None]).long()
    batch = {"input_ids": tokens, "attention_mask": mask}
    if model.architecture == "gpt" and model.task in CLASSIFICATION:
        if pad_token_id is not None:
            # transformers finds the last token of a row by its padding.
            batch["input_ids"] = tokens.masked_fill(mask == 0, pad_token_id)
        batch |= _label_inputs(model, tokens, mask, generator)
    elif model.architecture == "gpt":
        batch["labels"] = tokens.masked_fill(mask == 0, _IGNORED)
    elif model.architecture == "t5":
        targets = _tokens(model, pad_token_id, (rows, length), generator)
        # The decoder's rows are padded in another order than the encoder's.
        batch["labels"] = targets.masked_fill(mask.flip(0) == 0, _IGNORED)
    else:
        batch |= _bert_inputs(model, tokens, mask, generator)
    return batch


def _lengths(rows: int, length: int) -> torch.Tensor:
    shares = [_SHARES[row % len(_SHARES)] for row in range(rows)]
    return torch.tensor([max(2, int(share * length)) for share in shares])


def _tokens(
    model: ModelConfig,
    without: int | None,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> torch.Tensor:
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    if without is None:
        return tokens
    return tokens.masked_fill(tokens == without, (without + 1) % model.vocab_size)


def _bert_inputs(
    model: ModelConfig,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
) -> Batch:
    """Token types, and the labels of a BERT's task."""
    rows, length = tokens.shape
    inputs: Batch = {}
    if model.num_tokentypes:
        half = torch.arange(length) >= length // 4
        inputs["token_type_ids"] = (half * (model.num_tokentypes > 1)).long().expand(rows, length)
    return inputs | _label_inputs(model, tokens, mask, generator)


def _label_inputs(
    model: ModelConfig,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    generator: torch.Generator,
) -> Batch:
    """Labels of the model's task, other than a GPT's or T5's language modeling."""
    rows = len(tokens)
    inputs: Batch = {}
    is_target = (mask == 1) & (torch.rand(tokens.shape, generator=generator) < 0.3)
    is_target[:, 1] = True
    if model.task in ("pretraining", "masked_lm"):
        inputs["labels"] = tokens.masked_fill(~is_target, _IGNORED)
    elif model.task == "token_classification":
        classes = torch.randint(model.num_labels, tokens.shape, generator=generator)
        inputs["labels"] = classes.masked_fill(~is_target, _IGNORED)
    elif model.task == "sequence_classification":
        inputs["labels"] = _row_labels(model, rows, generator)
    else:
        inputs["start_positions"] = torch.zeros(rows, dtype=torch.long)
        inputs["end_positions"] = mask.sum(dim=1) - 1
    if model.task == "pretraining":
        inputs["next_sentence_label"] = torch.arange(rows) % 2
    return inputs


def _row_labels(model: ModelConfig, rows: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.rand((rows, model.num_labels), generator=generator)
    if model.problem_type == "multi_label_classification":
        return (values > 0.5).float()
    is_regression = model.problem_type == "regression"
    if is_regression or (model.problem_type is None and model.num_labels == 1):
        return values.squeeze(1) if model.num_labels == 1 else values
    return torch.randint(model.num_labels, (rows,), generator=generator)


def logits_inputs(batch: Batch, model: ModelConfig) -> Batch:
    """Arguments of ``MegatronModule.logits`` for the batch; a T5's decoder reads its labels, shifted to the right."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    if model.architecture == "t5":
        labels = batch["labels"]
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = model.decoder_start_token_id
        inputs["decoder_input_ids"] = shifted.masked_fill(shifted == _IGNORED, model.pad_token_id)
    return inputs


def real_positions(batch: Batch, model: ModelConfig) -> torch.Tensor:
    """[b, s], whether a position's logits are compared: those of padding mean nothing."""
    if model.architecture == "t5":
        return batch["labels"] != _IGNORED
    return batch["attention_mask"].bool()


def make_prompts(batch: Batch) -> Batch:
    """Prompts from the beginnings of the rows, padded on the left."""
    width = batch["input_ids"].shape[1] // 2
    tokens = batch["input_ids"][:_MAX_PROMPTS, :width]
    lengths = _lengths(len(tokens), width)
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask}


def num_new_tokens(job: Job) -> int:
    """Tokens to generate for each prompt."""
    return min(MAX_NEW_TOKENS, job.seq_length // 2)


def sampled(name: str, tensor: torch.Tensor, samples: int) -> torch.Tensor:
    """Elements of a gradient that are compared, fp32 on the host: all, or ``samples`` of them that the name chooses."""
    flat = tensor.detach().reshape(-1)
    positions = sampled_positions(name, flat.numel(), samples)
    if positions is not None:
        flat = flat[positions.to(flat.device)]
    # A copy: the next step overwrites the gradient.
    return flat.to("cpu", torch.float32, copy=True)


def sampled_positions(name: str, count: int, samples: int) -> torch.Tensor | None:
    """Positions of the sampled elements of a flat tensor; None for all."""
    if count <= samples:
        return None
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(count, (samples,), generator=generator)


def on_device(batch: Batch, device: Any) -> Batch:
    """The batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
