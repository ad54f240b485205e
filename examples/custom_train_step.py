"""A custom train step: samples that contain key tokens have a larger weight in the loss.

    python examples/custom_train_step.py
    python examples/custom_train_step.py --data-path corpus_text_document --vocab-size 4096 --key-tokens 17 301

Or by configuration: lightning-megatron fit --config configs/custom_train_step.yaml --data.data_path PREFIX
"""

import argparse

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", help="indexed dataset, without .bin (default: Shakespeare)")
    parser.add_argument("--vocab-size", type=int, help="vocabulary size of its tokenizer")
    parser.add_argument(
        "--key-tokens",
        type=int,
        nargs="+",
        help="token ids with a larger weight (default: those of love and death)",
    )
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--output", default="runs/custom_train_step", help="directory for the log")
    arguments = parser.parse_args()
    own = (arguments.data_path, arguments.vocab_size, arguments.key_tokens)
    if any(own) and not all(own):
        parser.error("--data-path, --vocab-size and --key-tokens: expected all or none")

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoTokenizer

from lightning_megatron import GPTTrainStep, IndexedDataModule, MegatronModule, MegatronStrategy
from lightning_megatron.steps.base import Batch, LossTerm


class KeyTokenTrainStep(GPTTrainStep):
    """Mean loss of each sample, weighted by ``1 + alpha * number of key tokens in it``, averaged over the samples.

    Args:
        key_tokens: Token ids that increase a sample's weight.
        alpha: Increase of the weight per key token.
    """

    def __init__(self, key_tokens: Sequence[int], alpha: float = 0.25) -> None:
        super().__init__()
        self.key_tokens = torch.tensor(list(key_tokens))
        self.alpha = alpha

    def counts(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the number of samples: the loss is a mean over samples, not over tokens."""
        return {"lm_loss": (batch["loss_mask"].sum(1) > 0).sum()}

    def loss_func(self, batch: Batch, output: torch.Tensor) -> dict[str, LossTerm]:
        """Return the sum over samples and their number; the engine divides once, over all microbatches and ranks.

        Args:
            batch: ``tokens``, ``loss_mask``: [b, s].
            output: Per-token cross-entropy, [b, s], fp32.
        """
        loss_mask = batch["loss_mask"]
        targets = loss_mask.sum(1)
        sample_loss = (output * loss_mask).sum(1) / targets.clamp(min=1)
        is_key_token = torch.isin(batch["tokens"], self.key_tokens.to(batch["tokens"].device))
        weight = 1 + self.alpha * is_key_token.sum(1)
        return {"lm_loss": LossTerm((sample_loss * weight).sum(), (targets > 0).sum())}


def main() -> None:
    data_path, vocab_size = arguments.data_path, arguments.vocab_size
    key_tokens = arguments.key_tokens
    if data_path is None:
        import shipped

        path, data_path = shipped.shakespeare()
        tokenizer = AutoTokenizer.from_pretrained(path)
        vocab_size = len(tokenizer)
        key_tokens = tokenizer(" love death")["input_ids"]
    seed_everything(1234, workers=True)
    shape = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = MegatronModule(
        model={"model_type": "gpt2", "vocab_size": vocab_size, **shape},
        train_step=KeyTokenTrainStep(key_tokens),
        lr=3e-3,
    )
    data = IndexedDataModule(
        data_path=data_path, split="90,10,0", seq_length=64, micro_batch_size=4
    )
    strategy = MegatronStrategy(tp=2, num_microbatches=2)
    logger = CSVLogger(arguments.output)
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        strategy=strategy,
        max_steps=arguments.max_steps,
        logger=logger,
        log_every_n_steps=5,
        limit_val_batches=0,
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["train_loss"]
        print(f"{trainer.global_step} steps with key tokens {key_tokens}: training loss {loss:.3f}")
        print(f"losses of all steps: {logger.log_dir}/metrics.csv")


if __name__ == "__main__":  # Lightning starts the other process by running this file again
    main()
