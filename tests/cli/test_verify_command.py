"""``verify``: cards of each kind of model beside transformers, and of models that differ."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.cli import main
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.convert.registry import model_config
from lightning_megatron.convert.shards import shards_of
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.host import HostMemory
from lightning_megatron.verify import VerifyOptions, run
from lightning_megatron.verify.batch import make_batch
from lightning_megatron.verify.card import Card
from lightning_megatron.verify.comparison import FP32_LIMIT, Outcome, Reference
from lightning_megatron.verify.job import Job, Result
from lightning_megatron.verify.layouts import parse_layout
from lightning_megatron.verify.memory import Need, check_memory
from lightning_megatron.verify.processes import ProcessError, last_error
from lightning_megatron.verify.source import difference_of_bits
from tests.cli.command import run_all, run_cli
from tests.families.t5_models import t5
from tests.families.test_experts import mixture
from tests.families.test_gpts import gpt_model
from tests.families.test_heads import classifier
from tests.families.test_megatron_bert import bert_model
from tests.marks import exhaustive
from tests.ranks import RankError, run_ranks

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": partial(gpt_model, "gpt2", {}),
    "llama": partial(gpt_model, "llama", {}),
    "gpt_neox": partial(gpt_model, "gpt_neox", {}),
    "apertus": partial(gpt_model, "apertus", {}),
    "deepseek_v3": partial(mixture, "deepseek_v3"),
    "dots1": partial(mixture, "dots1"),
    "ernie4_5_moe": partial(mixture, "ernie4_5_moe"),
    "mixtral": partial(mixture, "mixtral"),
    "qwen3_moe": partial(mixture, "qwen3_moe"),
    "t5": t5,
    "bert": partial(bert_model, "PreTraining"),
    "answers": partial(bert_model, "QuestionAnswering"),
    "classes": partial(bert_model, "SequenceClassification", 3),
    "value": partial(bert_model, "SequenceClassification", 1),
    "tokens": partial(bert_model, "TokenClassification", 5),
    "pooled": partial(classifier, "llama", "ForSequenceClassification"),
    "gpt2 tokens": partial(classifier, "gpt2", "ForTokenClassification"),
}


WITHOUT_TEXTS = {"bert", "answers", "classes", "value", "tokens", "pooled", "gpt2 tokens"}
"""Those that generate nothing."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of ``MODELS``."""
    folder = tmp_path_factory.mktemp("verify")
    for name, make in MODELS.items():
        # Experts of the last one are in one tensor.
        is_original = name != "ernie4_5_moe"
        make().save_pretrained(folder / name, save_original_format=is_original)
    return folder


def _start(rank: Callable[[str], None]) -> Callable[[Path, int], None]:
    """Start the ranks of a job from the tests' fork server, which has imported everything."""

    def start(folder: Path, num_ranks: int) -> None:
        try:
            run_ranks(rank, num_ranks, str(folder))
        except RankError as error:
            raise ProcessError(str(error).splitlines()[0]) from error

    return start


def _verify(
    directory: Path,
    *layouts: str,
    rank: Callable[[str], None] | None = None,
    **options: Any,
) -> Card:
    chosen = VerifyOptions(
        directory,
        layouts=layouts,
        seq_length=16,
        steps=1,
        accelerator="cpu",
        **options,
    )
    return run.verify(chosen, _start(rank or _compute))


def _compute(folder: str) -> None:
    """A process of a job, on this rank."""
    from lightning_megatron.verify.ranks import run_layout
    from lightning_megatron.verify.reference import run_reference

    if Job.read(Path(folder)).layout is None:
        run_reference(Path(folder))
    else:
        run_layout(Path(folder))


EVERY = ("1", "tp2", "tp2,pp2")


@pytest.mark.parametrize(
    ("name", "layouts", "dtype"),
    [
        ("llama", ("1", "tp2,pp2"), "fp32"),
        ("t5", ("pp2",), "fp32"),
        ("answers", ("tp2",), "fp32"),
        ("pooled", ("tp2",), "fp32"),
        ("gpt2", ("1",), "bf16"),
        # transformers saves weights under other names than it computes with, and biases that have no gradient.
        ("gpt_neox", ("1",), "fp32"),
        ("dots1", ("1",), "fp32"),
        ("ernie4_5_moe", ("ep2",), "fp32"),
        *(exhaustive(name, EVERY, "fp32") for name in MODELS if name not in ("mixtral", "dots1")),
        exhaustive("mixtral", ("1", "ep2", "ep2,tp2"), "fp32"),
        exhaustive("llama", ("cp2", "dp2", "pp2,vpp2"), "fp32"),
        *(exhaustive(name, ("1", "tp2"), "bf16") for name in ("llama", "t5", "bert")),
    ],
    ids=str,
)
def test_layouts_equal_transformers(
    models: Path, name: str, layouts: tuple[str, ...], dtype: Any
) -> None:
    card = _verify(models / name, *layouts, dtype=dtype)
    assert card.verdict == "equal", card.to_markdown()
    compared = {"round trip", "logits", "loss", "gradients"}
    if name not in WITHOUT_TEXTS:
        compared.add("tokens")
    for layout in card.layouts:
        assert layout.outcomes.keys() == compared
        assert layout.tokens_per_s
        assert layout.outcomes["gradients"].error != 0
    assert card.reference_tokens_per_s


