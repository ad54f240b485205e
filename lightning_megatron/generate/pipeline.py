"""Passes of a model over its pipeline stages: tokens in, logits out, keys and values kept in between.

Each stage runs its layers on what the stage before it has sent. Rows are cut into as many groups as there are stages,
so that the stages work at the same time: while the second one has the first group, the first one has the second.

Of an encoder-decoder the first pass sends what training sends, the states of both stacks; the cross-attention keeps its
keys and values, and from then on stages send the decoder's newest token only.

With static caches every pass of one token per row has the same shapes and addresses. The first one runs kernel by
kernel, which compiles what has to be; before the second one each chunk's work on each group of rows is recorded as a
CUDA graph. What goes between stages and the choice of tokens are no part of it.
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

from lightning_megatron.engine.fillers.attention import KeyValueCache, SDPAttention, TokenStep, slots_for
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.bert import BertChunk
from lightning_megatron.models.config import ModelConfig

Work = Callable[[], Tensor]
"""What a chunk does with a group of rows. In static steps it reads and writes tensors that stay in place, and the host
decides nothing in it by their numbers."""

MIN_WINDOW = 1024
"""Queries look at so many slots of static caches at least, or at all if there are fewer; when the texts outgrow them,
at twice as many. Each time the steps are recorded anew."""

MIN_NEW_TOKENS = 8
"""Of which recording pays: it takes as long as a step or two kernel by kernel, and a replayed step a fifth of that."""

_INFERRING = {
    "training": False,  # the engine recomputes only what is in training
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "context_parallel_size": 1,
}
"""What modules and their configs remember of training and of a split sequence, and what it is else; a single token
cannot be split."""


@contextlib.contextmanager
def inference_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Context manager: inference mode for a model in training, restored on exit; every rank must enter.

    Gives this rank's plain models with whole weights, without dropout, recomputation, sequence and context parallelism
    (the ranks of a cp group do the same). Wrappers, gradients, optimizer and random streams are left alone.

    Args:
        chunks: Wrapped or not.
    """
    finish_parameter_gathers(list(chunks))
    models = [unwrap(chunk) for chunk in chunks]
    modules = [module for model in models for module in model.modules()]
    # Some modules have a copy of the config (megatron-core 0.16.1, transformer/attention.py).
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    # What the engine caches meanwhile (rotary angles) is for training, too: no tensors of torch's inference mode.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        for holder in (*modules, *configs.values()):
            for name, inferring in _INFERRING.items():
                if (before := getattr(holder, name, inferring)) != inferring:
                    stack.callback(setattr, holder, name, before)
                    setattr(holder, name, inferring)
        yield models


def uses_static_cache(asked: bool | None, new_tokens: int, model: ModelConfig, device: torch.device) -> bool:
    """Whether all steps of one call are alike: as ``static_cache`` says, else where a GPU gains by it.

    Args:
        asked: The option.
        new_tokens: Of each row, at most.
        model: What writes them.
        device: Where it computes.

    Raises:
        ConfigError: If they must be alike and cannot: with what is not.
    """
    reason = None
    if model.architecture == "t5":
        reason = "its decoder also attends to a source, with biases that the host counts from the texts' length"
    elif model.experts is not None:
        reason = "the host must know how many tokens go to each expert"
    elif (scaling := model.rope_scaling) is not None and scaling.depends_on_length:
        reason = f"the host computes its rotary frequencies ({scaling.rope_type}) from the texts' length at every token"
    if asked is None:
        return device.type == "cuda" and reason is None and new_tokens >= MIN_NEW_TOKENS
    if asked and reason is not None:
        raise ConfigError(f"static_cache=True: expected steps that are all alike, {model.family} has none: {reason}")
    return asked


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """What the model reads in one pass, behind what its caches hold."""

    tokens: Tensor
    """[b, s], int64."""
    positions: Tensor | None
    """[b, s], int64; None for 0, 1, 2, ..."""
    mask: Tensor | None
    """[b, cached + s], int64, 0 for padding; None for no padding."""
    longest: int
    """Tokens of the longest row of all copies, these included."""
    source: Tensor | None = None
    """What an encoder reads, [b, s_enc] int64; [b, 0] once the caches hold it. None for models without one."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source, also when it is read already; None for no padding."""
    token_types: Tensor | None = None
    """[b, s], int64, of a BERT; None for 0 everywhere."""

    def each(self, change: Callable[[Tensor], Tensor]) -> NextTokens:
        """The same with each tensor changed."""
        tensors: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def rows(self, rows: slice) -> NextTokens:
        """Some of the rows."""
        return self.each(lambda tensor: tensor[rows])

    def dealt(self, rows: slice, copies: int, device: torch.device) -> NextTokens:
        """Some of the rows that there are with so many ``copies`` of each, one after the other, on ``device``."""
        return self.each(lambda tensor: tensor.repeat_interleave(copies, dim=0)[rows].to(device))

    @property
    def is_token(self) -> Tensor:
        """[b, s], int64, of prompts: 1 for tokens, 0 for padding."""
        return torch.ones_like(self.tokens) if self.mask is None else self.mask


