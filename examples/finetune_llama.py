"""Fine-tune a Llama on instructions, with loss on the answers only, and save it as a Hugging Face model.

    python examples/finetune_llama.py --model path/to/llama --output runs/finetune_llama

``--model`` is a Hugging Face directory: config, tokenizer and weights (safetensors or .bin). Or by configuration:
lightning-megatron fit --config configs/finetune_llama.yaml --model.model path/to/llama --data.tokenizer path/to/llama
"""

import argparse
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import InstructionDataModule, MegatronModule, MegatronStrategy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory of a Llama with its tokenizer"
    )
    parser.add_argument(
        "--data-path",
        default=str(Path(__file__).with_name("instructions.jsonl")),
        help="JSON lines with prompt and completion, or with messages for the tokenizer's chat template",
    )
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument(
        "--output", default="runs/finetune_llama", help="directory for the log and the model"
    )
    arguments = parser.parse_args()

    seed_everything(1234, workers=True)
    model = MegatronModule(model=arguments.model, pretrained=True, lr=1e-3)
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(arguments.output),
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    data = InstructionDataModule(
        arguments.data_path,
        tokenizer=arguments.model,
        split="80,20,0",
        seq_length=128,
        micro_batch_size=2,
        packing=True,  # several short samples share a row, without attending to each other
        separator="\n",
    )
    trainer.fit(model, datamodule=data)
    folder = Path(arguments.output) / "model"  # AutoModelForCausalLM.from_pretrained loads it
    model.save_pretrained(folder)  # call it on all ranks: each sends its shards
    if trainer.is_global_zero:
        AutoTokenizer.from_pretrained(arguments.model).save_pretrained(folder)


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
