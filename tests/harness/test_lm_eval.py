"""``MegatronLM``, ``evaluate`` and ``HarnessEvaluation`` give the results of lm_eval's own ``hf`` model.

They need the extra ``eval``, which `nox -s exhaustive` installs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run_all, run_cli
from tests.harness.task_folders import TASKS, write_model, write_task, write_tasks
from tests.pages import blocks, commands, execute, token_loader
from tests.parity.training import (
    CP2,
    FOUR_RANKS,
    INTERLEAVED,
    MODELS,
    Case,
    Layout,
    loader_of,
    trainer_of,
)
from tests.ranks import run_ranks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.exhaustive

ATOL = 1e-4
Results = tuple[dict[str, float], dict[str, list[Any]]]
"""Metrics, and what the model said to each request, by task."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("harness")
    write_tasks(made)
    write_model(made)
    return made


CHATS: dict[str, Any] = {
    "tasks": ["choice", "continued"],
    "num_fewshot": 2,
    "apply_chat_template": True,
    "fewshot_as_multiturn": True,
    "system_instruction": "Answer.",
}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Results]:
    """Of the ``hf`` model: all tasks, and chats with examples."""
    (results,) = run_ranks(
        _with_hugging_face,
        1,
        folder,
        [{"tasks": TASKS}, CHATS],
    )
    return results  # type: ignore[no-any-return]


def _with_hugging_face(folder: Path, runs: list[dict[str, Any]]) -> list[Results]:
    from lm_eval.models.huggingface import HFLM

    model = HFLM(
        str(folder / "model"),
        device="cpu",
        dtype="float32",
        batch_size=3,
    )
    return [_results(model, folder, run) for run in runs]


def _results(
    model: Any,
    folder: Path,
    run: dict[str, Any],
) -> Results:
    from lightning_megatron.harness import HarnessOptions
    from lightning_megatron.harness.evaluation import evaluate_tasks, metrics_of
    from lightning_megatron.harness.tasks import load_tasks

    options = HarnessOptions(include_path=[folder / "tasks"], bootstrap_iters=10, **run)
    loaded = load_tasks(options)
    results = evaluate_tasks(model, loaded, options, is_main=True, log_samples=True)
    samples = {
        task: [response for document in documents for response in document["resps"]]
        for task, documents in results["samples"].items()
    }
    return metrics_of(results), samples


# ---- the model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [Layout(), FOUR_RANKS, Layout(tp=2, dp=2), INTERLEAVED, CP2],
    ids=str,
)
def test_results_are_those_of_the_hf_model_on_every_rank(
    folder: Path,
    expected: list[Results],
    layout: Layout,
) -> None:
    case = Case(layout=layout)
    runs = [{"tasks": TASKS}, CHATS]
    for results in run_ranks(_with_megatron, layout.world_size, folder, case, runs):
        for found, wanted in zip(results, expected, strict=True):
            _compare(found, wanted)


def _compare(found: Results, wanted: Results) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for task, responses in wanted[1].items():
        assert len(found[1][task]) == len(responses) > 0
        for ours, (theirs,) in zip(found[1][task], responses, strict=True):
            (answer,) = ours
            if isinstance(theirs, str):
                assert answer == theirs
            elif isinstance(theirs, float):
                assert answer == pytest.approx(theirs, abs=ATOL)
            else:
                assert answer[0] == pytest.approx(theirs[0], abs=ATOL)
                assert answer[1] == theirs[1]


def _with_megatron(
    folder: Path,
    case: Case,
    runs: list[dict[str, Any]],
) -> list[Results]:
    from lightning_megatron import MegatronLM, MegatronModule

    module = MegatronModule(model=str(folder / "model"), pretrained=True)
    trainer_of(case).validate(module, loader_of(case), verbose=False)
    model = MegatronLM(module, folder / "model", batch_size=3)
    return [_results(model, folder, run) for run in runs]


def test_experts_spread_over_replicas_give_the_same_results(folder: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(4)
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    fields = {**config.to_dict(), "num_local_experts": 4, "model_type": "mixtral"}
    fields = {name: value for name, value in fields.items() if name != "architectures"}
    (tmp_path / "tasks").symlink_to(folder / "tasks")
    shutil.copytree(folder / "model", tmp_path / "model")
    mixture = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields))
    mixture.save_pretrained(tmp_path / "model")
    runs = [{"tasks": ["letters", "continued"]}]
    (expected,) = run_ranks(_with_hugging_face, 1, tmp_path, runs)
    case = Case(layout=Layout(dp=2, ep=2))
    for (found,) in run_ranks(_with_megatron, 2, tmp_path, case, runs):
        _compare(found, expected[0])


