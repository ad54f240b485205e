"""Tokenizers for tests: byte-level and word-level, with and without chat templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

END = "<|end|>"
"""End-of-sequence token, which also ends a turn."""

# The ``generation`` block marks answers for transformers.
_TURN = (
    "{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}"
)
_ASK = "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
MARKED = "{% for message in messages %}" + _TURN + "{% endfor %}" + _ASK
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
STRICT = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    + _TURN
    + "{% endfor %}"
    + _ASK
)
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] in ['user', 'assistant'] %}"
    + _TURN
    + "{% endif %}"
)
FORGETFUL += "{% endfor %}" + _ASK
# Like templates that keep the reasoning of the last turn only: earlier turns render differently than as the last.
REASONING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ message['content'] + '<|end|>\\n' }}{% endfor %}" + _ASK
)


def make_tokenizer(
    folder: Path,
    template: str | None = None,
    *,
    trim_offsets: bool = False,
    bos: bool = False,
) -> str:
    """Save a byte-level BPE tokenizer with a few merges; returns its directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", END, "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        ["the answer is yes, the question was: is it?  "] * 9, trainer=trainer
    )
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(
            processors.TemplateProcessing(
                single="<s> $A",
                special_tokens=[("<s>", 0)],
            )
        )
    backend.post_processor = processors.Sequence(steps)
    names = {"eos_token": END, "additional_special_tokens": special[2:]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def byte_level_tokenizer(pieces: Mapping[int, bytes]) -> Any:
    """A transformers tokenizer that decodes each token to the given bytes, like those of GPT-2 and Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's alphabet: printable bytes map to themselves, all other bytes to letters from 256 on.
    printable = [b for b in range(256) if chr(b) in letters]
    others = iter(chr(256 + n) for n in range(256 - len(printable)))
    letter_of = {b: chr(b) if b in printable else next(others) for b in range(256)}
    vocabulary = {"".join(letter_of[b] for b in piece): token for token, piece in pieces.items()}
    assert len(vocabulary) == len(pieces), "two tokens have the same bytes"
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer whose tokens are the words w0, w1, ...."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def number_tokenizer(count: int, first: int = 0) -> Any:
    """Tokenizer of the words ``0`` to ``count - 1``, each one token of that id, and an end-of-sequence token.

    ``first`` is the word of id 0; the words before it have the last ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str((first + number) % count): number for number in range(count)}
    vocabulary[END] = count
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
