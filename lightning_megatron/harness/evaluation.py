"""One evaluation: loaded tasks, a model, and the results that lm_eval makes of them."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from lightning.pytorch.utilities.seed import isolate_rng

from lightning_megatron.errors import ConfigError
from lightning_megatron.harness import HarnessOptions
from lightning_megatron.harness.model import MegatronLM, progress_bar
from lightning_megatron.harness.offline import offline
from lightning_megatron.harness.tasks import LoadedTasks, templates_in_sandbox

_UNRELATED = ("name", "alias", "sample_len", "sample_count")
"""Entries of a task's results that are no metrics."""


def evaluate_tasks(
    model: MegatronLM,
    loaded: LoadedTasks,
    options: HarnessOptions,
    *,
    is_main: bool,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Evaluate a model on tasks; every rank must call. Random states are as before.

    Args:
        model: The model.
        loaded: The tasks; may be evaluated again.
        options: As the tasks were loaded with.
        is_main: Whether this rank's results are used; on others standard errors are not resampled.
        log_samples: Whether the results contain each document and what the model said.

    Returns:
        lm_eval's results.

    Raises:
        ConfigError: If a request cannot be computed, or a task cannot be evaluated.
    """
    from lm_eval.evaluator import evaluate

    with _undisturbed(options):
        for task in loaded.tasks.values():
            _configure(task, options)
        try:
            results: dict[str, Any] = evaluate(
                lm=model,
                task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
                limit=options.limit,
                bootstrap_iters=options.bootstrap_iters if is_main else 0,
                log_samples=log_samples,
                system_instruction=options.system_instruction,
                apply_chat_template=options.apply_chat_template,
                fewshot_as_multiturn=options.fewshot_as_multiturn,
            )
        except ConfigError:
            raise
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"tasks {', '.join(loaded.tasks)}: lm_eval cannot evaluate them ({error}); correct their YAML or data"
            ) from error
        return results


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by the names under which they are logged: ``task/metric``, or ``task/metric_filter``; no standard errors.

    Args:
        results: lm_eval's.
    """
    metrics = {}
    scores = {**results["results"], **results.get("groups", {})}
    for task, entries in scores.items():
        for key, value in entries.items():
            metric, _, kind = key.partition(",")
            is_number = isinstance(value, (int, float)) and key not in _UNRELATED
            if not is_number or metric.endswith("_stderr"):
                continue
            if kind not in ("", "none"):
                metric = f"{metric}_{kind}"
            metrics[f"{task}/{metric}"] = float(value)
    return metrics


def _configure(task: Any, options: HarnessOptions) -> None:
    """Set the number of examples, as lm_eval's ``simple_evaluate`` does: a task that wants none keeps that."""
    own = task.get_config("num_fewshot")
    if options.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=options.seed)


@contextlib.contextmanager
def _undisturbed(options: HarnessOptions) -> Iterator[None]:
    """Context manager: no address, no unchecked template, no effect on random states, and nothing on standard output.

    lm_eval resamples standard errors in a pool of processes, which would inherit this process's signal handlers; with
    ``DISABLE_MULTIPROC`` it does so itself.
    """
    import numpy
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(offline())
        stack.enter_context(templates_in_sandbox(options))
        stack.enter_context(isolate_rng())
        stack.enter_context(mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        # lm_eval shows bars of its own while it writes prompts, on every rank.
        stack.enter_context(mock.patch("lm_eval.api.task.tqdm", progress_bar))
        # The seeds of lm_eval's simple_evaluate, for what tasks draw themselves.
        random.seed(0)
        numpy.random.seed(1234)
        torch.manual_seed(1234)
        yield
