"""Pipelined forward passes for generation and logits: token ids in, logits out, KV caches kept in between.

Each stage runs its layers on the hidden states that the previous stage has sent. Rows are split into as many groups as
there are stages, so that the stages work at the same time: while the second stage processes the first group, the first
stage processes the second group.

In an encoder-decoder the first pass sends what training sends, the states of both stacks; the cross-attention keeps its
keys and values, and from then on stages send the decoder's newest token only.

With static caches every pass of one token per row has the same shapes and addresses. The first of them runs eagerly,
which compiles what has to be compiled; before the second one, each chunk's work on each group of rows is captured as a
CUDA graph. Communication between stages and the choice of tokens are not part of the graphs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.ops.attention import SDPAttention
from lightning_megatron.engine.ops.key_value_cache import KeyValueCache, TokenStep, slots_for
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.bert import BertChunk
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.gpt import GPTChunk

Work = Callable[[], Tensor]
"""Forward pass of a chunk over a group of rows. In static steps it uses tensors at fixed addresses, and the host
decides nothing by their values."""

MIN_WINDOW = 1024
"""Minimum number of slots of static caches that queries attend to, or all slots if there are fewer. It doubles when
sequences outgrow it, and the steps are captured again."""

MIN_NEW_TOKENS = 8
"""Fewest new tokens for which static caches are the default: capture takes as long as one or two eager steps, and a
replayed step a fifth of one."""

_INFERENCE_SETTINGS = {
    "training": False,  # the engine recomputes activations in training only
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "context_parallel_size": 1,
}
"""Attributes of modules and configs that are set for training or a split sequence, with their values for inference; a
single token cannot be split."""


@contextlib.contextmanager
def inference_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Context manager: inference mode for a model in training, restored on exit; every rank must enter.

    Yields this rank's unwrapped chunks with all parameters gathered, without dropout, recomputation, sequence and
    context parallelism (the ranks of a cp group compute the same). Wrappers, gradients, optimizer and random states are
    left alone.

    Args:
        chunks: Wrapped or not.
    """
    finish_parameter_gathers(list(chunks))
    models = [unwrap(chunk) for chunk in chunks]
    modules = [module for model in models for module in model.modules()]
    # Some modules have a copy of the config (megatron-core 0.16.1, transformer/attention.py).
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    # Training reuses what the engine caches meanwhile (rotary angles), so no tensors of torch's inference mode.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        for holder in (*modules, *configs.values()):
            for name, value in _INFERENCE_SETTINGS.items():
                if (before := getattr(holder, name, value)) != value:
                    stack.callback(setattr, holder, name, before)
                    setattr(holder, name, value)
        yield models


def uses_static_cache(
    requested: bool | None, new_tokens: int, model: ModelConfig, device: torch.device
) -> bool:
    """Whether a call uses static caches: as ``static_cache`` says, by default where a GPU gains by it.

    Args:
        requested: The option ``static_cache``.
        new_tokens: Maximum number of new tokens per row.
        model: Config of the model.
        device: Device of the model.

    Raises:
        ConfigError: If static caches are requested and the model does not support them.
    """
    reason = None
    if model.architecture == "t5":
        reason = "its decoder has cross-attention, and position biases that the host computes from the length"
    elif model.experts is not None:
        reason = "the host must know how many tokens go to each expert"
    elif (scaling := model.rope_scaling) is not None and scaling.depends_on_length:
        reason = f"the host computes its rotary frequencies ({scaling.rope_type}) from the length at every token"
    if requested is None:
        return device.type == "cuda" and reason is None and new_tokens >= MIN_NEW_TOKENS
    if requested and reason is not None:
        raise ConfigError(
            f"static_cache=True: {model.family} does not support it, as {reason}; leave it out"
        )
    return requested


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Inputs of one forward pass; the tokens follow those in the KV caches."""

    tokens: Tensor
    """[b, s], int64."""
    positions: Tensor | None
    """[b, s], int64; None for 0, 1, 2, ..."""
    mask: Tensor | None
    """[b, cached + s], int64, 0 for padding; None for no padding."""
    longest: int
    """Number of tokens of the longest row of all replicas, cached ones included."""
    source: Tensor | None = None
    """[b, s_enc], int64, input of the encoder of an encoder-decoder; [b, 0] once the caches hold it. None for other
    models."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source, also in passes after the first; None for no padding."""
    token_types: Tensor | None = None
    """[b, s], int64, for a BERT; None for all zeros."""

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelInputs:
        """A copy with ``function`` applied to each tensor."""
        tensors: dict[str, Any] = {
            name: function(x) for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors)

    def rows(self, rows: slice) -> ModelInputs:
        """A slice of the rows."""
        return self.map(lambda tensor: tensor[rows])

    def expand(self, rows: slice, copies: int, device: torch.device) -> ModelInputs:
        """Repeat each row ``copies`` times, one after the other, and take the slice ``rows`` on ``device``."""
        return self.map(lambda tensor: tensor.repeat_interleave(copies, dim=0)[rows].to(device))

    @property
    def is_token(self) -> Tensor:
        """[b, s], int64, for prompts: 1 for tokens, 0 for padding."""
        return torch.ones_like(self.tokens) if self.mask is None else self.mask