def test_a_checkpoint_without_a_trainer_is_evaluated_by_simple_evaluate(folder: Path) -> None:
    (answers,) = run_ranks(_simple_evaluate, 1, folder)
    assert answers["last"]["acc,none"] == answers["last, cached"]["acc,none"]
    assert answers["last"]["perplexity,none"] == answers["last, cached"]["perplexity,none"]


def _simple_evaluate(folder: Path) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lightning_megatron import MegatronLM, MegatronModule

    model = MegatronLM(MegatronModule(str(folder / "model"), pretrained=True), folder / "model")
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    results = {}
    for name in ("last", "last, cached"):
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=["last"],
            task_manager=manager,
            bootstrap_iters=0,
            use_cache=str(folder / "cache"),
        )
        results[name] = found["results"]["last"]
        # The second run asks the model nothing.
        model.module.log_likelihoods = None
    return results


def test_requests_that_do_not_fit_the_model_are_refused_or_cut(folder: Path) -> None:
    messages, cut, whole = run_ranks(_requests, 1, folder)[0]
    assert "a continuation has" in messages[0]
    assert "max_gen_toks=64: expected fewer than the model's 64 tokens" in messages[1]
    assert "its continuation is empty" in messages[2]
    assert "unknown_option" in messages[3]
    assert "max_length=99 must be at most the model's max_position_embeddings=16" in messages[4]
    assert "expected a GPT with an output layer, got a t5" in messages[5]
    # The beginning of a context is cut; the model reads its last tokens.
    assert cut == pytest.approx(whole, abs=ATOL)


def _requests(folder: Path) -> tuple[list[str], float, float]:
    from types import SimpleNamespace

    from lightning_megatron import ConfigError, MegatronLM, MegatronModule

    model = MegatronLM(MegatronModule(str(folder / "model"), pretrained=True), folder / "model")
    messages = []
    for call, arguments in (
        (model.loglikelihood, ("a", "xyz " * 40)),
        (model.generate_until, ("a", {"max_gen_toks": 64})),
        (model.loglikelihood, ("a", "")),
        (model.generate_until, ("a", {"unknown_option": 1, "max_gen_toks": 4})),
    ):
        with pytest.raises(ConfigError) as raised:
            call([SimpleNamespace(args=arguments)])
        messages.append(str(raised.value))
    for kind, limit in (("gpt2", 99), ("t5", None)):
        other = MegatronModule({**MODELS[kind], "vocab_size": 304})
        with pytest.raises(ConfigError) as raised:
            MegatronLM(other, folder / "model", max_length=limit)
        messages.append(str(raised.value))
    with pytest.warns(UserWarning, match="lose their beginning"):
        ((cut, _),) = model.loglikelihood([SimpleNamespace(args=("q" * 90, "x"))])
    ((whole, _),) = model.loglikelihood([SimpleNamespace(args=("q" * 64, "x"))])
    return messages, cut, whole


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_table_and_the_results(
    folder: Path,
    expected: list[Results],
    tmp_path: Path,
) -> None:
    tasks = ("--tasks", "both,last", "tasks/rolling.yaml", "--include-path", "tasks")
    sizes = ("--pp", 2, "--bootstrap-iters", 10, "--accelerator", "cpu")
    outputs = ("--log-samples", "--output", tmp_path / "results.json")
    words = ("evaluate", "--checkpoint", "model", *tasks, *sizes, *outputs)
    code, out, err = run_cli(folder, *words, ranks=2)
    assert code == 0, err
    found = json.loads((tmp_path / "results.json").read_text())
    metrics, responses = expected[0]
    for task in ("choice", "letters", "last", "rolling"):
        for name, value in metrics.items():
            owner, _, metric = name.partition("/")
            if owner == task:
                assert found["results"][task][f"{metric},none"] == pytest.approx(value, rel=1e-5)
        said = [each for document in found["samples"][task] for each in document["resps"]]
        assert len(said) == len(responses[task])
    assert found["config"]["tasks"] == ["both,last", "tasks/rolling.yaml"]
    assert found["groups"].keys() == {"both"}
    header = next(line for line in out.splitlines() if "Metric" in line)
    assert [cell.strip() for cell in header.split("|")[1:6]] == [
        "Tasks",
        "Version",
        "Filter",
        "n-shot",
        "Metric",
    ]
    assert "both" in out


