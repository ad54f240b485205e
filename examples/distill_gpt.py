"""Distil a GPT: a small student learns the probabilities of a larger, frozen teacher with the same tokenizer.

    python examples/distill_gpt.py                                              # a teacher that it trains first
    python examples/distill_gpt.py --teacher path/to/gpt2 --data-path dataset   # yours

``--teacher`` is a Hugging Face directory. Student and teacher are cut over the same four processes.
By configuration: lightning-megatron fit --config configs/distill_llama.yaml --model.train_step.init_args.teacher DIR
"""

import argparse
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before the imports below, which take ten seconds
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", help="Hugging Face directory of a GPT")
    parser.add_argument("--data-path", help="indexed dataset, without .bin (default: Shakespeare)")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--alpha", type=float, default=0.7, help="weight of the teacher, 0 to 1")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument(
        "--output", default="runs/distill_gpt", help="directory for logs and models"
    )
    arguments = parser.parse_args()
    if (arguments.data_path is None) != (arguments.teacher is None):
        parser.error("--teacher and --data-path: expected both or neither, got one")

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoConfig

from lightning_megatron import (
    DistillationTrainStep,
    IndexedDataModule,
    MegatronModule,
    MegatronStrategy,
)

SEQ_LENGTH = 64


def fit(model: MegatronModule, data_path: str, name: str) -> Trainer:
    """Train ``model`` on a dataset, with its log in a folder of this name."""
    data = IndexedDataModule(
        data_path=data_path, split="90,10,0", seq_length=SEQ_LENGTH, micro_batch_size=4
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=MegatronStrategy(tp=2, pp=2, num_microbatches=2),
        max_steps=arguments.max_steps,
        val_check_interval=arguments.max_steps,
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        logger=CSVLogger(arguments.output, name=name),
        enable_checkpointing=False,
        default_root_dir=arguments.output,
    )
    trainer.fit(model, datamodule=data)
    return trainer


def gpt2(vocab_size: int, width: int, layers: int) -> dict[str, Any]:
    """Fields of a Hugging Face config."""
    return {
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": SEQ_LENGTH,
        "n_embd": width,
        "n_layer": layers,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def main() -> None:
    seed_everything(1234, workers=True)
    folder, data_path = arguments.teacher, arguments.data_path
    if folder is None:
        import shipped

        _, data_path = shipped.shakespeare()
        folder = f"{arguments.output}/teacher"
        teacher = MegatronModule(model=gpt2(shipped.VOCAB_SIZE, width=96, layers=4), lr=3e-3)
        fit(teacher, data_path, "teacher_log")
        teacher.save_pretrained(folder)
    student = MegatronModule(
        model=gpt2(AutoConfig.from_pretrained(folder).vocab_size, width=64, layers=2),
        train_step=DistillationTrainStep(
            teacher=folder,
            temperature=arguments.temperature,
            alpha=arguments.alpha,
        ),
        lr=3e-3,
    )
    trainer = fit(student, data_path, "student_log")
    saved = Path(arguments.output) / "model"  # AutoModelForCausalLM.from_pretrained loads it
    student.save_pretrained(saved)
    if trainer.is_global_zero:
        logged = trainer.callback_metrics
        print(
            f"{trainer.global_step} steps with the teacher {folder}: validation loss {logged['val_lm_loss']:.3f}, "
            f"divergence from the teacher {logged['val_kl_loss']:.3f}"
        )
        print(f"losses of all steps: {trainer.loggers[0].log_dir}/metrics.csv")
        print(f"model: {saved}")


if __name__ == "__main__":  # Lightning starts the other processes by running this file again
    main()
