"""Train a reward model: a Llama with one output, which is larger for the answer that people preferred.

    python examples/reward_llama.py                          # a small Llama with random weights
    python examples/reward_llama.py --model path/to/llama    # yours
    python examples/reward_llama.py --lora                   # adapters and the head alone

``--model`` is a Hugging Face directory: config, tokenizer and weights. Its head is new. By configuration:
lightning-megatron fit --config configs/reward_llama.yaml --model.model path/to/llama --data.tokenizer path/to/llama
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
    parser.add_argument(
        "--lora", action="store_true", help="train low-rank adapters and the head alone"
    )
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument(
        "--output", default="runs/reward_llama", help="directory for the log and the model"
    )
    arguments = parser.parse_args()

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import LoRA, MegatronModule, MegatronStrategy, PreferenceDataModule


def main() -> None:
    folder = arguments.model
    if folder is None:
        import shipped

        folder = shipped.model("llama")
    seed_everything(1234, workers=True)
    model = MegatronModule(
        model=folder,
        pretrained=True,
        task="sequence_classification",
        num_labels=1,  # the reward
        train_step="reward",
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
        micro_batch_size=2,  # pairs, of two sequences each
        separator="\n",
    )
    trainer.fit(model, datamodule=data)
    trained = Path(arguments.output) / "model"
    # AutoModelForSequenceClassification.from_pretrained loads it; with --lora peft loads the adapters and the head.
    model.save_pretrained(trained)
    if trainer.is_global_zero:
        AutoTokenizer.from_pretrained(folder).save_pretrained(trained)
        logged = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps on {arguments.data_path}: training loss {logged['train_loss']:.3f}, "
            f"validation margin of rewards {logged['val_margin']:.2f}, accuracy {logged['val_accuracy']:.2f}"
        )
        print(f"losses of all steps: {logger.log_dir}/metrics.csv")
        print(f"model and tokenizer: {trained}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