# ---- models that differ ---------------------------------------------------------------------------------------------


def _altered(folder: str) -> None:
    """Like ``_compute``, on ranks whose loader changes one weight."""
    fill = WeightLoader.fill

    def fill_and_alter(self: WeightLoader) -> None:
        fill(self)
        for shard in shards_of(self._chunks, self._model):
            if shard.region.key == ("decoder.layers.mlp.linear_fc2.weight", 2, None):
                shard.data[1, 3] += 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightLoader, "fill", fill_and_alter)
        _compute(folder)


def _permuted(folder: str) -> None:
    """Like ``_compute``, with heads of queries in another order in both directions, so that only numbers show it."""
    from lightning_megatron.convert import decoder_rules
    from lightning_megatron.convert.rules import qkv_order

    def other_order(heads: int, groups: int, channels: int, *, has_gates: bool) -> torch.Tensor:
        order = qkv_order(heads, groups, channels, has_gates=has_gates).clone()
        order[: 2 * channels] = order[: 2 * channels].roll(channels)
        return order

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_rules, "qkv_order", other_order)
        _compute(folder)


def test_an_altered_weight_is_named_and_the_command_fails(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = run.verify
    monkeypatch.setattr(run, "verify", lambda options: original(options, _start(_altered)))
    words = ["verify", str(models / "llama"), "--layouts", "tp2", "--seq-length", "16"]
    words += ["--steps", "1", "--accelerator", "cpu", "--output", str(tmp_path / "card")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    page, progress = capsys.readouterr()
    assert page == f"{(tmp_path / 'card/verify.md').read_text()}"
    assert page.startswith("# LlamaForCausalLM: different\n")
    weight = "`model.layers.2.mlp.down_proj.weight`"
    # Ranks of tp hold columns: both have an element [1, 3] of their own.
    assert f"- tp2, round trip: {weight} differs in 2 of 1,536 elements, first at [1, 3]: " in page
    assert re.search(r"- tp2, logits \(.*, limit 2.0e-05\): largest at row \d, position \d+", page)
    assert re.search(r"- tp2, gradients \(.*\): `model.* most at \[\d+(, \d+)?\]: ", page)
    assert "memory, one after another: transformers " in progress
    assert progress.index("GiB free") < progress.index("transformers\n") < progress.index("tp2 (1")
    data = json.loads((tmp_path / "card/verify.json").read_text())
    assert (data["verdict"], data["layouts"][0]["layout"]) == ("different", "tp2")
    compared = data["layouts"][0]["compared"]
    assert compared["logits"]["error"] > compared["logits"]["limit"] == pytest.approx(FP32_LIMIT)
    assert data["settings"]["seq_length"] == 16


def test_a_wrong_permutation_that_round_trips_is_found_in_the_numbers(models: Path) -> None:
    card = _verify(
        models / "llama",
        "1",
        rank=_permuted,
        checks=("round-trip", "logits"),
    )
    (layout,) = card.layouts
    assert layout.outcomes["round trip"].equal
    assert not layout.outcomes["logits"].equal
    assert not layout.outcomes["loss"].equal
    assert (card.verdict, layout.tokens_per_s) == ("different", None)


def _failing(folder: str) -> None:
    if Job.read(Path(folder)).layout == "tp2":
        raise RuntimeError("no connection")
    _compute(folder)


def test_a_layout_that_fails_is_named_and_others_go_on(models: Path) -> None:
    checks = ("round-trip",)
    card = _verify(models / "gpt2", "tp2", "1", rank=_failing, checks=checks)
    assert [layout.verdict for layout in card.layouts] == ["failed", "equal"]
    assert card.verdict == "failed"
    assert "- tp2 failed: _failing failed on rank" in card.to_markdown()
    assert "transformers |" not in card.to_markdown()  # not needed for a round trip


def test_processes_are_started_and_other_heads_are_left_out(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "bert", tmp_path / "bert")
    config = json.loads((tmp_path / "bert/config.json").read_text())
    config["architectures"] = ["MegatronBertForMaskedLM"]
    (tmp_path / "bert/config.json").write_text(json.dumps(config))
    code, out, err = run_cli(
        tmp_path, "verify", "bert", "--checks", "round-trip", "--accelerator", "cpu", "--json"
    )
    assert code == 0, err
    card = json.loads(out)
    assert card["layouts"][0]["compared"]["round trip"]["shown"] == "74 of 74"
    assert card["left_out"] == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    ]
    assert "  loads the weights\n  round trip\n" in err


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = (
    ("nothing", "MODEL_DIR nothing: expected a Hugging Face model directory, got no such path"),
    ("llama/config.json", "got a file; give its directory"),
    ("empty", "expected a Hugging Face model directory with weights, got config.json; give one"),
    ("llama --layouts tp2+pp2", "--layouts tp2+pp2: expected 1, or sizes of tp, pp, vpp, cp, ep"),
    ("llama --layouts tp2,tp2", "got 'tp2'"),
    ("llama --layouts tp3", "--layouts tp3: tp=3 does not divide num_attention_heads=4"),
    ("llama --layouts pp3", "--layouts pp3: pp=3 does not divide num_layers=4"),
    ("llama --layouts tp2 --seq-length 15", "15: expected a multiple of 2, because tp=2 splits it"),
    ("llama --layouts dp3", "dp x pp=3 does not divide --batch-size 4"),
    ("llama --layouts dp9999", "expected at most 1024 processes, got 9999"),
    ("llama --layouts ep2", "expected a model with experts, got llama"),
    ("gpt2 --seq-length 1000", "--seq-length 1000 is longer than max_position_embeddings=24"),
    ("bert --checks generation", "expected a GPT or T5, got a megatron-bert"),
    ("pooled --checks generation", "expected a GPT or T5, got a llama for task='sequence_cl"),
    ("llama --batch-size 90000000", "memory: expected this host to have about "),
    ("llama --output llama/config.json", "is a file; give a directory"),
)


def test_wrong_arguments_are_one_line(models: Path) -> None:
    (models / "empty").mkdir(exist_ok=True)
    shutil.copy(models / "gpt2/config.json", models / "empty")
    results = run_all(models, [["verify", *words.split()] for words, _ in REFUSED])
    for (words, message), (code, out, err) in zip(REFUSED, results, strict=True):
        last = err.strip().splitlines()[-1]
        assert (code, out) == (2, ""), words
        assert last.startswith("error: "), (words, err)
        assert message in last, words


def test_a_launcher_of_the_user_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["verify", str(models / "llama")]) == 2


