"""How do all ranks together continue prompts? Checked alike, dealt to the copies of the model, gathered in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.data.corpus.stop_strings import stop_strings
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.beams import search
from lightning_megatron.generate.decoding import Continuations, decode
from lightning_megatron.generate.encoder_decoder import check_decoder, decoder_rows, started
from lightning_megatron.generate.end_tokens import EndTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompt_checks import check_length, check_prompts, check_tokens
from lightning_megatron.generate.prompts import Given, Prompts, aligned, with_first_token
from lightning_megatron.generate.quiet import generating
from lightning_megatron.generate.rules import Rules
from lightning_megatron.generate.sampling import uniform_numbers
from lightning_megatron.generate.sharing import check_agreement, gathered, own_rows, rows_of_copies
from lightning_megatron.generate.static_steps import uses_static_cache
from lightning_megatron.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, and how likely the model finds them; the same on every rank."""

    sequences: Tensor
    """[b, s + new], int64: the prompts and what follows; padding behind rows that ended before others. Of a T5 what its
    decoder continues and writes, [b, s_dec + new]."""
    scores: Tensor
    """[b], fp32: by what a search with beams has ranked them; else the sums of the log-probabilities."""
    log_probabilities: Tensor
    """[b, new], fp32: what the model gives to each new token, before temperature and the like; 0 behind the end of a
    row."""


