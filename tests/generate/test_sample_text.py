"""``SampleText`` logs completions of the model at the current step."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models import VOCAB_SIZE
from tests.parity.training import FOUR_RANKS, Case, loader_of, module_of, trainer_of
from tests.ranks import run_ranks
from tests.tokenizers import save_word_tokenizer

PROMPTS = ["w3 w5 w7", "w11"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    save_word_tokenizer(folder, VOCAB_SIZE)
    return folder


def test_samples_are_those_of_the_current_model(tokenizer: Path, tmp_path: Path) -> None:
    layout = FOUR_RANKS
    (final, logged), *others = run_ranks(
        _train, layout.world_size, Case(layout=layout, steps=4), tokenizer, tmp_path
    )
    lines = [
        json.loads(line) for line in (tmp_path / "csv" / "samples.jsonl").read_text().splitlines()
    ]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, p) for step in (2, 4) for p in PROMPTS
    ]
    # After training, generation gives the samples of the last step.
    words = [" ".join(f"w{token}" for token in row) for row in final]
    assert [line["prompt"] + line["text"] for line in lines[2:]] == words
    assert lines[:2] != lines[2:]
    assert [(tag, step) for tag, _, step in logged] == [
        (f"samples/{i}", step) for step in (2, 4) for i in (0, 1)
    ]
    assert all(f"    {lines[3][part]}\n" in logged[3][1] for part in ("prompt", "text"))
    assert all(logged_by_other == [] for _, logged_by_other in others)


def _train(
    case: Case,
    tokenizer: Path,
    folder: Path,
) -> tuple[Any, list[Any]]:
    import torch
    from lightning.pytorch.loggers import CSVLogger, Logger

    from lightning_megatron import GenerationOptions, SampleText

    logged: list[tuple[str, str, int]] = []

    class TextLogger(Logger):
        """Like TensorBoard's logger; only rank 0 writes."""

        name = "text"
        version = 0
        experiment = SimpleNamespace(add_text=lambda *arguments: logged.append(arguments))

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def log_hyperparams(
            self,
            params: Any,
            *_: Any,
            **__: Any,
        ) -> None: ...

    module = module_of(case)
    options = GenerationOptions(max_new_tokens=6, eos_token_id=())
    sample = SampleText(tokenizer, PROMPTS, every_n_steps=2, generation=options)
    loggers = [TextLogger(), CSVLogger(folder, name="", version="csv")]
    trainer_of(
        case,
        callbacks=[sample],
        logger=loggers,
    ).fit(module, loader_of(case))
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    rows = module.generate(
        torch.tensor([[3, 5, 7], [0, 0, 11]]),
        mask,
        max_new_tokens=6,
        eos_token_id=(),
    )
    return [rows[0].tolist(), rows[1, 2:].tolist()], logged


@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_samples_are_printed_without_logger_and_not_timed(tokenizer: Path, model: str) -> None:
    out, metrics = run_ranks(
        _train_without_logger,
        1,
        Case(steps=2, model=model),
        tokenizer,
    )[0]
    samples = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(" -> ")[0] for line in samples] == ["step 1: 'w11'", "step 2: 'w11'"]
    # The module's own options.
    assert all(line.split(" -> ")[1].count("w") == 3 for line in samples)
    # Steps with samples are excluded from throughput.
    assert "train_loss" in metrics
    assert "tokens_per_s" not in metrics


def _train_without_logger(case: Case, tokenizer: Path) -> tuple[str, dict[str, Any]]:
    import contextlib
    import io

    from transformers import AutoTokenizer

    from lightning_megatron import ConfigError, GenerationOptions, SampleText, ThroughputMonitor

    module = module_of(case, generation=GenerationOptions(max_new_tokens=3))
    out = io.StringIO()
    loaded = AutoTokenizer.from_pretrained(tokenizer)  # a tokenizer is accepted like its directory
    if case.model != "t5":
        trainer = trainer_of(
            case,
            callbacks=[SampleText(loaded, ["w1", " ".join(["w1"] * 17)])],
        )
        with pytest.raises(
            ConfigError, match="need more positions than the model's max_position_embeddings=16"
        ):
            trainer.fit(module_of(case), loader_of(case))
        assert trainer.global_step == 0
    with contextlib.redirect_stdout(out):
        callbacks = [
            SampleText(loaded, PROMPTS[1:], every_n_steps=1),
            ThroughputMonitor(1, warmup_steps=1),
        ]
        trainer = trainer_of(case, callbacks=callbacks)
        trainer.fit(module, loader_of(case))
    return out.getvalue(), dict(trainer.callback_metrics)