def test_memory_beyond_the_host_is_refused_and_scarce_memory_warned_of() -> None:
    with pytest.raises(ConfigError, match=r"about 1,048,576\.0 GiB for tp2"):
        check_memory([Need(what="1", num_bytes=1), Need(what="tp2", num_bytes=2.0**50)], "cpu")
    line = check_memory([Need(what="1", num_bytes=2.0**30)], "cpu")
    assert line.startswith("memory, one after another: 1 1.0 GiB; this host has ")
    assert "Warning" not in line


def test_memory_that_is_not_free_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    there = HostMemory(total=10, free=5)
    monkeypatch.setattr("lightning_megatron.verify.memory.host_memory", lambda: there)
    assert "Warning: that may be too little" in check_memory([Need(what="1", num_bytes=6)], "cpu")


# ---- comparison -----------------------------------------------------------------------------------------------------


def _job(**changes: Any) -> Job:
    job = Job(
        directory="",
        layout=None,
        accelerator="cpu",
        dtype="fp32",
        checks=("logits", "gradients", "generation"),
        batch_size=2,
        seq_length=8,
        steps=1,
        seed=1,
        pad_token_id=None,
        samples=4,
    )
    return replace(job, **changes)


def _result(
    logit: float = 0.0,
    gradient: float = 0.0,
    token: int = 3,
    loss: float = 2.0,
) -> Result:
    """Results of a model with 5 tokens, in one of which each quantity is off by the arguments."""
    logits = torch.linspace(-2, 2, 80).reshape(2, 8, 5)
    logits[1, 2, 4] += logit
    token_logits = torch.tensor([[[0.0, 0.0, 1.0, 1.0 + 1e-6, 0.0]] * 2] * 2)
    weights = torch.arange(1.0, 5.0)
    weights[2] += gradient
    return Result(
        logits=logits,
        loss=loss,
        gradients={"weight": weights, "other": torch.ones(1)},
        shapes={"weight": (2, 2), "other": (1,)},
        tokens=torch.tensor([[1, 3, 3], [1, token, 3]]),
        token_logits=token_logits,
    )


