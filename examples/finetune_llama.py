"""Fine-tune a Llama on instructions, with loss on the answers only, and save it as a Hugging Face model.

    python examples/finetune_llama.py                          # a small Llama with random weights
    python examples/finetune_llama.py --model path/to/llama    # yours

``--model`` is a Hugging Face directory: config, tokenizer and weights (safetensors or .bin). By configuration:
lightning-megatron fit --config configs/finetune_llama.yaml --model.model path/to/llama --data.tokenizer path/to/llama
"""

import argparse
from pathlib import Path

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="Hugging Face directory of a Llama with its tokenizer")
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

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import InstructionDataModule, MegatronModule, MegatronStrategy


def main() -> None:
    folder = arguments.model
    if folder is None:
        import shipped

        folder = shipped.model("llama")
    seed_everything(1234, workers=True)
    model = MegatronModule(model=folder, pretrained=True, lr=1e-3)
    logger = CSVLogger(arguments.output)
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=logger,
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    data = InstructionDataModule(
        arguments.data_path,
        tokenizer=folder,
        split="80,20,0",
        seq_length=128,
        micro_batch_size=2,
        packing=True,  # several short samples share a row, without attending to each other
        separator="\n",
    )
    trainer.fit(model, datamodule=data)
    tuned = Path(arguments.output) / "model"  # AutoModelForCausalLM.from_pretrained loads it
    model.save_pretrained(tuned)  # call it on all ranks: each sends its shards
    if trainer.is_global_zero:
        AutoTokenizer.from_pretrained(folder).save_pretrained(tuned)
        losses = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps on {arguments.data_path}: training loss "
            f"{losses['train_loss']:.3f}, validation loss {losses['val_loss']:.3f}"
        )
        print(f"losses of all steps: {logger.log_dir}/metrics.csv")
        print(f"model and tokenizer: {tuned}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
