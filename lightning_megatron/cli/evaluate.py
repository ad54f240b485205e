"""The command ``evaluate``: tasks of EleutherAI's lm_eval with the model of any checkpoint, at any layout.

Slow imports are inside the functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_megatron.cli.doctor import check_accelerator
from lightning_megatron.cli.stored_model import (
    fill_from,
    tokenizer_for,
    trainer_for,
    with_special_tokens,
)
from lightning_megatron.errors import MOST_PROCESSES, ConfigError, require_number
from lightning_megatron.harness import HarnessOptions, require_lm_eval
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import open_new

if TYPE_CHECKING:
    import torch

    from lightning_megatron.convert.source import ModelSource
    from lightning_megatron.harness.tasks import LoadedTasks

_SUFFIXES = (".json", ".md")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of the command in addition to ``HarnessOptions``."""

    load_path: Path = field(metadata={"flag": "--checkpoint"})
    """Checkpoint to read, or the name of a model on the Hugging Face hub, org/name."""
    tokenizer: Path | None = None
    """A transformers tokenizer (default: that of the checkpoint)."""
    config: Path | None = None
    """A Hugging Face config.json, for checkpoints without a model config."""
    iteration: int | None = None
    """Iteration to read from a directory of several (default: the last one saved)."""
    base: Path | None = None
    """Base model of adapters, or its name on the hub (default: the one that they name, if it is on this host)."""
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel size."""
    dp: int = 1
    """Data-parallel replicas, which share the requests."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on."""
    precision: Literal["32-true", "bf16-true", "bf16-mixed", "16-mixed"] | None = None
    """32-true computes in float32, the others in 16 bits (default: dtype of the weights on GPUs, else 32-true)."""
    batch_size: int = 8
    """Rows in a forward pass of a replica."""
    max_length: int | None = None
    """Tokens that the model reads at most (default: its max_position_embeddings)."""
    log_samples: bool = False
    """Add each document and what the model said to the JSON."""
    json: bool = False
    """Print JSON instead of a table."""
    output: Path | None = None
    """File to write as well: .json for the JSON, .md for the table."""


def evaluate(options: EvaluateOptions, harness: HarnessOptions) -> None:
    """Evaluate the model of any checkpoint on tasks of EleutherAI's lm_eval.

    Runs in tp x pp x dp processes, each of which reads its own shard, on a GPT in any format that generate reads. Works
    offline: datasets come from local files or the cache of Hugging Face's datasets, and no address is opened for a
    task. Python code that task YAMLs of yours name runs only with --trust-task-code. Prints lm_eval's table. Needs the
    extra lightning-megatron[eval].

    Example:
        lightning-megatron evaluate --checkpoint last.ckpt --tokenizer gpt2 --tasks lambada_openai --tp 2
        lightning-megatron evaluate --checkpoint path/to/llama --tasks my_task.yaml --output results.json

    Raises:
        ConfigError: If an argument is wrong, a task is not on this disk, or the model cannot be evaluated on it.
        CheckpointError: If the checkpoint cannot be read, or the output not written.
    """
    _check(options)
    require_lm_eval()

    from lightning_megatron.convert.formats import open_source

    stored = open_source(options.load_path, options.config, options.iteration, options.base)
    if stored.model.architecture != "gpt" or not stored.model.has_output_layer:
        raise ConfigError(
            f"{stored.path} is a {stored.model.family} for task={stored.model.task!r}, evaluate needs a GPT with an "
            "output layer"
        )
    tokenizer = tokenizer_for(stored, options.tokenizer)

    from lightning_megatron.harness.tasks import load_tasks

    loaded = load_tasks(harness)
    _evaluate(options, harness, stored, tokenizer, loaded)