class Generator:
    """Continues prompts with one model; every rank of the world must call alike."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: ModelConfig,
        topology: Topology,
        device: torch.device,
        ends: EndTokens,
        on_tokens: Callable[[Tensor], None] | None = None,
        *,
        is_own_model: bool = True,
    ) -> None:
        """Connect the parts.

        Args:
            chunks: This rank's (wrapped) model chunks.
            model: What they compute.
            topology: This rank's place.
            device: Where they compute.
            ends: The model's own.
            on_tokens: As for ``decoding.decode``.
            is_own_model: Whether this package has built the chunks. What others' do at each step nobody knows: it is
                recorded only on request.
        """
        self._chunks = chunks
        self._model = model
        self._topology = topology
        self._device = device
        self._ends = ends
        self._on_tokens = on_tokens
        self._is_own_model = is_own_model

    def generate(self, given: Given, options: GenerationOptions, *, is_shared: bool = True) -> Generated:
        """Prompts and what follows them, on the device of ``input_ids``.

        Of an encoder-decoder, what the decoder continues and writes: [b, s_dec + new].

        Args:
            given: The prompts, the same on every rank; rows are divided among the copies of the model. Without a mask
                there is no padding, except that, as in Hugging Face, a padding token of the model that does not end
                texts is padding (transformers 5.23 sees to that for GPTs only; a T5 shall not read padding either).
            options: How tokens are chosen.
            is_shared: Whether all copies of the model have the same rows and share them; else each copy has rows of its
                own, and only the ranks of one copy need call alike.

        Raises:
            ConfigError: On all these ranks alike, before anything runs, if a prompt cannot be continued.
        """
        options = self._with_own_tokens(options)
        device = given.input_ids.device if isinstance(given.input_ids, Tensor) else self._device
        on_host = given.on_host()
        if is_shared:
            task = on_all_ranks_alike(lambda: self._checked(on_host, options))
            table = None if task.rules.strings is None else task.rules.strings.table
            check_agreement(options, *vars(on_host).values(), table)
        else:
            task = self._checked(on_host, options)
        options, prompts, repeats = task.rules.options, task.prompts, options.num_return_sequences
        if options.num_beams == 1:
            prompts, repeats = prompts.repeated(repeats), 1
        counts = rows_of_copies(self._topology, len(prompts.tokens))
        rows = own_rows(self._topology, counts) if is_shared else slice(0, len(prompts.tokens))
        with generating(self._chunks) as models:
            own = self._continued(models, prompts, task.rules, rows)
            numbers = [count * repeats for count in counts]
            found = [own.tokens, own.lengths, own.scores, own.log_probabilities]
            if is_shared:
                found = [gathered(self._topology, tensor, numbers) for tensor in found]
        written, lengths, scores, log_probabilities = (tensor.to(device) for tensor in found)
        longest = int(lengths.max())
        before = task.before.repeat_interleave(options.num_return_sequences, dim=0).to(device)
        return Generated(
            sequences=torch.cat((before, written[:, :longest]), dim=-1),
            scores=scores,
            log_probabilities=log_probabilities[:, :longest],
        )

    def _continued(self, models: list[Any], prompts: Prompts, rules: Rules, rows: slice) -> Continuations:
        """What this copy of the model adds to its rows."""
        options = rules.options
        if rows.stop == rows.start:
            nothing = torch.empty((0, options.num_new_tokens), device=self._device)
            return Continuations(
                tokens=nothing.long(),
                lengths=nothing[:, 0].long(),
                log_probabilities=nothing,
                scores=nothing[:, 0],
            )
        own = prompts.rows(rows).to(self._device)
        if options.num_beams > 1:
            return search(models, self._topology, own, rules)
        uniform = uniform_numbers(options.seed, options.num_new_tokens, len(prompts.tokens))[:, rows]
        return decode(models, self._topology, own, rules, uniform, self._on_tokens)

    def _with_own_tokens(self, options: GenerationOptions) -> GenerationOptions:
        eos = self._ends.eos if options.eos_token_id is None else options.eos_token_ids
        pad = self._ends.pad if options.pad_token_id is None else options.pad_token_id
        return replace(options, eos_token_id=eos, pad_token_id=pad)

    def _checked(self, given: Given, options: GenerationOptions) -> _Task:
        """What is to be done, if it can be."""
        model, given = self._model, self._with_mask(given, options)
        check_decoder(given, options, model)
        check_prompts(given.input_ids, given.attention_mask, model, options)
        if options.top_k > model.vocab_size:
            raise ConfigError(
                f"top_k={options.top_k} is more than the {model.vocab_size} tokens of the vocabulary; lower it"
            )
        for sequence in options.stop_sequences:
            check_tokens("stop_sequences", sequence, model.vocab_size)
        strings = stop_strings(options.stop_texts, options.tokenizer) if options.stop_texts else None
        if strings is not None and strings.largest_token >= model.vocab_size:
            raise ConfigError(
                f"tokenizer has tokens up to {strings.largest_token}, and the model's vocabulary ends at "
                f"{model.vocab_size - 1}; give the tokenizer of this model"
            )
        if model.architecture == "t5":
            start = self._ends.start
            given = decoder_rows(given, model.decoder_start_token_id if start is None else start)
            assert given.decoder_input_ids is not None
            before, mask, prompts = given.decoder_input_ids, given.decoder_attention_mask, started(given)
        else:
            before, mask = given.input_ids.long(), given.attention_mask
            if options.bos_token_id is not None:
                check_tokens("bos_token_id", (options.bos_token_id,), model.vocab_size)
                before, mask = with_first_token(before, mask, options.bos_token_id)
            prompts = aligned(before, mask)
        options = check_length(before, mask, model, options)
        if options.static_cache is None and not self._is_own_model:
            options = replace(options, static_cache=False)
        options = replace(options, static_cache=uses_static_cache(options, model, self._device))
        rules = Rules(options=options, vocab_size=model.vocab_size, strings=strings)
        return _Task(before=before, prompts=prompts, rules=rules)

    def _with_mask(self, given: Given, options: GenerationOptions) -> Given:
        """What came without a mask, with that of the padding tokens."""
        pad = options.pad_token_id
        if given.attention_mask is not None or pad is None or pad in options.eos_token_ids:
            return given
        if not isinstance(given.input_ids, Tensor):
            return given
        return replace(given, attention_mask=(given.input_ids != pad).long())


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What is to be done."""

    before: Tensor
    """[b, s], int64: what stands before the new tokens."""
    prompts: Prompts
    rules: Rules
