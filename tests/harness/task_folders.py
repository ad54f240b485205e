"""Task YAMLs of lm_eval that read local files, and a tiny Llama to evaluate."""

import json
import random
from pathlib import Path
from typing import Any

from tests.tokenizers import MARKED, make_tokenizer

WORDS = ["the", "answer", "is", "yes,", "question", "was:", "it", "no", "of", "to", "with", "for"]
POSITIONS = 64
TASKS = ("choice", "letters", "last", "rolling", "continued")
"""Answers of several tokens; of one token; the end of a text; a whole text, also in windows; a generated answer."""

_METRICS = {
    "choice": "[{metric: acc, aggregation: mean, higher_is_better: true},"
    " {metric: acc_norm, aggregation: mean, higher_is_better: true}]",
    "letters": "[{metric: acc, aggregation: mean, higher_is_better: true}]",
    "last": "[{metric: acc, aggregation: mean, higher_is_better: true},"
    " {metric: perplexity, aggregation: perplexity, higher_is_better: false}]",
    "rolling": "[{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]",
    "continued": "[{metric: exact_match, aggregation: mean, higher_is_better: true}]",
}
_FIELDS = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
fewshot_split: test
""",
    "letters": """\
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nA. {{choices[0]}}\\nB. {{choices[1]}}\\nAnswer:"
doc_to_choice: [A, B]
doc_to_target: "{{gold % 2}}"
""",
    "last": """\
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
""",
    "continued": """\
output_type: generate_until
doc_to_text: "{{question}}\\n"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "w"], max_gen_toks: 9, do_sample: false, temperature: 0.0}
""",
}


# No stop string of "continued" is in the name of a special token: whether lm_eval's hf model then ends a row depends on
# the others of the batch.


def write_tasks(folder: Path, documents: int = 7) -> Path:
    """Write documents and the tasks on them; returns the folder of the YAMLs."""
    generator = random.Random(3)

    def text(words: int) -> str:
        return " ".join(generator.choice(WORDS) for _ in range(words))

    rows = [
        {
            "question": text(generator.randint(2, 9)),
            "choices": [text(generator.randint(1, 3)) for _ in range(3)],
            "gold": generator.randint(0, 2),
            "text": text(generator.randint(3, 90)),
        }
        for _ in range(documents)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, fields in _FIELDS.items():
        write_task(
            tasks / f"{name}.yaml",
            data,
            fields,
            task=name,
            metrics=_METRICS[name],
        )
    members = "".join(f"  - {name}\n" for name in ("choice", "letters"))
    (tasks / "both.yaml").write_text(
        f"group: both\ntask:\n{members}aggregate_metric_list: [{{metric: acc}}]\n"
    )
    return tasks


def write_task(
    path: Path,
    data: Path | str,
    fields: str,
    *,
    task: str,
    metrics: str = _METRICS["letters"],
) -> None:
    """Write a task's YAML."""
    path.write_text(
        f"task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        f"test_split: test\n{fields}metric_list: {metrics}\nmetadata: {{version: 1}}\n"
    )


def write_model(folder: Path, **fields: Any) -> Path:
    """Write a tiny Llama with random weights and a tokenizer that has a chat template; returns its directory."""
    import torch
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=304,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        **fields,
    )
    model = folder / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    make_tokenizer(model, MARKED)
    return model
