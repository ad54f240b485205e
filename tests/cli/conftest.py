import shutil
from pathlib import Path

import pytest

from lightning_megatron.cli import main
from tests.cli.corpus import VOCAB_SIZE


@pytest.fixture(scope="session")
def checkpoints(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 in all formats, one with its tokenizer; a T5 and a BERT without."""
    import transformers as hf

    from tests.families.parity import tiny_model

    folder = tmp_path_factory.mktemp("checkpoints")
    tokens = {"vocab_size": VOCAB_SIZE}
    gpt2 = hf.GPT2Config(
        **tokens,
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=64,
        eos_token_id=0,
    )
    t5 = hf.T5Config(
        **tokens, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    bert = hf.MegatronBertConfig(**tokens, **sizes, max_position_embeddings=8)
    tiny_model(hf.AutoModelForCausalLM, gpt2).save_pretrained(folder / "bare")
    tiny_model(hf.T5ForConditionalGeneration, t5).save_pretrained(folder / "t5")
    hf.MegatronBertForPreTraining(bert).save_pretrained(folder / "bert")
    hf.GPT2ForSequenceClassification(gpt2).save_pretrained(folder / "classifier")
    for source in (folder / "bare", corpus.parent / "tok"):
        shutil.copytree(source, folder / "hf", dirs_exist_ok=True)
    for name, to in (("run.ckpt", "megatron"), ("legacy", "megatron-legacy")):
        options = f"--load-path {folder}/hf --save-path {folder}/{name} --to {to} --tp 2 --pp 2"
        assert main(["convert", *options.split()]) == 0
    return folder