class _Chunk:
    """A part of the model on this rank, and what its layers keep of each group of rows."""

    def __init__(self, model: Any, num_groups: int, slots: int | None, source: int) -> None:
        """Prepare empty caches.

        Args:
            model: Plain.
            num_groups: Of rows.
            slots: Tokens that a row may have; None keeps nothing.
            source: Tokens that an encoder reads.
        """
        self.model = model
        # Not the layers of an encoder, which reads once.
        modules = () if slots is None else model.decoder.modules()
        self.layers = [module for module in modules if isinstance(module, SDPAttention)]
        self.caches = [
            [KeyValueCache(source if layer.is_cross else slots or 0) for layer in self.layers]
            for _ in range(num_groups)
        ]
        """Of each group those of the layers."""

    def received(self, rows: NextTokens) -> Tensor | None:
        """Memory for what the chunk before sends of ``rows``, [s, b, h]; None for the first, which reads tokens."""
        if self.model.pre_process:
            return None
        config, (count, length) = self.model.config, rows.tokens.shape
        length += 0 if rows.source is None else rows.source.shape[1]
        return torch.empty((length, count, config.hidden_size), dtype=config.pipeline_dtype, device=rows.tokens.device)

    def run(
        self,
        hidden: Tensor | None,
        rows: NextTokens,
        group: int,
        *,
        every_position: bool = False,
        place: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [s, b, h] to be sent or, of the last chunk, logits of the padded vocabulary in fp32.

        Args:
            hidden: What the chunk before has sent, [s, b, h]; None for the first.
            rows: What is read, behind what the caches hold.
            group: Whose caches.
            every_position: Whether the logits are of every position, [b, s, v], instead of the last one, [b, v].
            place: As ``TokenStep``'s, of static steps, whose mask is of all slots; None where the caches count.
        """
        model = self.model
        cuts = model.post_process and not every_position and rows.tokens.shape[1] > 1
        step = None
        if place is not None and rows.mask is not None:
            step, rows = TokenStep(place, rows.mask), replace(rows, mask=None)
        for layer, cache in zip(self.layers, self.caches[group], strict=True):
            layer.kv_cache, cache.step = cache, step
        if hidden is not None:
            model.set_input_tensor(hidden)
        try:
            with model.output_layer.register_forward_pre_hook(_last_position) if cuts else contextlib.nullcontext():
                output = self._forward(rows)
        finally:
            if hidden is not None:
                model.set_input_tensor(None)
            for layer in self.layers:
                layer.kv_cache = None
        if not model.post_process:
            return output.contiguous().detach()
        return (output if every_position else output[:, -1]).float().detach()

    def _forward(self, rows: NextTokens) -> Tensor:
        model = self.model
        if rows.source is not None:
            decoded: Tensor = model(rows.source, rows.tokens, rows.source_mask, rows.mask, runtime_gather_output=True)
            return decoded
        if isinstance(model, BertChunk):
            # In training padding sees padding. Hugging Face lets it see the tokens, and its logits are asked for, too.
            hidden_keys = None if rows.mask is None else (rows.mask == 0)[:, None, None, :]
            found = model(rows.tokens, rows.positions, hidden_keys, rows.token_types)
            # Of a model of pretraining without the logits of the order of sentences.
            whole: Tensor = gather_from_tensor_model_parallel_region(found[0]) if isinstance(found, tuple) else found
            return whole
        model.rotary_length = rows.longest
        try:
            output: Tensor = model(rows.tokens, rows.positions, rows.mask, runtime_gather_output=True)
        finally:
            model.rotary_length = None
        return output


def _last_position(layer: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the output layer gets, [s, b, h] and others, of the last position alone."""
    return (inputs[0][-1:], *inputs[1:])


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One chunk's turn with one group of rows in a pass."""

    received: Tensor | None
    """Where what the chunk before sends arrives, [s, b, h]; None for the first chunk."""
    work: Work
    is_last: bool
    """Whether logits come out."""


def _turns(
    chunks: Sequence[_Chunk],
    groups: Sequence[slice],
    batch: NextTokens,
    *,
    every_position: bool = False,
    place: Tensor | None = None,
) -> Iterator[_Turn]:
    """All turns of a pass over ``batch``, in order; the last two as for ``_Chunk.run``."""
    for chunk in chunks:
        for group, rows in enumerate(groups):
            read = batch.rows(rows)
            received = chunk.received(read)
            work = functools.partial(chunk.run, received, read, group, every_position=every_position, place=place)
            yield _Turn(received=received, work=work, is_last=chunk.model.post_process)


class Stages:
    """This rank's part of the passes over one batch; all ranks of a copy must call alike."""

    def __init__(
        self,
        models: Sequence[Any],
        topology: Topology,
        batch: NextTokens,
        new_tokens: int | None = None,
        *,
        static: bool = False,
    ) -> None:
        """Prepare empty caches.

        Args:
            models: This rank's plain model chunks, in ``inference_mode``.
            topology: This rank's place.
            batch: What is read first.
            new_tokens: By how many tokens each row may grow; None keeps nothing.
            static: Whether passes of one token behind the first pass all have the same shapes.
        """
        self._topology, self._batch, self._mask, self._is_static = topology, batch, batch.mask, static
        ranks = sorted(dist.get_process_group_ranks(topology.mp_group))
        # Of the last stage the first: tp ranks could draw differently, as sums on a GPU are not exactly reproducible.
        self._source = ranks[-topology.parallel.tp * topology.parallel.cp]
        self.chooses = dist.get_rank() == self._source
        """Whether this rank chooses the tokens of all ranks of ``topology.mp_group``."""
        rows, self._num_read = batch.tokens.shape
        # Two messages under way in both directions could wait for each other: with chunks the batch is one group.
        count = 1 if topology.parallel.vpp else min(topology.parallel.pp, rows)
        self._groups = [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]
        slots = None if new_tokens is None else slots_for(self._num_read + new_tokens - 1)
        if batch.mask is not None and new_tokens is not None:
            self._mask = torch.cat((batch.mask, batch.mask.new_ones(rows, new_tokens)), dim=-1)
        source = 0 if batch.source is None else batch.source.shape[1]
        self._slots = slots or 0
        self._chunks = [_Chunk(model, count, slots, source) for model in models]
        self._steps: StaticSteps | None = None

    def first(self, *, every_position: bool = False) -> Tensor | None:
        """Read the batch; what follows each row: [b, padded vocabulary] fp32 on the last stage, None elsewhere.

        Args:
            every_position: Ask for what follows every token instead, [b, s, padded vocabulary].
        """
        return self._pass(_turns(self._chunks, self._groups, self._batch, every_position=every_position))

    def next(self, tokens: Tensor) -> Tensor | None:
        """Read one more token of each row, [b]; what follows it, as from ``first``."""
        batch, place = self._batch, self._num_read
        assert batch.positions is not None
        self._num_read += 1
        self._batch = batch = replace(
            batch,
            tokens=tokens[:, None],
            positions=batch.positions[:, -1:] + 1,
            mask=None if self._mask is None else self._mask[:, : self._num_read],
            longest=batch.longest + 1,
            source=None if batch.source is None else tokens.new_empty(len(tokens), 0),  # the encoder reads once
        )
        if not self._is_static:
            return self._pass(_turns(self._chunks, self._groups, batch))
        if self._steps is None:
            self._steps = StaticSteps(self._chunks, self._groups, batch, place, self._slots)
        return self._pass(self._steps.turns(batch, place))

    def _pass(self, turns: Iterable[_Turn]) -> Tensor | None:
        found: list[Tensor] = []
        under_way: list[tuple[Any, Tensor]] = []
        for turn in turns:
            if turn.received is not None:
                dist.recv(turn.received, self._neighbour(-1), group=self._topology.pp_group)
            output = turn.work()
            if turn.is_last:
                found.append(output)
            else:
                sent = dist.isend(output, self._neighbour(1), group=self._topology.pp_group)
                under_way.append((sent, output))
        for message, _ in under_way:
            message.wait()
        # A copy: what a static step returns is written anew by the next one.
        return torch.cat(found) if found else None

    def told(self, message: Tensor) -> Tensor:
        """What the rank that chooses passes here, on all ranks of this copy; theirs must have the same shape."""
        if dist.get_world_size(self._topology.mp_group) > 1:
            message = message.contiguous()
            dist.broadcast(message, self._source, group=self._topology.mp_group)
        return message

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was, in every cache, too; ``next`` gives them their tokens.

        Args:
            rows: [b], a multiple of the prompts; those of a prompt come from rows of the same prompt.
        """
        before, old, new = self._groups, self._groups[-1].stop, len(rows)
        self._groups = [slice(each.start * new // old, each.stop * new // old) for each in before]
        for chunk in self._chunks:
            for was, now, caches in zip(before, self._groups, chunk.caches, strict=True):
                for layer, cache in zip(chunk.layers, caches, strict=True):
                    # Row i and row rows[i] have the same source.
                    if old != new or not layer.is_cross:
                        cache.select(rows[now] - was.start)
        positions, source_mask = self._batch.positions, self._batch.source_mask
        assert positions is not None
        source_mask = None if source_mask is None else source_mask[rows]
        self._batch = replace(self._batch, positions=positions[rows], source_mask=source_mask)
        self._mask = None if self._mask is None else self._mask[rows]

    def _neighbour(self, distance: int) -> int:
        """Global rank of a stage behind (or before) this one; behind the last is the first, with its next chunk."""
        ranks = dist.get_process_group_ranks(self._topology.pp_group)
        return ranks[(self._topology.pp_rank + distance) % len(ranks)]


class StaticSteps:
    """The passes of one token per row at one shape and place in memory, recorded where the device has a recorder."""

    def __init__(
        self, chunks: Sequence[_Chunk], groups: Sequence[slice], batch: NextTokens, place: int, slots: int
    ) -> None:
        """Allocate what the steps read besides caches and weights.

        Args:
            chunks: Of this rank, with caches that hold the prompts.
            groups: The rows of each.
            batch: The first token behind the prompts.
            place: Where it stands.
            slots: Of the caches.
        """
        self._chunks, self._groups, self._batch = chunks, groups, replace(batch, mask=None).each(Tensor.clone)
        device = batch.tokens.device
        self._recorder = graph_recorder(device)
        self._place = torch.full((1,), place, dtype=torch.long, device=device)
        self._is_token = torch.ones((len(batch.tokens), slots), dtype=torch.bool, device=device)
        if batch.mask is not None:
            self._is_token[:, : place + 1] = batch.mask != 0
        self._turns: list[_Turn] = []
        self._is_recorded = False
        self._num_keys = 0

    def turns(self, batch: NextTokens, place: int) -> list[_Turn]:
        """What has to be done with the next token; all ranks of a copy must call alike. Outputs last until the next.

        Args:
            batch: The token.
            place: Where it stands.

        Raises:
            ConfigError: If a step cannot be recorded.
        """
        assert self._batch.positions is not None
        assert batch.positions is not None
        self._batch.tokens.copy_(batch.tokens)
        self._batch.positions.copy_(batch.positions)
        self._place.fill_(place)
        if place >= self._num_keys:
            # Queries see more slots now; what was recorded for fewer is given back.
            self._is_recorded, slots = False, self._is_token.shape[1]
            self._num_keys = min(max(MIN_WINDOW, 1 << place.bit_length()), slots)
            batch = replace(self._batch, mask=self._is_token[:, : self._num_keys])
            self._turns = list(_turns(self._chunks, self._groups, batch, place=self._place))
            if self._recorder is not None:
                warm_up = self._recorder.warm_up
                return [replace(turn, work=functools.partial(warm_up, turn.work)) for turn in self._turns]
        elif self._recorder is not None and not self._is_recorded:
            captured = self._recorder.capture([turn.work for turn in self._turns])
            self._turns = [replace(turn, work=work) for turn, work in zip(self._turns, captured, strict=True)]
            self._is_recorded = True
        return self._turns


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


class CudaGraphs:
    """Records on a GPU. Nothing of it stays behind when what it has returned is dropped."""

    def __init__(self, device: torch.device) -> None:
        """Record on ``device``."""
        self._stream = _side_stream(device)

    def warm_up(self, work: Work) -> Tensor:
        """Do the work once as it will be recorded, so that all is compiled and allocated.

        On the stream of the recording, which has libraries' workspaces of its own.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        # The memory of the output is given out again on the side stream alone, which waits for its readers first.
        current.wait_stream(self._stream)
        return output

    def capture(self, works: Sequence[Work]) -> list[Work]:
        """Each work as a function that repeats it and returns the same tensor, written anew.

        The graphs share one pool of memory, so they must not run at the same time.

        Raises:
            ConfigError: If one cannot be recorded.
        """
        pool, collects = torch.cuda.graph_pool_handle(), gc.isenabled()
        current = torch.cuda.current_stream(self._stream.device)
        # Python could free a graph or an event of somebody else meanwhile, which CUDA refuses while it records.
        gc.disable()
        try:
            return [self._capture(work, pool) for work in works]
        except RuntimeError as error:
            # What ended the recording, rather than that it could not be ended properly; CUDA adds lines of advice.
            reason = str(error.__context__ or error).partition("\n")[0]
            raise ConfigError(
                f"static_cache: expected steps that CUDA can record as a graph, got: {reason}; set static_cache=False"
            ) from error
        finally:
            # A recording that fails may leave the side stream current.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()

    def _capture(self, work: Work, pool: Any) -> Work:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks events in a thread of its own, which only this mode allows.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            output = work()

        def replayed() -> Tensor:
            graph.replay()
            return output

        return replayed


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all calls: a library's workspace stays with the stream that it was allocated for."""
    return torch.cuda.Stream(device)


def graph_recorder(device: torch.device) -> CudaGraphs | None:
    """What records on ``device``; None where work is simply done again."""
    return CudaGraphs(device) if device.type == "cuda" else None
