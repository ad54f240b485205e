"""Generate text from prompts with the four methods of Accelerate's Megatron-LM guide, with a GPT on four processes.

    python examples/generate_text.py
    python examples/generate_text.py --model path/to/gpt2 --prompts "Are you human?" "The purpose of life is"

``--model`` is a Hugging Face directory: config, tokenizer and weights. Without it, the model that
examples/pretrain_clm.py leaves is read, or else one with random weights is made. The same without Python:
lightning-megatron generate --checkpoint path/to/gpt2 --tp 2 --pp 2 --prompt "Are you human?" --top-k 50
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face directory of a GPT with its tokenizer")
    parser.add_argument(
        "--prompts", nargs="+", default=["Are you human?", "The purpose of life is"]
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lightning_megatron import MegatronModule, MegatronStrategy

TRAINED = "runs/pretrain_clm/model"


class SeveralMethods(MegatronModule):
    """Generates sequences for the prompts of a batch with several methods; ``generate`` works in ``fit``, too."""

    methods: dict[str, dict[str, Any]]

    def predict_step(
        self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        prompts, mask = batch["input_ids"], batch.get("attention_mask")
        return {
            name: self.generate(prompts, mask, **options) for name, options in self.methods.items()
        }


def main() -> None:
    folder = arguments.model
    if folder is None:
        import shipped

        folder = TRAINED if Path(TRAINED).exists() else shipped.model("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    length = {"max_new_tokens": arguments.max_new_tokens}
    module = SeveralMethods(model=folder, pretrained=True)
    module.methods = {
        "top-p, decaying": {"top_p": 0.8, "top_p_decay": 0.5, "temperature": 0.9, **length},
        "top-k": {"top_k": 50, "temperature": 0.9, **length},
        "top-k, after the first token of texts": {
            "top_k": 50,
            "temperature": 0.9,
            "bos_token_id": tokenizer.bos_token_id
            if tokenizer.bos_token_id is not None
            else tokenizer.eos_token_id,
            **length,
        },
        "20 beams": {"num_beams": 20, "length_penalty": 1.5, **length},
    }
    rows = tokenizer(arguments.prompts, padding=True, return_tensors="pt")
    prompts: Any = [
        {"input_ids": tokens, "attention_mask": mask}
        for tokens, mask in zip(rows.input_ids, rows.attention_mask, strict=True)
    ]
    trainer = Trainer(
        devices=4, strategy=MegatronStrategy(tp=2, pp=2), logger=False, enable_checkpointing=False
    )
    batches: Any = trainer.predict(module, DataLoader(prompts, batch_size=len(prompts)))
    (sequences,) = batches
    if trainer.is_global_zero:
        print(f"{len(prompts)} prompts continued by {folder} in {len(sequences)} ways:")
        for name, tokens in sequences.items():
            print(f"---- {name}")
            print("\n\n".join(tokenizer.batch_decode(tokens, skip_special_tokens=True)))


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
