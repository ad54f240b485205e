"""``MegatronLM``: a live GPT, at any layout, as a model of EleutherAI's lm_eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from tqdm import tqdm

from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.stop_strings import stop_strings
from lightning_megatron.harness import require_lm_eval

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
else:
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:
        # An extra: the constructor says how to install it.
        TemplateLM = object

_DEFAULT_NEW_TOKENS = 256
_DEFAULT_MAX_LENGTH = 2048
"""What lm_eval takes for models and tokenizers that name no length."""
_UNLIMITED = 10**9
"""Lengths of tokenizers from here on mean that there is no limit."""
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the same limit in tasks, in lm_eval's order of precedence."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


class MegatronLM(TemplateLM):
    """A GPT of this package as an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=MegatronLM(...))``.

    Requests are tokenized as lm_eval's ``hf`` model does, sorted and batched by length, and shared by the data-parallel
    replicas; results come back once, in the order of the requests, on every rank. Every rank must make the same calls,
    and counts as lm_eval's rank 0 of 1.

    Args:
        module: A ``MegatronModule`` of a GPT whose model is built, or that can build it alone (``pretrained=True``, or
            from ``load_from_checkpoint``).
        tokenizer: Directory of a transformers tokenizer, its name on the Hugging Face hub, or the tokenizer itself.
        batch_size: Largest number of rows in a forward pass of one replica.
        max_length: Tokens that the model reads at most; longer contexts lose their beginning. None for the model's
            ``max_position_embeddings``.

    Raises:
        ConfigError: If lm_eval is missing, the model is no GPT with an output layer, or the tokenizer is another
            model's.
    """

    def __init__(  # noqa: D107 (described on the class)
        self,
        module: Any,
        tokenizer: str | Path | Any,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
    ) -> None:
        require_lm_eval()
        super().__init__()
        require_number("batch_size", batch_size, at_least=1)
        model = module.model_config
        if model.architecture != "gpt" or not model.has_output_layer:
            raise ConfigError(
                f"lm_eval: expected a GPT with an output layer, got a {model.family} for task={model.task!r}; use "
                "another model"
            )
        name = getattr(tokenizer, "name_or_path", tokenizer)
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer)
        check_vocabulary(tokenizer, name, model.vocab_size)
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {name}: expected a bos_token or eos_token, which precedes texts without context, got "
                "neither; use a tokenizer with one"
            )
        self.module = module
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        limit = max_length or model.max_position_embeddings
        if not limit and tokenizer.model_max_length < _UNLIMITED:
            limit = tokenizer.model_max_length
        require_number("max_length", limit, at_least=1)
        if max_length and model.has_position_table and limit > model.max_position_embeddings:
            raise ConfigError(
                f"max_length={limit} must be at most the model's max_position_embeddings="
                f"{model.max_position_embeddings}; lower it"
            )
        self.max_length: int = limit or _DEFAULT_MAX_LENGTH
        self._hides_progress = False
        self._prefix: str = tokenizer.decode(self.prefix_token_id)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> Any:
        """The tokenizer's end-of-sequence token; None without one."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """Context of texts without one: the beginning-of-sequence token or, without one, the end-of-sequence token."""
        if self.tokenizer.bos_token_id is not None:
            return self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> list[int]:
        """Tokenize a text.

        Args:
            string: The text.
            add_special_tokens: Whether the tokenizer adds special tokens; None for its default, but False for a text
                that begins with the beginning-of-sequence token.
        """
        if add_special_tokens is None and string.startswith(self._prefix):
            add_special_tokens = False
        chosen: dict[str, Any] = {}
        if add_special_tokens is not None:
            chosen["add_special_tokens"] = add_special_tokens
        tokens: list[int] = self.tokenizer.encode(string, **chosen)
        return tokens

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, part of the keys of lm_eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,
    ) -> str:
        """Write a conversation with the tokenizer's chat template, without its system message if that refuses one.

        Args:
            chat_history: Messages with ``role`` and ``content``.
            add_generation_prompt: Whether to begin the answer; otherwise the last message is to be continued.

        Raises:
            ConfigError: If the tokenizer has no chat template.
        """
        import jinja2

        if not self.tokenizer.chat_template:
            raise ConfigError(
                f"apply_chat_template: expected a tokenizer with a chat template, got {self.tokenizer.name_or_path}; "
                "leave it out"
            )
        try:
            return self._format_chat(chat_history, add_generation_prompt)
        except jinja2.TemplateError:
            others = [message for message in chat_history if message["role"] != "system"]
            return self._format_chat(others, add_generation_prompt)

    def _format_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    # ---- log-likelihoods ---------------------------------------------------------------------------------------------

    def loglikelihood(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of continuations, and whether greedy decoding would generate them.

        Args:
            requests: lm_eval's, with a context and its continuation each.
            disable_tqdm: Whether to show no progress; none is shown for tokenization.
        """
        self._hides_progress = disable_tqdm
        answers: list[tuple[float, bool]] = super().loglikelihood(list(requests), disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Called by lm_eval's ``loglikelihood`` with the tokens of contexts and continuations."""
        pairs = [self._fitted(context, rest) for _, context, rest in requests]
        answers = self._score(pairs, self._hides_progress)
        for request, answer in zip(requests, answers, strict=True):
            texts = request[0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of ``max_length`` tokens that do not overlap.

        Args:
            requests: lm_eval's, with one text each.
            disable_tqdm: Whether to show no progress.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs: list[tuple[list[int], list[int]]] = []
        ends: list[int] = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs += map(make_disjoint_window, windows)
            ends.append(len(pairs))
        answers = self._score(pairs, disable_tqdm)
        totals: list[float] = []
        start = 0
        for request, end in zip(requests, ends, strict=True):
            total = sum(value for value, _ in answers[start:end])
            start = end
            totals.append(float(total))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _fitted(self, context: list[int], rest: list[int]) -> tuple[list[int], list[int]]:
        """Cut the beginning of a context that is too long; the last token of the continuation is not read."""
        room = self.max_length + 1 - len(rest)
        if room < 1:
            raise ConfigError(
                f"a continuation has {len(rest)} tokens, more than max_length={self.max_length}; use a model for "
                "longer texts"
            )
        if len(context) > room:
            _warn_of_cut_context(self.max_length)
        return context[-room:], rest

    def _score(self, pairs: Sequence[Any], disable_tqdm: bool) -> list[tuple[float, bool]]:
        if not pairs:
            return []
        with progress_bar(total=len(pairs), desc="log-likelihoods", is_hidden=disable_tqdm) as bar:
            found = self.module.log_likelihoods(
                pairs,
                batch_size=self.batch_size,
                on_batch=bar.update,
            )
        return list(zip(found.values.tolist(), found.is_greedy.tolist(), strict=True))

    # ---- generation --------------------------------------------------------------------------------------------------

    def generate_until(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,
    ) -> list[str]:
        """Continue contexts until a stop string, which is cut off, an end-of-sequence token or the limit of tokens.

        Args:
            requests: lm_eval's, with a context and options of generation each.
            disable_tqdm: Whether to show no progress.

        Raises:
            ConfigError: If an option is unknown, or the limit leaves no room for a context.
        """
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(
                number
            )
        with progress_bar(total=len(requests), desc="texts", is_hidden=disable_tqdm) as bar:
            for numbers in groups.values():
                contexts = [requests[number].args[0] for number in numbers]
                generated = self._generate(contexts, dict(requests[numbers[0]].args[1]), bar)
                for number, text in zip(numbers, generated, strict=True):
                    texts[number] = text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generate(self, contexts: Sequence[str], options: dict[str, Any], bar: Any) -> list[str]:
        """Continue contexts with the same options, the longest first."""
        stops, arguments, limit = self._generation(options)
        room = self.max_length - limit
        rows = [self.tok_encode(context) for context in contexts]
        if any(len(row) > room for row in rows):
            _warn_of_cut_context(self.max_length)
        rows = [row[-room:] for row in rows]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        size = self.batch_size
        if self.module.model_chunks is not None:
            size *= self.module.megatron.data_parallel_size
        texts = [""] * len(rows)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            answers = self._continue([rows[index] for index in batch], arguments)
            for index, tokens in zip(batch, answers, strict=True):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                for stop in filter(None, stops):
                    text = text.split(stop)[0]
                texts[index] = text
            bar.update(len(batch))
        return texts

    def _generation(self, options: dict[str, Any]) -> tuple[list[str], dict[str, Any], int]:
        """Stop strings, arguments of ``generate`` and the number of new tokens that lm_eval's options ask for."""
        until = options.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        limits = [options.pop(name, None) for name in _NEW_TOKENS]
        limit = next((int(each) for each in limits if each is not None), _DEFAULT_NEW_TOKENS)
        if limit >= self.max_length:
            raise ConfigError(
                f"max_gen_toks={limit}: expected fewer than the model's {self.max_length} tokens; use a model for "
                "longer texts"
            )
        samples = options.get("do_sample")
        if samples is None:
            samples = float(options.get("temperature", 0.0)) > 0
        if not samples:
            # Tasks set a temperature of 0, or options of sampling that then have no effect.
            options = {name: value for name, value in options.items() if name not in _SAMPLING}
        stops = [stop for stop in stops if stop]
        pad = self.tokenizer.pad_token_id
        eos = self.tokenizer.eos_token_id
        own: GenerationOptions = self.module.generation
        arguments = {
            **options,
            "do_sample": samples,
            "max_new_tokens": limit,
            "stop_strings": self._findable(stops),
            # As lm_eval's hf model: a stop string that begins in the prompt does not count.
            "stop_strings_from_prompt": False,
            "tokenizer": self.tokenizer,
            "eos_token_id": own.eos_token_id,
            "pad_token_id": self.prefix_token_id if pad is None else pad,
        }
        if eos is not None:
            # In addition to the model's own.
            arguments["stop_sequences"] = ((eos,),)
            stops.append(self.tokenizer.decode(eos))
        if "max_length" in options:
            del arguments["max_new_tokens"]
        return stops, arguments, limit

    def _findable(self, stops: Sequence[str]) -> tuple[str, ...] | None:
        """The stop strings, if generation can find them in tokens; otherwise it goes on to the limit.

        Transformers cannot with tokenizers of whole words. The texts are cut at stop strings in any case.
        """
        try:
            if stops:
                stop_strings(stops, self.tokenizer, self.module.model_config.vocab_size)
        except ConfigError:
            return None
        return tuple(stops) or None

    def _continue(self, rows: Sequence[list[int]], arguments: dict[str, Any]) -> list[list[int]]:
        """New tokens of each row."""
        import torch

        width = max(map(len, rows))
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, width - len(row) :] = torch.tensor(row)
            mask[index, width - len(row) :] = 1
        sequences = self.module.generate(tokens, mask, **arguments)
        new: list[list[int]] = sequences[:, width:].tolist()
        return new


_cut_contexts_reported: set[int] = set()


def _warn_of_cut_context(max_length: int) -> None:
    if max_length not in _cut_contexts_reported:
        _cut_contexts_reported.add(max_length)
        rank_zero_warn(f"contexts beyond max_length={max_length} tokens lose their beginning")


def progress_bar(*arguments: Any, is_hidden: bool = False, **options: Any) -> Any:
    """A progress bar of tqdm: on rank 0 only, and if standard error is a terminal."""
    is_main = getattr(rank_zero_only, "rank", 0) == 0
    # None hides it where there is no terminal.
    options["disable"] = True if is_hidden or not is_main else None
    return tqdm(*arguments, **options)
