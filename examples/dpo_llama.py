"""Teach a Llama preferences by DPO: of two answers to a prompt, the chosen one becomes the more likely.

    python examples/dpo_llama.py                          # a small Llama with random weights
    python examples/dpo_llama.py --model path/to/llama    # yours
    python examples/dpo_llama.py --lora                   # adapters alone: the reference is the model without them

``--model`` is a Hugging Face directory: config, tokenizer and weights, which are also the reference model. By
configuration:
lightning-megatron fit --config configs/dpo_llama.yaml --model.model path/to/llama --data.tokenizer path/to/llama
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
        default=str(Path(__file__).with_name("preferences.jsonl")),
        help="JSON lines with prompt, chosen and rejected: texts, or messages for the tokenizer's chat template",
    )
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters alone")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument(
        "--output", default="runs/dpo_llama", help="directory for the log, the cache and the model"
    )
    arguments = parser.parse_args()

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import (
    DPOTrainStep,
    LoRA,
    MegatronModule,
    MegatronStrategy,
    PreferenceDataModule,
)


def main() -> None:
    folder = arguments.model
    if folder is None:
        import shipped

        folder = shipped.model("llama")
    seed_everything(1234, workers=True)
    model = MegatronModule(
        model=folder,
        pretrained=True,
        train_step=DPOTrainStep(beta=arguments.beta),
        lora=LoRA(rank=8) if arguments.lora else None,
        lr=1e-3,
    )
    logger = CSVLogger(arguments.output)
    trainer = Trainer(
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        log_every_n_steps=5,
        logger=logger,
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    data = PreferenceDataModule(
        arguments.data_path,
        tokenizer=folder,
        split="80,20,0",
        seq_length=64,
        micro_batch_size=2,
        separator="\n",
        reference_cache=f"{arguments.output}/reference_logps",
    )
    trainer.fit(model, datamodule=data)
    tuned = Path(arguments.output) / "model"
    model.save_pretrained(tuned)  # with --lora the adapter, which peft loads
    if trainer.is_global_zero:
        AutoTokenizer.from_pretrained(folder).save_pretrained(tuned)
        logged = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps on {arguments.data_path}: training loss {logged['train_loss']:.3f}, "
            f"margin of rewards {logged['train_margin']:.2f}, accuracy {logged['train_accuracy']:.2f}"
        )
        print(f"rewards and accuracy of all steps: {logger.log_dir}/metrics.csv")
        print(f"model and tokenizer: {tuned}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
