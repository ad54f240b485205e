"""Training script of the hosts: a small GPT-2 on an indexed dataset, saved every five steps and resumed from ``last``.

train.py OPTIONS    # JSON: num_nodes, devices, num_microbatches, max_steps, cache
"""

import json
import logging
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import IndexedDataModule, MegatronModule, MegatronStrategy

BOOKS = Path(__file__).parent.parent / "golden" / "files" / "books_text_document"
TIMEOUT = timedelta(seconds=40)


class Recorder(Callback):
    """Record each step of rank 0 and each start of any rank, with the time."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Record a start."""
        _write(
            "begins",
            [
                trainer.global_step,
                trainer.world_size,
                socket.gethostname(),
                time.time(),
                os.getpid(),
            ],
        )

    def on_train_batch_end(
        self,
        trainer: Any,
        module: Any,
        outputs: Any,
        *rest: Any,
    ) -> None:
        """Record a step."""
        if trainer.global_rank == 0:
            _write(
                "steps",
                [
                    trainer.global_step,
                    float(outputs["loss"]),
                    trainer.world_size,
                    time.time(),
                ],
            )
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.5")))


def _write(name: str, values: list[Any]) -> None:
    with open(name, "a") as file:
        print(json.dumps(values), file=file, flush=True)


def main() -> None:
    """Train."""
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format=f"{socket.gethostname()}: %(message)s")
    seed_everything(3, verbose=False)
    model = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 2,
        "vocab_size": 512,
        "n_positions": 16,
    }
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    cache = str(Path(options["cache"].replace("HOST", socket.gethostname())).absolute())
    data = IndexedDataModule(
        str(BOOKS), split="1,0,0", seq_length=16, micro_batch_size=1, index_cache=cache
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=options["devices"],
        num_nodes=options["num_nodes"],
        max_steps=options["max_steps"],
        strategy=MegatronStrategy(num_microbatches=options["num_microbatches"], timeout=TIMEOUT),
        callbacks=[
            Recorder(),
            ModelCheckpoint("checkpoints", every_n_train_steps=5, save_last="link"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(
        MegatronModule(
            model={**model, **dropout},
            lr=1e-2,
        ),
        datamodule=data,
        ckpt_path="last",
    )
    print("interface", os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)


if __name__ == "__main__":
    main()