def _check(options: EvaluateOptions) -> None:
    """Check arguments before anything slow is imported.

    Raises:
        ConfigError: If a number is out of range, or the output cannot be written.
    """
    for name in ("batch_size", "tp", "pp", "ep", "dp"):
        require_number(name, getattr(options, name), at_least=1, at_most=MOST_PROCESSES)
    require_number("tp x pp x dp", options.tp * options.pp * options.dp, at_most=MOST_PROCESSES)
    if options.max_length is not None:
        require_number("max_length", options.max_length, at_least=1)
    output = options.output
    writes_json = options.json or (output is not None and output.suffix == ".json")
    if options.log_samples and not writes_json:
        raise ConfigError(
            "--log-samples: expected JSON to add them to; give --json or --output FILE.json"
        )
    if output is None:
        return
    if output.suffix not in _SUFFIXES:
        raise ConfigError(
            f"--output {output}: expected a name that ends with .json or .md; rename it"
        )
    if output.exists():
        raise ConfigError(f"--output {output} exists; give another file")
    with failures_as_errors(f"--output {output} cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)


def _evaluate(
    options: EvaluateOptions,
    harness: HarnessOptions,
    stored: ModelSource,
    tokenizer: Any,
    loaded: LoadedTasks,
) -> None:
    """Evaluate in all processes of the layout; rank 0 writes the results."""
    from torch.utils.data import DataLoader

    from lightning_megatron.generate.options import GenerationOptions
    from lightning_megatron.harness.evaluation import evaluate_tasks
    from lightning_megatron.harness.model import MegatronLM
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.strategy import MegatronStrategy

    class EvaluatedModule(MegatronModule):
        def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
            fill_from(stored, chunks)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            is_main = self.trainer.is_global_zero
            model = MegatronLM(
                self,
                tokenizer,
                batch_size=options.batch_size,
                max_length=options.max_length,
            )
            results = evaluate_tasks(
                model,
                loaded,
                harness,
                is_main=is_main,
                log_samples=options.log_samples,
            )
            if is_main:
                _write(results, options, harness)

    check_accelerator(options.accelerator)
    generation = with_special_tokens(GenerationOptions(), stored, tokenizer)
    module = EvaluatedModule(model=stored.hf_config, generation=generation)
    # It may be a variant that a Hugging Face config cannot describe.
    module.model_config = stored.model
    trainer = trainer_for(
        stored,
        MegatronStrategy(tp=options.tp, pp=options.pp, ep=options.ep),
        accelerator=options.accelerator,
        devices=options.tp * options.pp * options.dp,
        precision=options.precision,
    )
    import torch

    # One batch for each replica: the evaluation runs in the place of its loss. Trainer.predict is for replicas that
    # compute different rows, which those that share experts cannot.
    row = {"input_ids": torch.zeros(1, dtype=torch.long)}
    loader: Any = DataLoader([row] * options.dp, batch_size=1)  # type: ignore[arg-type]
    trainer.validate(module, loader, verbose=False)


def _write(
    results: Mapping[str, Any],
    options: EvaluateOptions,
    harness: HarnessOptions,
) -> None:
    table = _table(results)
    text = _json(results, options, harness)
    printed = text if options.json else table
    sys.stdout.write(f"{printed}\n")
    if options.output is None:
        return
    written = text if options.output.suffix == ".json" else table
    refusal = f"--output {options.output} cannot be written"
    with failures_as_errors(refusal), open_new(options.output) as file:
        file.write(f"{written}\n")


def _table(results: Mapping[str, Any]) -> str:
    """lm_eval's tables of tasks and groups, in Markdown."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(str(table).strip() + "\n" for table in tables).rstrip("\n")


def _json(
    results: Mapping[str, Any],
    options: EvaluateOptions,
    harness: HarnessOptions,
) -> str:
    """lm_eval's results, with the options of the command as ``config``."""
    from lm_eval.utils import handle_non_serializable

    given = {**vars(options), **vars(harness)}
    return json.dumps(
        {**results, "config": given},
        indent=2,
        default=handle_non_serializable,
        ensure_ascii=False,
    )
