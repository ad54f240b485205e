"""``Trainer.predict``: sequences or logits per data-parallel replica, and gathering them in dataset order."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.families.parity import pretrained_module
from tests.generate.models import (
    BERTS,
    ENCODER_DECODERS,
    MODELS,
    NO_END,
    Call,
    hf_model,
    hf_output,
    layouts_on_gpus,
    make_call,
    prompts,
    run_with_models,
)
from tests.marks import exhaustive
from tests.parity.training import (
    DP2,
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    TP2,
    Case,
    Layout,
    refusal,
    trainer_of,
)

Batch = dict[str, Tensor]

LENGTHS = (7, 3, 5, 6, 2)
"""Prompt lengths; their number is a multiple neither of the replicas nor of the batch size."""
ATOL = 2e-5
"""As in tests/families: for logits of size 1 to 10 from four layers with another order of additions."""


def _loader(batch: Batch) -> DataLoader[Any]:
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


# ---- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", Layout(pp=2, dp=2)),
        ("mt5", FOUR_RANKS),
        exhaustive("mt5", Layout(cp=2, dp=2)),
    ],
    ids=str,
)
def test_predict_generates_once_per_prompt(model: str, layout: Layout) -> None:
    is_gpt = model == "llama"  # with a static cache, which must work in Lightning's inference mode
    rows = prompts("left" if is_gpt else "right", LENGTHS)
    call = make_call(model, rows, max_new_tokens=5, static_cache=is_gpt, **NO_END)
    expected = hf_output(call)
    # The distributed sampler assigns samples round-robin.
    for dp_rank, sequences in run_with_models(_predict_sequences, layout, [call]):
        assert sequences == expected[dp_rank :: layout.dp].tolist()


def _predict_sequences(
    directory: str, case: Case, calls: list[Call]
) -> tuple[int, list[list[int]]]:
    from lightning_megatron import GenerationOptions

    (call,) = calls
    module = pretrained_module(f"{directory}/{call.model}")
    module.generation = GenerationOptions(**call.options)
    ids = call.input_ids
    mask = call.attention_mask
    assert mask is not None
    rows = {"input_ids": ids, "attention_mask": mask}
    if call.model == "mt5":  # a batch of Megatron-Core's T5 dataset; the targets must not be used
        squares = mask[:, None].expand(-1, 7, 7)
        rows = {
            "text_enc": ids,
            "enc_mask": squares,
            "text_dec": ids,
            "labels": ids,
            "dec_mask": mask,
        }
    trainer = trainer_of(case)
    predictions = trainer.predict(module, _loader(rows))
    return trainer.strategy.topology.dp_rank, [
        row for batch in predictions for row in batch.tolist()
    ]


# ---- logits ---------------------------------------------------------------------------------------------------------


def rows_of(name: str) -> Batch:
    """Inputs of the Hugging Face model."""
    ids, mask = prompts("right", LENGTHS)
    rows = {"input_ids": ids, "attention_mask": mask}
    if name in ENCODER_DECODERS:
        labels = ids.roll(1, dims=1)[:, :4].clone()
        labels[1, 3:] = -100
        return {**rows, "labels": labels}
    return {**rows, "token_type_ids": ids % 2} if name in BERTS else rows


@functools.cache
@torch.no_grad()
def expected_logits(name: str) -> Tensor:
    output = hf_model(name)(**rows_of(name))
    if name == "ForQuestionAnswering":
        return torch.stack((output.start_logits, output.end_logits), dim=-1)
    logits: Tensor = output.prediction_logits if name == "ForPreTraining" else output.logits
    return logits


def _predict_logits(
    directory: str, case: Case, names: tuple[str, ...]
) -> list[tuple[Any, list[Any]]]:
    """Per model, logits of rows given to every replica, and the gathered predictions."""
    from lightning_megatron import gather_predictions

    results = []
    dp = case.layout.dp
    last_stage_only = case.layout.dp > 1 < case.layout.pp
    for name in names:
        rows = rows_of(name)
        module = pretrained_module(
            f"{directory}/{name}", return_logits="last_stage" if last_stage_only else True
        )
        trainer = trainer_of(case)
        # A batch of Megatron-Core's GPT dataset, whose last token is only a label.
        text = torch.nn.functional.pad(
            rows["input_ids"],
            (0, 1),
            value=-1,
        )
        predictions = trainer.predict(module, _loader({"text": text} if last_stage_only else rows))
        if predictions[0] is not None:  # on the last stage; a short last batch is not padded
            assert sum(len(batch) for batch in predictions) in (
                len(LENGTHS) // dp,
                -(-len(LENGTHS) // dp),
            )
        shared = module.logits(**rows, last_stage_only=True) if last_stage_only else module(rows)
        results.append((shared, gather_predictions(trainer, predictions)))
        assert (shared is None) == (last_stage_only and not trainer.strategy.topology.is_last_stage)
    return results


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(), ("gpt2", "t5", *BERTS)),
        (FOUR_RANKS, ("t5", "t5_1_1", "bloom", *BERTS)),
        (INTERLEAVED, ("qwen3",)),
        (PP2_DP2, ("gpt2",)),
        (Layout(dp=3), ("llama",)),
        exhaustive(
            Layout(cp=2, tp=2, dp=2),
            ("gpt2", "t5", *BERTS),
        ),
    ],
    ids=str,
)
def test_logits_equal_hugging_face_in_dataset_order(layout: Layout, names: tuple[str, ...]) -> None:
    _compare(layout, names, atol=ATOL)


@pytest.mark.parametrize(
    "layout",
    layouts_on_gpus(
        Layout(),
        TP2,
        Layout(pp=2),
        DP2,
    ),
)
def test_logits_on_gpus_equal_hugging_face(layout: Layout) -> None:
    _compare(
        layout,
        (
            "gpt2",
            "qwen3",
            "bloom",
            "mistral",
            "t5",
            "t5_1_1",
            *BERTS[:3],
        ),
        atol=5e-5,
        accelerator="gpu",
    )


def _compare(
    layout: Layout,
    names: tuple[str, ...],
    atol: float,
    **case: Any,
) -> None:
    for results in run_with_models(_predict_logits, layout, names, **case):
        for name, (shared, gathered) in zip(names, results, strict=True):
            if shared is None:
                assert gathered == [None] * len(LENGTHS)
                continue
            for actual in (shared.cpu(), torch.stack(gathered).cpu()):
                expected = expected_logits(name)
                assert (actual.shape, actual.dtype) == (expected.shape, torch.float32)
                if name in MODELS:
                    real = rows_of(name)["attention_mask"] == 1
                    actual = actual[real]
                    expected = expected[real]
                torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


# ---- the order of the dataset ---------------------------------------------------------------------------------------


def _gather(
    directory: str,
    case: Case,
    names: tuple[str, ...],
) -> list[list[Any]]:
    """Gathered predictions of numbered rows, for three kinds of data loaders."""
    from lightning_megatron import DatasetDataModule, MegatronModule, gather_predictions

    class Numbers(MegatronModule):
        def predict_step(
            self,
            batch: Batch,
            batch_idx: int,
            dataloader_idx: int = 0,
        ) -> Any:
            number = batch["input_ids"][:, 0]
            ragged = number.to(torch.bfloat16)[:, None].repeat(1, 1 + batch_idx)
            return (
                {"number": number, "more": (ragged, None)}
                if len(number) != 2
                else {"number": number}
            )

    module = Numbers(model=f"{directory}/{names[0]}", make_vocab_size_divisible_by=8)
    results = []
    for num_rows in (11, 6, case.layout.dp):
        rows = [{"input_ids": torch.full((3,), row)} for row in range(num_rows)]
        sources: list[dict[str, Any]] = [
            {"dataloaders": DataLoader(rows, batch_size=3)},  # type: ignore[arg-type]
            {"datamodule": DatasetDataModule(test=rows, micro_batch_size=2)},
            {
                "dataloaders": DataLoader(
                    _in_batches(rows, 2 if num_rows == 11 else 1), batch_size=None
                )
            },
        ]
        for source in sources:
            trainer = trainer_of(case)
            results.append(
                [num_rows, *gather_predictions(trainer, trainer.predict(module, **source))]
            )
    return results


def test_gathered_predictions_are_in_dataset_order() -> None:
    for results in run_with_models(_gather, Layout(dp=3), ("gpt2",)):
        for num_rows, *gathered in results:
            assert [int(each["number"]) for each in gathered] == list(range(num_rows))
            assert all(
                (each["more"][0] == each["number"]).all() for each in gathered if "more" in each
            )


def _in_batches(rows: list[Batch], size: int) -> Any:
    return [
        {"input_ids": torch.stack([r["input_ids"] for r in rows[i : i + size]])}
        for i in range(0, len(rows), size)
    ]


class _Stream(IterableDataset[Batch]):
    def __iter__(self) -> Any:
        yield {"input_ids": torch.arange(3)}


REFUSED = (
    *("predict has fewer samples than data-parallel replicas",) * 2,
    "input_ids: expected at most max_position_embeddings=40 tokens, got 41; truncate them",
    "a DataLoader does not tell its samples",
    "this Trainer has predicted nothing yet",
    "predictions=None: expected the result of Trainer.predict",
    "a prediction has [1] rows, and its batch has 2 samples",
    "rank 1 gathers torch.float32 of the shape [rows, 4] and rank 0",
)


def _refusals(
    directory: str,
    case: Case,
    names: tuple[str, ...],
) -> list[str]:
    from lightning_megatron import gather_across_data_parallel_groups, gather_predictions

    module = pretrained_module(f"{directory}/{names[0]}", return_logits=True)
    rows = _loader(rows_of(names[0]))
    two_rows: Any = [{"input_ids": torch.arange(3)}] * 2
    trainer = trainer_of(case)
    streaming = trainer_of(case)
    calls = (
        lambda: trainer_of(case).predict(module, DataLoader(two_rows, batch_size=2)),
        lambda: trainer_of(case).predict(
            module, DataLoader(_in_batches(two_rows, 1), batch_size=None)
        ),
        lambda: (
            trainer.predict(module, rows),
            module.logits(torch.ones(1, 41).long()),
        ),
        lambda: gather_predictions(
            streaming, streaming.predict(module, DataLoader(_Stream(), batch_size=1))
        ),
        lambda: gather_predictions(trainer_of(case), [torch.zeros(2)]),
        lambda: gather_predictions(
            trainer, trainer.predict(module, rows, return_predictions=False)
        ),
        lambda: gather_predictions(trainer, [trainer.predict(module, rows)[0][:1]]),
        lambda: gather_across_data_parallel_groups(
            torch.zeros(2, 3 + trainer.strategy.topology.dp_rank)
        ),
    )
    return [refusal(call) for call in calls]


def test_wrong_predictions_are_refused_on_every_rank() -> None:
    for errors in run_with_models(_refusals, Layout(dp=3), ("gpt2",)):
        assert [
            part for part, error in zip(REFUSED, errors, strict=True) if part not in error
        ] == [], errors
