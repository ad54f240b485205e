"""Commands accept checkpoints of GPT variants that no Hugging Face config describes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.cli import main
from lightning_megatron.data.tokenizer import load_tokenizer
from tests.cli.command import run_cli
from tests.cli.corpus import VOCAB_SIZE
from tests.parity.training import TP2
from tests.ranks import run_ranks

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
}
_SIZES |= {
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PROMPT = [[5, 9, 11, 40, 7]]


def _train(folder: str) -> tuple[list[int], list[int]]:
    """Train a GPT-2 with rotary positions and multi-query attention, save it, and return its completion.

    Also that of the average of its weights.
    """
    from torch.utils.data import DataLoader

    from lightning_megatron import EMA, MegatronModule
    from tests.parity.training import Case, trainer_of

    tokens = torch.arange(16).remainder(VOCAB_SIZE)
    rows: Any = [{"input_ids": tokens, "labels": tokens}] * 4
    ema = EMA(decay=1.0)  # the weights after the first step
    trainer = trainer_of(Case(layout=TP2, steps=2), callbacks=[ema])
    fields: dict[str, Any] = {
        "position_embedding_type": "rotary",
        "attention_head_type": "multiquery",
    }
    module = MegatronModule(
        model={"model_type": "gpt2", **_SIZES}, lr=0.1, make_vocab_size_divisible_by=8, **fields
    )
    trainer.fit(module, DataLoader(rows, batch_size=2))
    trainer.save_checkpoint(f"{folder}/own.ckpt")
    prompt = torch.tensor(PROMPT)
    completion = module.generate(prompt, max_new_tokens=8)
    with ema.average_parameters():
        averaged = module.generate(prompt, max_new_tokens=8)
    begin = prompt.shape[1]
    return completion[0, begin:].tolist(), averaged[0, begin:].tolist()


def test_generate_and_inspect_a_variant_in_every_format(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(corpus.parent / "tok")
    completion, averaged = run_ranks(_train, 2, str(tmp_path))[0]
    assert completion != averaged
    own = tmp_path / "own.ckpt"
    legacy = tmp_path / "legacy"
    convert = ["convert", "--load-path", str(own), "--save-path"]
    assert main([*convert, str(legacy), "--to", "megatron-legacy", "--tp", "2", "--pp", "2"]) == 0
    prompt = tokenizer.decode(PROMPT[0])
    rows = (
        (own, 1, completion, ()),
        (legacy, 2, completion, ()),
        (own, 2, averaged, ("--ema",)),
    )
    for path, tp, tokens, flags in rows:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        options = [
            "--checkpoint",
            str(path),
            "--tokenizer",
            str(corpus.parent / "tok"),
            "--accelerator",
            "cpu",
        ]
        options += ["--tp", str(tp), "--prompt", prompt, "--max-new-tokens", "8", "--json", *flags]
        code, out, err = run_cli(tmp_path, "generate", *options, ranks=tp)
        assert code == 0, err
        assert json.loads(out) == {"prompt": prompt, "text": text}
        capfd.readouterr()
        assert main(["inspect", str(path)]) == 0
        assert "position_embedding_type rope" in " ".join(capfd.readouterr().out.split())
    assert main([*convert, str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "expected a model that Hugging Face's" in capfd.readouterr().err
