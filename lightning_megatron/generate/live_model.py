"""Distributed generation and logits: ``LiveModel``.

All ranks compare their arguments first; shared rows are sharded over the data-parallel replicas and gathered in order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.collectives import all_gather_rows, call_on_all_ranks
from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.decode import decode
from lightning_megatron.generate.inference_mode import inference_mode
from lightning_megatron.generate.inputs import check_rows
from lightning_megatron.generate.layout import NO_TARGET, inputs_for_logits
from lightning_megatron.generate.log_likelihoods import LogLikelihoods, Pair, plan_scoring
from lightning_megatron.generate.pipeline import Stages
from lightning_megatron.generate.request import build_request
from lightning_megatron.generate.sampler import uniform_numbers
from lightning_megatron.generate.special_tokens import SpecialTokens
from lightning_megatron.generate.static_steps import uses_static_cache
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import Batch


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """Generated sequences and their scores; the same on every rank."""

    sequences: Tensor
    """[b, s + new], int64: the prompts and their completions, padded after the end of rows that ended before others.
    For a T5 the decoder's prompts and completions, [b, s_dec + new]."""
    scores: Tensor
    """[b], fp32: the score that ranks the beams of a beam search; otherwise the sum of the log-probabilities."""
    log_probabilities: Tensor
    """[b, new], fp32: log-probability of each new token under the model, before temperature and other logits
    processors; 0 after the end of a row."""


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """A distributed model. Unless a method says otherwise, all ranks of the world must make the same calls."""

    chunks: Sequence[torch.nn.Module]
    """This rank's model chunks, wrapped or not."""
    config: ModelConfig
    """Config of the model."""
    topology: Topology
    """Layout and position of this rank."""
    device: torch.device
    """Device of the chunks."""
    is_own: bool = True
    """Whether this package built the chunks. A user's own chunks may do anything in a step, so they are captured as
    CUDA graphs only on request."""

    # ---- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Mapping[str, Tensor | None],
        arguments: Mapping[str, Any],
        special: SpecialTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
        *,
        is_shared: bool = True,
    ) -> GenerationOutput:
        """Generate completions of prompts, on the device of ``input_ids``.

        Args:
            inputs: The prompts, the same on every rank; rows are sharded over the replicas.
            arguments: Fields of ``GenerationOptions``, as for ``build_request``.
            special: The model's special tokens.
            on_tokens: As for ``decode``.
            is_shared: Whether all replicas have the same rows and share them; else each replica has rows of its own,
                and only the ranks of one replica must make the same call.

        Raises:
            ConfigError: On all these ranks, before anything runs, if a prompt cannot be continued.
        """
        device = getattr(inputs["input_ids"], "device", self.device)
        on_host = _on_host(inputs)
        build = partial(build_request, on_host, arguments, self.config, special, on_tokens)
        if is_shared:
            request = call_on_all_ranks(build)
        else:
            request = build()
        options = request.options
        max_new = request.max_new_tokens
        static_cache = options.static_cache
        if not self.is_own:
            static_cache = bool(static_cache)
        num_sequences = options.num_return_sequences
        # A beam search returns several sequences of the same row.
        copies = 1
        if options.num_beams == 1:
            copies = num_sequences
        num_rows = len(request.prefix) * copies
        rows = slice(0, num_rows)
        counts = [num_rows]
        if is_shared:
            settings = (options, request.eos_token_ids, request.pad_token_id)
            _check_agreement(
                settings,
                *on_host.values(),
                request.stop_strings and request.stop_strings.embedding_vec,
            )
            rows, counts = self._shard_rows(num_rows)
        static = uses_static_cache(static_cache, max_new, self.config, self.device)
        values = torch.empty((0, max_new + 1), device=self.device)
        tokens = values.long()
        with inference_mode(self.chunks) as models:
            if rows.stop > rows.start:
                prompts = request.prompts.expand(rows, copies, self.device)
                uniform = uniform_numbers(options.seed, max_new, num_rows)
                tokens, values = decode(
                    models,
                    self._replica,
                    replace(request, prompts=prompts),
                    uniform[:, rows],
                    on_tokens,
                    static=static,
                )
            counts = [count * num_sequences // copies for count in counts]
            group = self.topology.dp_group
            tokens = all_gather_rows(tokens, counts, group)
            values = all_gather_rows(values, counts, group)
        tokens = tokens.to(device)
        values = values.to(device)
        longest = int(tokens[:, -1].max())
        prefix = request.prefix.repeat_interleave(num_sequences, dim=0)
        new_tokens = tokens[:, :longest]
        return GenerationOutput(
            sequences=torch.cat((prefix.to(device), new_tokens), dim=-1),
            scores=values[:, -1],
            log_probabilities=values[:, :longest],
        )

    # ---- logits ------------------------------------------------------------------------------------------------------

    def logits(
        self,
        inputs: Mapping[str, Tensor | None],
        *,
        is_shared: bool = True,
        last_stage_only: bool = False,
    ) -> Tensor | None:
        """Compute logits of rows: fp32, on the device of the weights.

        Their shape is ``[b, s, vocab_size]``, where s is the length of the decoder's rows if there is a decoder. For
        other tasks: ``[b, num_labels]`` (``sequence_classification``) or ``[b, s, num_labels]``.

        Args:
            inputs: The rows, the same on every rank; if they are not shared, a replica may have none.
            is_shared: As for ``generate``.
            last_stage_only: Return them on the ranks of the last pipeline stage only, where they are computed, and None
                on the other ranks.

        Raises:
            ConfigError: On all these ranks, before anything runs, if the model cannot read a row.
        """
        local = _on_host(inputs)
        counts = [0]
        if is_shared:
            call_on_all_ranks(partial(check_rows, local, self.config))
            _check_agreement("logits", *local.values())
            rows, counts = self._shard_rows(len(local["input_ids"]))
            local = {name: tensor[rows] for name, tensor in local.items()}
        elif len(local["input_ids"]) > 0:
            check_rows(local, self.config)
        topology = self.topology
        is_kept = topology.is_last_stage or not last_stage_only
        shape = self._logits_shape(local)
        # Every rank must enter, also in a replica without rows: all-gathers of its parameters may be pending.
        with inference_mode(self.chunks) as models:
            logits = torch.empty(
                shape if is_kept else 0,
                dtype=torch.float32,
                device=self.device,
            )
            if shape[0] > 0:
                moved = {name: tensor.long().to(self.device) for name, tensor in local.items()}
                stages = Stages(models, topology, inputs_for_logits(moved, self.config))
                computed = stages.prefill(every_position=True)
                if computed is not None:
                    # Without vocabulary padding.
                    logits = computed[..., : shape[-1]].contiguous()
                if topology.parallel.pp > 1 and not last_stage_only:
                    dist.broadcast(logits, topology.last_stage, group=topology.pp_group)
            if not is_kept:
                return None
            # A data-parallel group lies within one stage.
            return all_gather_rows(logits, counts, topology.dp_group)

    # ---- log-likelihoods ---------------------------------------------------------------------------------------------

    def log_likelihoods(
        self,
        pairs: Sequence[Pair],
        batch_size: int,
        on_batch: Callable[[int], None] | None = None,
    ) -> LogLikelihoods:
        """Compute log-likelihoods of continuations; replicas take turns with the batches.

        Args:
            pairs: Tokens of contexts and continuations, the same on every rank.
            batch_size: Largest number of rows in a forward pass.
            on_batch: Called with the number of continuations of each batch that this replica has computed.

        Raises:
            ConfigError: On all ranks, before anything runs, if the model cannot score a continuation.
        """
        plan = call_on_all_ranks(partial(plan_scoring, pairs, batch_size, self.config))
        tokens = [torch.tensor([*context, NO_TARGET, *rest]) for context, rest in pairs]
        _check_agreement(f"batch_size={batch_size}", *tokens)
        topology = self.topology
        replicas = topology.dp if self._replica is topology else 1
        own = range(len(plan.batches))[topology.dp_rank % replicas :: replicas]
        counts = [0] * replicas
        for batch in range(len(plan.batches)):
            counts[batch % replicas] += plan.num_targets(batch)
        # Every rank must enter, also in a replica without batches.
        with inference_mode(self.chunks) as models:
            scores = torch.empty(counts[topology.dp_rank % replicas], 2, device=self.device)
            filled = 0
            for batch in own:
                progress.tick()
                inputs = plan.inputs(batch).map(lambda tensor: tensor.to(self.device))
                assert inputs.targets is not None
                computed = Stages(models, topology, inputs).score()
                end = filled + plan.num_targets(batch)
                if computed is not None:
                    scores[filled:end] = computed[inputs.targets[..., 1] != NO_TARGET]
                filled = end
                if on_batch is not None:
                    on_batch(plan.num_pairs_of(batch))
            if topology.parallel.pp > 1:
                dist.broadcast(scores, topology.last_stage, group=topology.pp_group)
            scores = all_gather_rows(scores, counts, topology.dp_group)
        order = [
            batch
            for replica in range(replicas)
            for batch in range(len(plan.batches))[replica::replicas]
        ]
        return plan.collect(order, scores)

    def _logits_shape(self, rows: Batch) -> list[int]:
        model = self.config
        shape = list(rows.get("decoder_input_ids", rows["input_ids"]).shape)
        if model.has_output_layer:
            return [*shape, model.vocab_size]
        if model.task == "sequence_classification":
            del shape[1]
        return [*shape, model.num_labels]

    @property
    def _replica(self) -> Topology:
        """Topology of the ranks that compute the same rows: those of one replica, or of all replicas.

        Experts that are spread over replicas make these communicate in every layer. So all of them compute all rows,
        and one rank chooses all tokens: none then ends before another.
        """
        topology = self.topology
        if topology.parallel.ep == 1 or topology.parallel.ep_is_within_replica:
            return topology
        world = dist.group.WORLD
        assert world is not None
        return replace(topology, mp_group=world)

    def _shard_rows(self, rows: int) -> tuple[slice, list[int]]:
        """Slice of rows for this replica, and rows per replica; all rows if experts are spread over replicas."""
        if self._replica is not self.topology:
            return slice(0, rows), [rows]
        dp = self.topology.dp
        bounds = [rows * replica // dp for replica in range(dp + 1)]
        shards = list(itertools.pairwise(bounds))
        counts = [end - begin for begin, end in shards]
        return slice(*shards[self.topology.dp_rank]), counts


def _on_host(inputs: Mapping[str, Tensor | None]) -> Batch:
    """Move the inputs that are not None to the host; other types than tensors are refused later, on all ranks."""
    on_host: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            on_host[name] = value.cpu()
        elif value is not None or name == "input_ids":
            on_host[name] = value
    return on_host


def _check_agreement(settings: object, *tensors: Tensor | None) -> None:
    """Raise on every rank if prompts or options differ between ranks, which would deadlock. Collective over the world.

    Args:
        settings: Compared by its ``repr``.
        tensors: On the host.

    Raises:
        ConfigError: On all ranks, if the prompts or the options differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digest = hashlib.sha256(repr(settings).encode())
    for tensor in tensors:
        digest.update(repr(tensor is None or tensor.shape).encode())
        if tensor is not None:
            digest.update(tensor.long().numpy().tobytes())
    digests = gather_objects(digest.hexdigest())
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ConfigError(
                f"rank {rank} has other prompts or options than rank 0; give every rank the same"
            )