def test_what_cannot_be_evaluated_is_one_line(folder: Path, tmp_path: Path) -> None:
    data = folder / "documents.jsonl"
    choice = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    plain = f'{choice}doc_to_text: "{{{{question}}}}"\n'
    (tmp_path / "code.py").write_text(
        f"def text(doc):\n    open({str(tmp_path / 'ran')!r}, 'w').close()\n    return 'a'\n"
    )
    write_task(
        tmp_path / "function.yaml", data, f"{choice}doc_to_text: !function code.text\n", task="f"
    )
    write_task(tmp_path / "metric.yaml", data, plain, task="m", metrics="[{metric: ./code}]")
    internals = "{{ ''.__class__.__mro__ }}"
    write_task(tmp_path / "template.yaml", data, f'{choice}doc_to_text: "{internals}"\n', task="t")
    write_task(tmp_path / "remote.yaml", "https://127.0.0.1:9/x.jsonl", plain, task="r")
    write_task(tmp_path / "absent.yaml", "absent.jsonl", plain, task="a")
    write_task(tmp_path / "same.yaml", data, plain, task="same")
    (tmp_path / "code.md").touch()
    common = ["evaluate", "--checkpoint", folder / "model", "--accelerator", "cpu", "--tasks"]
    cases: dict[str, list[Any]] = {
        "task hellaswag: its dataset is not on this disk": ["hellaswag"],
        "task nosuch: expected a task": ["nosuch"],
        "function.yaml names code, !function code.text; read it": [tmp_path / "function.yaml"],
        "metric ./code is none of lm_eval's": [tmp_path / "metric.yaml"],
        "template.yaml cannot be loaded (SecurityError": [tmp_path / "template.yaml"],
        "dataset_kwargs: expected data on this disk, got https": [tmp_path / "remote.yaml"],
        "absent.yaml: its dataset is not on this disk": [tmp_path / "absent.yaml"],
        "missing.yaml cannot be read: No such file": [tmp_path / "missing.yaml"],
        "task humaneval runs code": ["humaneval"],
        "include-path": ["same", "--include-path", tmp_path / "code.py"],
        "expected it once, got it twice": [tmp_path / "same.yaml", tmp_path / "same.yaml"],
        "--log-samples: expected JSON": [tmp_path / "same.yaml", "--log-samples"],
        "code.md exists": [tmp_path / "same.yaml", "--output", tmp_path / "code.md"],
        "expected a name that ends with .json": [tmp_path / "same.yaml", "--output", "x.txt"],
    }
    results = run_ranks(_refused, 1, tmp_path, [[*common, *more] for more in cases.values()])[0]
    for message, (code, out, err) in zip(cases, results, strict=True):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out, len(lines)) == (2, "", 1), (message, err)
        if message != "task humaneval runs code":  # its dataset is not on this disk either
            assert message in lines[0]
    assert not (tmp_path / "ran").exists()
    # The user may trust it.
    function = tmp_path / "function.yaml"
    ((code, _, err),) = run_all(tmp_path, [[*common, function, "--trust-task-code", "--limit", 1]])
    assert code == 0, err
    assert (tmp_path / "ran").exists()


def _refused(folder: Path, commands: list[list[Any]]) -> list[tuple[int, str, str]]:
    """Run the commands; none of them may connect to an address."""
    import socket
    from unittest import mock

    from tests.cli.command import run_here

    plain = socket.socket.connect

    def connect(self: Any, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1")
        plain(self, address)

    with mock.patch.object(socket.socket, "connect", connect):
        return run_here(str(folder), [[str(word) for word in command] for command in commands])


def test_the_benchmark_compares_with_the_hf_model() -> None:
    # A tokenizer of whole words, whose stop strings transformers cannot find.
    size = ("--hidden-size", "32", "--layers", "1", "--vocab-size", "1000")
    run_ranks(_benchmark, 1, ["--documents", "2", "--repetitions", "1", *size])


def _benchmark(arguments: list[str]) -> None:
    import io
    from contextlib import redirect_stdout

    from benchmarks.harness import main

    out = io.StringIO()
    with redirect_stdout(out):
        main(arguments)
    lines = out.getvalue().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "choices",
        "letters",
        "texts",
        "generated",
    ]
    for line in lines:
        assert float(line.rpartition(" ")[2]) < 1e-2, line


# ---- the page -------------------------------------------------------------------------------------------------------

PAGE = "docs/lm_eval.md"