def _compare(result: Result, rounded: Result | None = None) -> dict[str, Outcome]:
    model = model_config(
        {"model_type": "gpt2", "vocab_size": 5, "n_layer": 1, "n_embd": 8, "n_head": 1}
    )
    job = _job()
    batch = make_batch(job, model)
    batch["attention_mask"][:] = 1
    reference = Reference(
        exact=_result(),
        rounded=rounded,
        batch=batch,
        model=model,
    )
    return reference.compare(result, job.checks)


def test_differences_are_measured_and_located() -> None:
    assert all(outcome.equal for outcome in _compare(_result()).values())
    found = _compare(
        _result(
            logit=0.5,
            gradient=0.25,
            token=1,
            loss=2.5,
        )
    )
    assert not any(outcome.equal for outcome in found.values())
    rms = float(_result().logits.square().mean().sqrt())  # type: ignore[union-attr]
    assert found["logits"].error == pytest.approx(0.5 / rms)
    assert found["logits"].differences[0].startswith("largest at row 1, position 2, column 4: ")
    assert found["loss"].differences == ("2.5 instead of 2",)
    total = float(torch.tensor([1.0, 2, 3, 4, 1]).norm())
    assert found["gradients"].error == pytest.approx(0.25 / (30**0.5 + total / 20))
    assert "most at [1, 0]: 3.25 instead of 3" in found["gradients"].differences[0]
    assert "prompt 1, new token 0: 1 instead of 3" in found["tokens"].differences[0]


def test_tokens_whose_logits_are_closer_than_rounding_are_a_tie() -> None:
    tokens = _compare(_result(token=2))["tokens"]
    assert (tokens.equal, tokens.shown) == (True, "2 of 4, 1 tie")


def test_limits_in_bf16_are_three_times_the_error_of_transformers() -> None:
    rounded = _result(logit=0.1, gradient=0.1, loss=2.01)
    within = _compare(
        _result(
            logit=-0.29,
            gradient=-0.29,
            loss=1.98,
        ),
        rounded,
    )
    assert all(outcome.equal for outcome in within.values())
    beyond = _compare(
        _result(
            logit=-0.31,
            gradient=-0.31,
            loss=1.9,
        ),
        rounded,
    )
    assert [name for name, outcome in beyond.items() if outcome.equal] == ["tokens"]


def test_numbers_that_are_not_finite_differ() -> None:
    nan = float("nan")
    found = _compare(_result(logit=nan, gradient=nan, loss=nan))
    assert [name for name, outcome in found.items() if outcome.equal] == ["tokens"]


def test_weights_with_a_gradient_on_one_side_only_are_named() -> None:
    result = _result()
    result.gradients["more"] = torch.ones(1)
    outcome = _compare(result)["gradients"]
    assert outcome.differences == ("1 weights have a gradient on one side only: `more`",)


@pytest.mark.parametrize(
    ("exported", "stored", "difference"),
    [
        (torch.tensor([1.0, -0.0]), torch.tensor([1.0, -0.0]), ""),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), ""),
        (
            torch.tensor([1.0, 0.0]),
            torch.tensor([1.0, -0.0]),
            "differs in 1 of 2 elements, first at [1]",
        ),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), "has the shape [1, 1] instead of [1]"),
        (torch.tensor([0.5]), torch.tensor([0.5]).half(), ""),
        (torch.tensor([0.1]), torch.tensor([0.1]).half(), "has values that float16 does not hold"),
        (torch.tensor([0.1]).bfloat16(), torch.tensor([0.1]), ""),
        (torch.tensor([0.2]).bfloat16(), torch.tensor([0.1]), "differs in 1 of 1 elements"),
    ],
)
def test_bits_are_compared_in_the_smaller_dtype(
    exported: torch.Tensor, stored: torch.Tensor, difference: str
) -> None:
    found = difference_of_bits(exported, stored)
    assert found.startswith(difference)
    assert bool(found) == bool(difference)


def test_layouts_have_as_many_ranks_as_their_sizes_need() -> None:
    sizes = {"1": 1, "tp2": 2, "tp2,pp2": 4, "ep4": 4, "ep4,tp2": 4, "cp2,ep2": 2, "dp3,pp2": 6}
    assert {name: parse_layout(name).world_size for name in sizes} == sizes
    parallel = parse_layout("tp2,pp3").parallel
    assert (parallel.sequence_parallel, parallel.num_microbatches) == (True, 3)


def test_the_last_error_of_an_output_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: first\nerror: rank 1: no memory\nTraceback\n")
    assert last_error(log) == "rank 1: no memory"
    log.write_text("Traceback\nValueError: wrong\n\n")
    assert last_error(log) == "ValueError: wrong"


def test_a_directory_of_another_format_is_told_how_to_convert(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert main(["verify", str(tmp_path)]) == 2
    assert HuggingFaceSource.kind == "Hugging Face model directory"
