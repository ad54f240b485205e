"""What transformers makes of a prompt with an exported model: a continuation, or the text in its gaps.

python -m recipes.complete runs/recipes/gpt2_small/model --prompt "def read_lines(path):"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def complete(folder: Path, kind: str, prompt: str) -> str:
    """Return the greedy continuation of a GPT, what a BERT reads at its mask, or what a T5 writes for the gaps."""
    import torch
    import transformers

    model_class = {
        "gpt": transformers.AutoModelForCausalLM,
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
    }[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = model_class.from_pretrained(folder).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if kind == "bert":
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        masked = inputs.input_ids[0] == tokenizer.mask_token_id
        return str(tokenizer.decode(logits[masked].argmax(-1)))
    tokens = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )[0]
    if kind == "gpt":
        tokens = tokens[inputs.input_ids.shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=kind == "gpt"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Complete a prompt from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.complete",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="Hugging Face directory with a tokenizer")
    parser.add_argument("--kind", choices=("gpt", "bert", "t5"), default="gpt")
    parser.add_argument("--prompt", required=True)
    options = parser.parse_args(arguments)
    print(complete(options.model, options.kind, options.prompt))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
