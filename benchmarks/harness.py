"""Time that lm_eval's tasks take with ``MegatronLM`` beside lm_eval's own ``hf`` model, on the same weights.

``python -m benchmarks.harness`` needs the extra ``eval``. It makes a Llama with random weights and four tasks on random
words: answers of several tokens, of one token, whole texts, and generated answers. Both models take turns; the best of
the repetitions counts, in seconds of CPU time on one thread, which other programs disturb least. Answers are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron import HarnessOptions, MegatronLM, MegatronModule
from lightning_megatron.harness.evaluation import evaluate_tasks
from lightning_megatron.harness.tasks import load_tasks

_TASKS = {
    "choices": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}. Answer:"
doc_to_choice: choices
doc_to_target: gold
""",
    "letters": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}. A. {{choices[0]}} B. {{choices[1]}} C. {{choices[2]}} Answer:"
doc_to_choice: [A, B, C]
doc_to_target: gold
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "generated": """\
output_type: generate_until
doc_to_text: "Question: {{question}}. Answer:"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=list(_TASKS))
    options = parser.parse_args(argv)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _write_model(work / "model", options)
        _write_tasks(work, options.documents)
        module = MegatronModule(model=str(work / "model"), pretrained=True)
        models = {
            "megatron": MegatronLM(module, work / "model", batch_size=options.batch_size),
            "hf": HFLM(
                str(work / "model"), dtype="float32", device="cpu", batch_size=options.batch_size
            ),
        }
        # The Trainer that builds the model sets a number of its own.
        models["megatron"].loglikelihood([Instance("loglikelihood", {}, ("w5", " w6"), 0)])
        torch.set_num_threads(options.threads)
        for task in options.tasks:
            seconds, difference = _compare(models, work / f"{task}.yaml", options.repetitions)
            ratio = seconds["hf"] / seconds["megatron"]
            print(
                f"{task}: megatron {seconds['megatron']:.2f} CPU s, hf {seconds['hf']:.2f}, {ratio:.2f} x; largest "
                f"difference of a log-likelihood {difference:.1e}",
                flush=True,
            )


def _compare(
    models: dict[str, Any],
    task: Path,
    repetitions: int,
) -> tuple[dict[str, float], float]:
    """Least CPU seconds by model, and the largest difference of answers, infinite if texts differ."""
    harness = HarnessOptions(tasks=[str(task)], bootstrap_iters=0)
    loaded = load_tasks(harness)
    seconds = dict.fromkeys(models, float("inf"))
    answers: dict[str, list[Any]] = {}
    # The first round, which allocates memory and builds the model, does not count.
    for repetition in range(repetitions + 1):
        for name, model in models.items():
            started = time.process_time()
            results = evaluate_tasks(model, loaded, harness, is_main=True, log_samples=True)
            if repetition > 0:
                seconds[name] = min(seconds[name], time.process_time() - started)
            (documents,) = results["samples"].values()
            answers[name] = [each for document in documents for each in document["resps"]]
    pairs = zip(answers["megatron"], answers["hf"], strict=True)
    return seconds, max(_difference(ours[0], theirs[0]) for ours, theirs in pairs)


def _difference(ours: Any, theirs: Any) -> float:
    if isinstance(ours, str):
        return 0.0 if ours == theirs else float("inf")
    if isinstance(ours, tuple):
        return _difference(ours[0], theirs[0])
    return abs(float(ours) - float(theirs))


def _write_model(folder: Path, options: argparse.Namespace) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {"<s>": 0, "</s>": 1, ".": 2, "?": 3}
    vocabulary |= {f"w{token}": token for token in range(4, options.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="?",
    )
    tokenizer.save_pretrained(folder)


def _write_tasks(folder: Path, documents: int) -> None:
    generator = random.Random(1)

    def text(shortest: int, longest: int) -> str:
        count = generator.randint(shortest, longest)
        return " ".join(f"w{generator.randint(4, 999)}" for _ in range(count))

    rows = [
        {
            "question": text(10, 60),
            "choices": [text(1, 4) for _ in range(3)],
            "gold": generator.randint(0, 2),
            "text": text(20, 400),
        }
        for _ in range(documents)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, fields in _TASKS.items():
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            f"test_split: test\n{fields}metadata: {{version: 1}}\n"
        )


if __name__ == "__main__":
    main()