def test_the_page_evaluates(tmp_path: Path) -> None:
    write_model(tmp_path).rename(tmp_path / "gpt2")
    rows = [
        {"question": "is it", "choices": ["yes", "no"], "gold": index % 2} for index in range(4)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (task,) = blocks(PAGE, "yaml")
    (tmp_path / "questions.yaml").write_text(task)
    for words, ranks in zip(commands(PAGE), (1, 2), strict=True):
        code, out, err = run_cli(
            tmp_path,
            *words[1:],
            "--accelerator",
            "cpu",
            ranks=ranks,
        )
        assert code == 0, err
        assert "questions" in out
    assert json.loads((tmp_path / "results.json").read_text())["n-samples"]["questions"]
    smaller = {
        "every_n_steps=1000": "every_n_steps=1",
        "max_steps=3000,": "max_steps=1, logger=False, enable_progress_bar=False,"
        " enable_checkpointing=False,",
    }
    run_ranks(_run_block, 4, tmp_path, 0, smaller)
    run_ranks(_run_block, 1, tmp_path, 1, {})


def _run_block(
    folder: Path,
    number: int,
    changes: dict[str, str],
) -> None:
    variables = execute(
        PAGE,
        number,
        str(folder),
        changes,
        loader=token_loader(),
    )
    if number == 0:
        assert 0 <= variables["trainer"].callback_metrics["questions/acc"] <= 1
    else:
        assert 0 <= variables["results"]["results"]["questions"]["acc,none"] <= 1


# ---- the callback ---------------------------------------------------------------------------------------------------


def test_the_callback_evaluates_the_current_weights_and_leaves_training_alone(
    folder: Path,
    tmp_path: Path,
) -> None:
    layout = Layout(tp=2, dp=2, num_microbatches=2)
    (with_it, logged, final), *_ = run_ranks(
        _train,
        4,
        folder,
        tmp_path,
        layout,
        True,
    )
    (without, _, _), *_ = run_ranks(
        _train,
        4,
        folder,
        tmp_path,
        layout,
        False,
    )
    assert with_it == without
    assert [step for step, _ in logged] == [2, 4]
    assert logged[-1][1] == pytest.approx(final, rel=1e-6)
    assert logged[0][1] != logged[1][1]
    assert logged[0][1].keys() == {"last/acc", "last/perplexity"}


def _train(
    folder: Path,
    work: Path,
    layout: Layout,
    evaluates: bool,
) -> tuple[list[float], list[tuple[int, dict[str, float]]], dict[str, float]]:
    import random

    import torch
    from lightning.pytorch import seed_everything
    from lightning.pytorch.loggers import Logger

    from lightning_megatron import HarnessEvaluation, MegatronLM, MegatronModule

    logged: list[tuple[int, dict[str, float]]] = []

    class Recorder(Logger):
        """Keeps what callbacks and the module log."""

        name = "recorder"
        version = 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "last/acc" in metrics:
                logged.append((step, metrics))

        def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None: ...

    seed_everything(1)
    case = Case(layout=layout, steps=4)
    module = MegatronModule(
        model=str(folder / "model"),
        pretrained=True,
        lr=1e-2,
    )
    callbacks: list[Any] = []
    run = {"tasks": ["last"], "include_path": [folder / "tasks"], "bootstrap_iters": 0}
    if evaluates:
        callbacks.append(HarnessEvaluation(folder / "model", run, every_n_steps=2))
    trainer = trainer_of(case, callbacks=callbacks, logger=Recorder())
    trainer.fit(module, loader_of(case))
    numbers = [random.random(), float(torch.rand(()))]
    loss = float(trainer.callback_metrics["train_loss"])
    norm = float(trainer.callback_metrics["grad_norm"])
    final: dict[str, float] = {}
    if evaluates:
        assert trainer.callback_metrics.keys() >= {"last/acc", "last/perplexity"}
        model = MegatronLM(module, folder / "model")
        final, _ = _results(model, folder, {"tasks": ["last"]})
    return [*numbers, loss, norm], logged, final


def test_the_callback_refuses_a_missing_task_before_training(folder: Path) -> None:
    (message,) = run_ranks(_fit_without_task, 1, folder)
    assert "task nosuch: expected a task" in message


def _fit_without_task(folder: Path) -> str:
    from lightning_megatron import ConfigError, HarnessEvaluation, MegatronModule

    case = Case()
    module = MegatronModule(model=str(folder / "model"))
    callback = HarnessEvaluation(folder / "model", {"tasks": ["nosuch"]}, every_n_steps=1)
    trainer = trainer_of(case, callbacks=[callback])
    with pytest.raises(ConfigError) as raised:
        trainer.fit(module, loader_of(case))
    assert trainer.global_step == 0
    return str(raised.value)
