"""What the examples run on unless arguments name something else: Shakespeare's plays, and small models.

Each is made on first use in ``runs/shipped``, by the commands that a user would type. The quickstart's tokenizer and
dataset are used instead where it has left them.
"""

from pathlib import Path

from filelock import FileLock

TEXT = Path(__file__).parent / "data" / "shakespeare.jsonl.gz"
FOLDER = Path("runs/shipped")
QUICKSTART = Path("quickstart")
VOCAB_SIZE = 2048
SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "megatron-bert": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
}
"""Fields of the Hugging Face configs of the small models."""


def shakespeare(kind: str = "gpt") -> tuple[str, str]:
    """Return the directory of a tokenizer, and the path (without .bin) of the plays as a dataset of its tokens.

    Args:
        kind: Kind of model: ``gpt``; or ``bert`` or ``t5``, whose datasets are in sentences.
    """
    if kind == "gpt" and (QUICKSTART / "shakespeare_text_document.idx").exists():
        return str(QUICKSTART / "tokenizer"), str(QUICKSTART / "shakespeare_text_document")
    tokenizer = FOLDER / kind / "tokenizer"
    prefix = FOLDER / kind / "shakespeare"
    form = "document" if kind == "gpt" else "sentence"
    dataset = prefix.with_name(f"{prefix.name}_text_{form}")
    common = ["--input", str(TEXT)]
    with _only_one_process():
        if not tokenizer.exists():
            options = ["--kind", kind, "--vocab-size", str(VOCAB_SIZE), "--output", str(tokenizer)]
            _run("train-tokenizer", *common, *options)
        if not dataset.with_suffix(".idx").exists():
            options = ["--tokenizer", str(tokenizer), "--output-prefix", str(prefix)]
            options.append("--append-eod" if kind == "gpt" else "--split-sentences")
            _run("preprocess", *common, *options)
    return str(tokenizer), str(dataset)


def model(family: str) -> str:
    """Return a directory as ``save_pretrained`` writes it: a small model with random weights, and its tokenizer.

    Args:
        family: A key of ``SIZES``.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForPreTraining,
        AutoTokenizer,
    )

    is_bert = family == "megatron-bert"
    path, _ = shakespeare("bert" if is_bert else "gpt")
    folder = FOLDER / family
    with _only_one_process():
        if not folder.exists():
            tokenizer = AutoTokenizer.from_pretrained(path)
            ids = {
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
            }
            config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **SIZES[family], **ids)
            model_class = AutoModelForPreTraining if is_bert else AutoModelForCausalLM
            tokenizer.save_pretrained(folder)
            model_class.from_config(config).save_pretrained(folder)
            print(f"{folder}: a {family} with random weights")
    return str(folder)


def _only_one_process() -> FileLock:
    """Lock, for launchers such as torchrun that start all ranks at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FileLock(FOLDER / "lock")


def _run(*command: str) -> None:
    """Run a command of ``lightning-megatron`` in this process."""
    from lightning_megatron.cli import main

    print("lightning-megatron", *command)
    code = main(list(command))
    if code:
        raise SystemExit(code)
