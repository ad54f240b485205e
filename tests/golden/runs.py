"""Training runs of the golden files, by public names alone; for rank functions."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SEQ_LENGTH = 16
BATCH = 8
"""Rows of an optimizer step at every layout."""

_NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {},
    "megatron-bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 110},
        **{"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3, "initializer_range": 0.2},
    },
    "llama": {
        **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "vocab_size": 110},
        **{"initializer_range": 0.2, "tie_word_embeddings": False},
    },
    "bert": {
        **{"model_type": "megatron-bert", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
        **{"num_attention_heads": 2, "max_position_embeddings": 32, "vocab_size": 110, "initializer_range": 0.2},
    },
    "t5": {
        **{"model_type": "t5", "num_layers": 2, "num_decoder_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 24},
        **{"num_heads": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
        **{"vocab_size": 110, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    },
}
"""Hugging Face configs with the vocabulary of the tokenizers here."""


def without_dropout(name: str) -> dict[str, Any]:
    """One of ``MODELS`` whose losses do not depend on who draws which random number."""
    model = MODELS[name]
    return {**model, **_NO_DROPOUT[model["model_type"]]}


def set_times(folder: Path) -> None:
    """Give datasets the times that the names of their caches are made of."""
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))


# ---- runs -----------------------------------------------------------------------------------------------------------

Steps = dict[int, dict[str, Any]]
"""By global step: what was logged, and a hash of each row of the batch."""


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """One ``Trainer.fit``."""

    model: str
    """A key of ``MODELS``."""
    data: Mapping[str, Any] | None = None
    """Arguments of the data module, prefixes and tokenizer below the folder of files; None for a shuffled
    ``DataLoader``."""
    data_module: str = "IndexedDataModule"
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronStrategy``."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``Trainer``."""
    dropout: bool = False
    ckpt_path: str | None = None
    save_path: str | None = None
    """Where to save at the end."""

    def but(self, **changes: Any) -> GoldenRun:
        """The same run with fields changed."""
        return replace(self, **changes)


BLEND = GoldenRun(
    model="gpt2",
    data={"data_path": [0.7, "books_text_document", 0.3, "web_text_document"], "split": "8,1,1"},
    strategy={"tp": 2, "pp": 2},
    trainer={"max_steps": 6, "precision": "bf16-mixed"},
    dropout=True,
)
WITHOUT_DROPOUT = BLEND.but(strategy={}, dropout=False)
"""By which other layouts are compared, whose ranks draw other random numbers."""
SHUFFLED = GoldenRun(model="llama", trainer={"max_epochs": 3})
"""Five steps an epoch, on two copies of the model."""
BERT = GoldenRun(
    model="bert",
    data={"data_path": "books_pieces_text_sentence", "split": "1,0,0", "tokenizer": "pieces"},
    strategy={"tp": 2},
    trainer={"max_steps": 5},
)
T5 = GoldenRun(
    model="t5",
    data={"data_path": "books_words_text_sentence", "split": "1,0,0", "tokenizer": "words", "seq_length_decoder": 8},
    strategy={"pp": 2},
    trainer={"max_steps": 5},
)
RUNS: dict[str, tuple[GoldenRun, int, int]] = {
    "blend": (BLEND, 4, 3),
    "shuffled": (SHUFFLED, 2, 7),
    "bert": (BERT, 2, 3),
    "t5": (T5, 2, 3),
}
"""Name of each run: what, on how many ranks, and after which step ``NAME.ckpt`` was saved."""

_INSTRUCTIONS = {"data_path": "instructions.jsonl", "split": "1,0,0", "tokenizer": "words", "seq_length": 32}
SAMPLES: dict[str, GoldenRun] = {
    "gpt, whole run": BLEND.but(strategy={}, dropout=False, trainer={"max_steps": 40}),
    "gpt, epochs": BLEND.but(
        data={"data_path": ["web_text_document", "books_text_document"], "split": "8,2,0", "seed": 5},
        strategy={},
        dropout=False,
        trainer={"max_epochs": 3},
    ),
    "bert, whole run": BERT.but(strategy={}, trainer={"max_steps": 16}),
    "t5, epochs": T5.but(strategy={}, trainer={"max_epochs": 2}),
    "instructions": GoldenRun(
        model="gpt2", data=_INSTRUCTIONS, data_module="InstructionDataModule", trainer={"max_epochs": 3}
    ),
    "instructions, packed": GoldenRun(
        model="gpt2",
        data={**_INSTRUCTIONS, "packing": True, "answers": "last"},
        data_module="InstructionDataModule",
        trainer={"max_epochs": 3},
    ),
}
"""Runs from the beginning on one rank, for several passes, of which only the samples count."""