class _Chunk:
    """A model chunk on this rank, with the KV caches of its layers for each group of rows."""

    def __init__(self, model: Any, num_groups: int, slots: int | None, source: int) -> None:
        """Create empty caches.

        Args:
            model: The unwrapped chunk.
            num_groups: Number of groups of rows.
            slots: Maximum number of tokens per row; None for no caches.
            source: Number of tokens that an encoder reads.
        """
        self.model = model
        # Not the layers of an encoder, which runs once.
        modules = () if slots is None else model.decoder.modules()
        self.layers = [module for module in modules if isinstance(module, SDPAttention)]
        self.caches = [
            [KeyValueCache(source if layer.is_cross else slots or 0) for layer in self.layers]
            for _ in range(num_groups)
        ]
        """One cache per layer for each group."""

    def receive_buffer(self, rows: ModelInputs) -> Tensor | None:
        """Buffer for the previous chunk's output, [s, b, h]; None for the first chunk, which reads tokens."""
        if self.model.pre_process:
            return None
        config = self.model.config
        count, length = rows.tokens.shape
        if rows.source is not None:
            length += rows.source.shape[1]
        return torch.empty(
            (length, count, config.hidden_size),
            dtype=config.pipeline_dtype,
            device=rows.tokens.device,
        )

    def run(
        self,
        hidden: Tensor | None,
        rows: ModelInputs,
        group: int,
        *,
        every_position: bool = False,
        slot: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [s, b, h] to send or, from the last chunk, fp32 logits over the padded vocabulary.

        Args:
            hidden: Hidden states from the previous chunk, [s, b, h]; None for the first chunk.
            rows: Inputs; the tokens follow those in the caches.
            group: Index of the group of rows, which selects the caches.
            every_position: Whether to return logits of every position, [b, s, v], instead of the last one, [b, v].
            slot: For static steps, whose mask covers all slots: the token's cache slot, as for ``TokenStep``. None
                where the caches count.
        """
        model = self.model
        step = None
        if slot is not None and rows.mask is not None:
            step = TokenStep(slot, rows.mask)
            rows = replace(rows, mask=None)
        for layer, cache in zip(self.layers, self.caches[group], strict=True):
            layer.kv_cache = cache
            cache.step = step
        if hidden is not None:
            model.set_input_tensor(hidden)
        last_alone: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if model.post_process and not every_position and rows.tokens.shape[1] > 1:
            last_alone = model.output_layer.register_forward_pre_hook(_last_position)
        try:
            with last_alone:
                output = self._forward(rows)
        finally:
            if hidden is not None:
                model.set_input_tensor(None)
            for layer in self.layers:
                layer.kv_cache = None
        if not model.post_process:
            return output.contiguous().detach()
        if not every_position:
            output = output[:, -1]
        return output.float().detach()

    def _forward(self, rows: ModelInputs) -> Tensor:
        model = self.model
        output: Tensor
        if rows.source is not None:
            output = model(
                rows.source,
                rows.tokens,
                rows.source_mask,
                rows.mask,
                runtime_gather_output=True,
            )
        elif isinstance(model, BertChunk):
            output = self._forward_bert(rows)
        elif isinstance(model, GPTChunk):
            output = model(
                rows.tokens,
                rows.positions,
                rows.mask,
                runtime_gather_output=True,
                longest=rows.longest,
            )
        else:
            # A user's model.
            output = model(rows.tokens, rows.positions, rows.mask, runtime_gather_output=True)
        return output

    def _forward_bert(self, rows: ModelInputs) -> Tensor:
        # In training padding attends to padding; here, as in Hugging Face, to tokens: its logits are returned, too.
        masked_keys = None
        if rows.mask is not None:
            masked_keys = (rows.mask == 0)[:, None, None, :]
        output = self.model(rows.tokens, rows.positions, masked_keys, rows.token_types)
        if not isinstance(output, tuple):
            return output  # type: ignore[no-any-return]
        # A pretraining model also returns logits for the order of sentences, which are dropped.
        logits: Tensor = gather_from_tensor_model_parallel_region(output[0])
        return logits


def _last_position(layer: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of the output layer: keep the last position of its input, [s, b, h]."""
    return (inputs[0][-1:], *inputs[1:])


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One chunk's work on one group of rows in a pass."""

    buffer: Tensor | None
    """Buffer for what the previous chunk sends, [s, b, h]; None for the first chunk."""
    work: Work
    is_last: bool
    """Whether the output is logits."""


def _tasks(
    chunks: Sequence[_Chunk],
    groups: Sequence[slice],
    batch: ModelInputs,
    *,
    every_position: bool = False,
    slot: Tensor | None = None,
) -> Iterator[_Task]:
    """Yield the tasks of a pass over ``batch``, in order; the last two arguments are those of ``_Chunk.run``."""
    for chunk in chunks:
        for group, rows in enumerate(groups):
            inputs = batch.rows(rows)
            buffer = chunk.receive_buffer(inputs)
            work = functools.partial(
                chunk.run, buffer, inputs, group, every_position=every_position, slot=slot
            )
            yield _Task(buffer=buffer, work=work, is_last=chunk.model.post_process)


class Stages:
    """This rank's part of the forward passes over one batch; all ranks of a replica must make the same calls."""

    def __init__(
        self,
        models: Sequence[Any],
        topology: Topology,
        batch: ModelInputs,
        new_tokens: int | None = None,
        *,
        static: bool = False,
    ) -> None:
        """Create empty caches.

        Args:
            models: This rank's unwrapped chunks, in ``inference_mode``.
            topology: Layout and position of this rank.
            batch: Inputs of the first pass.
            new_tokens: Maximum number of new tokens per row; None for no caches.
            static: Whether all passes after the first one, of one token per row, have the same shapes.
        """
        self._topology = topology
        self._batch = batch
        self._mask = batch.mask
        self._is_static = static
        ranks = sorted(dist.get_process_group_ranks(topology.mp_group))
        # The last stage's first: tp ranks could sample differently, as sums on a GPU are not exactly reproducible.
        self._choosing_rank = ranks[-topology.parallel.tp * topology.parallel.cp]
        self.chooses_tokens = dist.get_rank() == self._choosing_rank
        """Whether this rank chooses the tokens for all ranks of ``topology.mp_group``."""
        rows, self._num_read = batch.tokens.shape
        # With virtual stages the batch is one group: sends in both directions at once could deadlock.
        count = 1 if topology.parallel.vpp else min(topology.parallel.pp, rows)
        self._groups = [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]
        slots = None if new_tokens is None else slots_for(self._num_read + new_tokens - 1)
        if batch.mask is not None and new_tokens is not None:
            self._mask = torch.cat((batch.mask, batch.mask.new_ones(rows, new_tokens)), dim=-1)
        source = 0 if batch.source is None else batch.source.shape[1]
        self._slots = slots or 0
        self._chunks = [_Chunk(model, count, slots, source) for model in models]
        self._steps: StaticSteps | None = None

    def prefill(self, *, every_position: bool = False) -> Tensor | None:
        """Run the first pass: logits after each row, [b, padded vocabulary] fp32, on the last stage; None elsewhere.

        Args:
            every_position: Return the logits after every token instead, [b, s, padded vocabulary].
        """
        return self._pass(
            _tasks(self._chunks, self._groups, self._batch, every_position=every_position)
        )

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Append one token to each row, [b], and return the logits after it as ``prefill`` does."""
        batch = self._batch
        slot = self._num_read
        assert batch.positions is not None
        self._num_read += 1
        self._batch = batch = replace(
            batch,
            tokens=tokens[:, None],
            positions=batch.positions[:, -1:] + 1,
            mask=None if self._mask is None else self._mask[:, : self._num_read],
            longest=batch.longest + 1,
            source=None
            if batch.source is None
            else tokens.new_empty(len(tokens), 0),  # the encoder runs once
        )
        if not self._is_static:
            return self._pass(_tasks(self._chunks, self._groups, batch))
        if self._steps is None:
            self._steps = StaticSteps(
                self._chunks,
                self._groups,
                batch,
                slot,
                self._slots,
            )
        return self._pass(self._steps.tasks(batch, slot))

    def _pass(self, tasks: Iterable[_Task]) -> Tensor | None:
        logits: list[Tensor] = []
        pending: list[tuple[Any, Tensor]] = []
        for task in tasks:
            if task.buffer is not None:
                dist.recv(
                    task.buffer,
                    self._neighbour(-1),
                    group=self._topology.pp_group,
                )
            output = task.work()
            if task.is_last:
                logits.append(output)
            else:
                send = dist.isend(
                    output,
                    self._neighbour(1),
                    group=self._topology.pp_group,
                )
                pending.append((send, output))
        for send, _ in pending:
            send.wait()
        # A copy, since the next static step overwrites the output of this one.
        return torch.cat(logits) if logits else None

    def broadcast(self, message: Tensor) -> Tensor:
        """Broadcast the choosing rank's tensor over this replica; the other ranks pass one of the same shape."""
        if dist.get_world_size(self._topology.mp_group) > 1:
            message = message.contiguous()
            dist.broadcast(message, self._choosing_rank, group=self._topology.mp_group)
        return message

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row ``rows[i]``, also in every cache; ``decode`` then appends tokens to the new rows.

        Args:
            rows: [b], a multiple of the prompts; rows of a prompt come from rows of the same prompt.
        """
        old_groups = self._groups
        old = self._groups[-1].stop
        new = len(rows)
        self._groups = [
            slice(group.start * new // old, group.stop * new // old) for group in old_groups
        ]
        for chunk in self._chunks:
            for old_group, new_group, caches in zip(
                old_groups, self._groups, chunk.caches, strict=True
            ):
                for layer, cache in zip(chunk.layers, caches, strict=True):
                    # Row i and row rows[i] have the same source, so cross-attention keeps its cache.
                    if old != new or not layer.is_cross:
                        cache.select(rows[new_group] - old_group.start)
        positions = self._batch.positions
        source_mask = self._batch.source_mask
        assert positions is not None
        source_mask = None if source_mask is None else source_mask[rows]
        self._batch = replace(
            self._batch,
            positions=positions[rows],
            source_mask=source_mask,
        )
        self._mask = None if self._mask is None else self._mask[rows]

    def _neighbour(self, distance: int) -> int:
        """Global rank of the stage ``distance`` after this one; the first follows the last, with its next chunk."""
        ranks = dist.get_process_group_ranks(self._topology.pp_group)
        return ranks[(self._topology.pp_rank + distance) % len(ranks)]


class StaticSteps:
    """Passes of one token per row at fixed shapes and addresses, captured as graphs where the device supports it."""

    def __init__(
        self,
        chunks: Sequence[_Chunk],
        groups: Sequence[slice],
        batch: ModelInputs,
        slot: int,
        slots: int,
    ) -> None:
        """Allocate the inputs of the steps besides caches and weights.

        Args:
            chunks: This rank's chunks, with caches that hold the prompts.
            groups: Rows of each group.
            batch: The first tokens after the prompts.
            slot: Their cache slot.
            slots: Number of cache slots.
        """
        self._chunks = chunks
        self._groups = groups
        self._batch = replace(batch, mask=None).map(Tensor.clone)
        device = batch.tokens.device
        self._recorder = graph_recorder(device)
        self._slot = torch.full(
            (1,),
            slot,
            dtype=torch.long,
            device=device,
        )
        self._is_token = torch.ones(
            (len(batch.tokens), slots),
            dtype=torch.bool,
            device=device,
        )
        if batch.mask is not None:
            self._is_token[:, : slot + 1] = batch.mask != 0
        self._tasks: list[_Task] = []
        self._is_captured = False
        self._num_keys = 0

    def tasks(self, batch: ModelInputs, slot: int) -> list[_Task]:
        """Tasks for the next tokens; the next call overwrites their outputs. Every rank of a replica must call.

        Args:
            batch: The tokens.
            slot: Their cache slot.

        Raises:
            ConfigError: If a step cannot be captured.
        """
        assert self._batch.positions is not None
        assert batch.positions is not None
        self._batch.tokens.copy_(batch.tokens)
        self._batch.positions.copy_(batch.positions)
        self._slot.fill_(slot)
        if slot >= self._num_keys:
            # Queries attend to more slots from now on; the graphs for fewer slots are freed.
            self._is_captured = False
            slots = self._is_token.shape[1]
            self._num_keys = min(max(MIN_WINDOW, 1 << slot.bit_length()), slots)
            batch = replace(self._batch, mask=self._is_token[:, : self._num_keys])
            self._tasks = list(
                _tasks(
                    self._chunks,
                    self._groups,
                    batch,
                    slot=self._slot,
                )
            )
            if self._recorder is not None:
                warm_up = self._recorder.warm_up
                return [
                    replace(task, work=functools.partial(warm_up, task.work))
                    for task in self._tasks
                ]
        elif self._recorder is not None and not self._is_captured:
            captured = self._recorder.capture([task.work for task in self._tasks])
            self._tasks = [
                replace(task, work=work)
                for task, work in zip(
                    self._tasks,
                    captured,
                    strict=True,
                )
            ]
            self._is_captured = True
        return self._tasks


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


class CudaGraphs:
    """Captures work as CUDA graphs; all their memory is freed when the returned functions are dropped."""

    def __init__(self, device: torch.device) -> None:
        """Capture on ``device``."""
        self._stream = _side_stream(device)

    def warm_up(self, work: Work) -> Tensor:
        """Run the work once as it will be captured, so that everything is compiled and allocated.

        It runs on the capture stream, for which libraries have workspaces of their own.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        # The output's memory is reused on the side stream alone, which waits for the output's readers first.
        current.wait_stream(self._stream)
        return output

    def capture(self, works: Sequence[Work]) -> list[Work]:
        """Return each work as a function that replays its graph and returns the same tensor, overwritten.

        The graphs share one memory pool, so they must not run at the same time.

        Raises:
            ConfigError: If one cannot be captured.
        """
        pool = torch.cuda.graph_pool_handle()
        collects = gc.isenabled()
        current = torch.cuda.current_stream(self._stream.device)
        # Garbage collection could free other graphs or events, which CUDA refuses during a capture.
        gc.disable()
        try:
            return [self._capture(work, pool) for work in works]
        except RuntimeError as error:
            # The error that ended the capture, not the one of ending it improperly; without CUDA's lines of advice.
            reason = str(error.__context__ or error).partition("\n")[0]
            raise ConfigError(
                f"static_cache: expected steps that CUDA can capture as a graph, got: {reason}; set static_cache=False"
            ) from error
        finally:
            # A failed capture may leave the side stream current.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()

    def _capture(self, work: Work, pool: Any) -> Work:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog queries events in its own thread, which only this mode allows.
        with torch.cuda.graph(
            graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all calls: a library's workspace stays with the stream that it was allocated for."""
    return torch.cuda.Stream(device)


def graph_recorder(device: torch.device) -> CudaGraphs | None:
    """Recorder of graphs for ``device``; None where there are none and steps run eagerly."""
    return CudaGraphs(device) if device.type == "cuda" else None