def trained(run: GoldenRun, files: Path, work: Path, keep_at: int | None = None) -> Steps:
    """The steps of a run; every rank.

    Args:
        run: What to train.
        files: Folder of datasets and tokenizers.
        work: Folder for the caches.
        keep_at: Step after which a stock ``ModelCheckpoint`` saves ``work / "step=N.ckpt"``.
    """
    import lightning.pytorch as pl

    import lightning_megatron
    from lightning_megatron import LRSchedule, MegatronModule, MegatronStrategy

    pl.seed_everything(7, verbose=False)
    recorder, logger = _recorder(), _logger()
    callbacks = [recorder]
    if keep_at is not None:
        keep = {"filename": "{step}", "every_n_train_steps": keep_at, "save_top_k": -1}
        callbacks.append(pl.callbacks.ModelCheckpoint(work, **keep))
    strategy = MegatronStrategy(num_microbatches=2, **run.strategy)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=keep_at is not None,
        **run.trainer,
    )
    module = MegatronModule(
        model=MODELS[run.model] if run.dropout else without_dropout(run.model),
        lr=1e-2,
        lr_schedule=LRSchedule(style="linear", warmup_steps=2, decay_steps=20),
        make_vocab_size_divisible_by=8,
    )
    data: dict[str, Any] = {"train_dataloaders": _shuffled_loader(strategy.data_parallel_size)}
    if run.data is not None:
        settings = {"index_cache": str(work / "cache"), "seq_length": SEQ_LENGTH, **_below(files, run.data)}
        rows = BATCH // strategy.data_parallel_size // 2
        data = {"datamodule": getattr(lightning_megatron, run.data_module)(micro_batch_size=rows, **settings)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* of another order than the checkpoint's")
        trainer.fit(module, ckpt_path=run.ckpt_path, **data)
    if run.save_path is not None:
        trainer.save_checkpoint(run.save_path)
    return {step: {**numbers, **logger.steps[step]} for step, numbers in recorder.steps.items()}


def merged(run: GoldenRun, ranks: list[Steps]) -> dict[str, dict[str, Any]]:
    """The steps of all ranks, which must agree in all numbers, as JSON has them; with the rows of each model copy."""
    tp, pp = run.strategy.get("tp", 1), run.strategy.get("pp", 1)
    copies = ranks[: len(ranks) // pp : tp]  # the first rank of the first stage of each
    steps: dict[str, dict[str, Any]] = {}
    for step, numbers in ranks[0].items():
        numbers = {name: value for name, value in numbers.items() if "rows" not in name}
        for other in ranks[1:]:
            assert {name: other[step][name] for name in numbers} == numbers, f"ranks differ in step {step}"
        steps[str(step)] = {**numbers, "rows": [" ".join(copy[step]["rows"]) for copy in copies]}
    return steps


def row_hashes(batch: Mapping[str, Any]) -> list[str]:
    """A hash of each row: of all that it holds, by key."""
    rows = [hashlib.sha256() for _ in next(iter(batch.values()))]
    for key in sorted(batch):
        for digest, row in zip(rows, batch[key], strict=True):
            digest.update(key.encode() + plain_bytes(row))
    return [digest.hexdigest()[:8] for digest in rows]


def plain_bytes(tensor: Any) -> bytes:
    """Shape and numbers, whatever the dtype of whole numbers is."""
    tensor = tensor.double() if tensor.is_floating_point() else tensor.long()
    return str(tuple(tensor.shape)).encode() + bytes(tensor.contiguous().numpy().tobytes())


def _below(files: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Data settings with the paths of the files that they name."""

    def path(value: Any) -> Any:
        return [path(each) for each in value] if isinstance(value, list) else _path(files, value)

    return {key: path(value) if key in ("data_path", "tokenizer") else value for key, value in settings.items()}


def _path(files: Path, value: Any) -> Any:
    return str(files / value) if isinstance(value, str) else value


def _shuffled_loader(dp: int) -> Any:
    """What a user would write; each row tells which one it is."""
    import torch
    from torch.utils.data import DataLoader

    index = torch.arange(40)[:, None]
    rows = (index + (1 + index % 7) * torch.arange(SEQ_LENGTH)) % 100
    return DataLoader([{"input_ids": row} for row in rows], batch_size=BATCH // dp, shuffle=True)  # type: ignore[arg-type]


def _recorder() -> Any:
    import lightning.pytorch as pl

    class Recorder(pl.Callback):
        """Keeps the rows and the loss of each step."""

        def __init__(self) -> None:
            self.steps: Steps = {}
            self._rows: list[str] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self._rows = row_hashes(batch)

        def on_validation_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            if trainer.global_step in self.steps:
                self.steps[trainer.global_step].setdefault("valid rows", []).extend(row_hashes(batch))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps[trainer.global_step] = {"rows": self._rows, "loss": float(outputs["loss"])}

    return Recorder()


def _logger() -> Any:
    from lightning.pytorch.loggers.logger import DummyLogger

    class Kept(DummyLogger):
        """Keeps the learning rate and the norm of the gradients of each step."""

        def __init__(self) -> None:
            super().__init__()
            self.steps: Steps = {}

        def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
            if "grad_norm" in metrics and step is not None:
                self.steps[step + 1] = {"lr": float(metrics["lr"]), "grad_norm": float(metrics["grad_norm"])}

    return Kept()
