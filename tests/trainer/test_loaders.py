"""Ordinary DataLoaders train and validate every layout on exactly the right rows, or are refused."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from tests.checkpoint.runs import callback
from tests.models import VOCAB_SIZE
from tests.parity.comparison import assert_same_run, assert_same_tensors
from tests.parity.training import (
    PP2,
    PP2_DP2,
    SEQ_LENGTH,
    TP2,
    TP2_DP2,
    TP2_PP2,
    Case,
    Labels,
    Layout,
    Outcome,
    Sentences,
    common_result,
    join_outcomes,
    loader_of,
    metrics_of,
    module_of,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

Rows = list[dict[str, Tensor]]

# ---- sampling -------------------------------------------------------------------------------------------------------

NUMBERED: Any = [{"input_ids": torch.full((SEQ_LENGTH,), index)} for index in range(24)]
"""Rows whose tokens are all the row's index."""


def _rows_seen(layout: Layout, in_order: bool = False) -> tuple[int, list[list[int]]]:
    """This rank's data-parallel rank, and the indices of the rows that it trained on in each of two epochs."""
    from lightning_megatron import MegatronModule

    seen: list[list[int]] = []

    class InOrder(MegatronModule):
        def train_dataloader(self) -> DataLoader[Any]:
            sampler: DistributedSampler[Any] = DistributedSampler(
                NUMBERED,
                num_replicas=self.megatron.data_parallel_size,
                rank=self.megatron.data_parallel_rank,
                shuffle=False,
            )
            return DataLoader(NUMBERED, batch_size=4, sampler=sampler)

    def see(
        trainer: Any,
        module: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seen[-1].extend(batch["input_ids"][:, 0].tolist())

    watch = callback(
        on_train_epoch_start=lambda *_: seen.append([]),
        on_train_batch_start=see,
    )
    trainer = trainer_of(
        Case(layout=layout),
        max_steps=-1,
        max_epochs=2,
        callbacks=[watch],
    )
    loader = None if in_order else DataLoader(NUMBERED, batch_size=4)
    trainer.fit(module_of(Case(layout=layout), InOrder if in_order else None), loader)
    return trainer.strategy.data_parallel_rank, seen


def test_replicas_share_an_epoch_and_ranks_of_a_replica_see_equal_rows() -> None:
    by_replica: dict[int, list[list[int]]] = {}
    for replica, seen in run_ranks(_rows_seen, 4, TP2_DP2):
        assert by_replica.setdefault(replica, seen) == seen
    epochs = [
        first + second
        for first, second in zip(
            by_replica[0],
            by_replica[1],
            strict=True,
        )
    ]
    # Lightning shuffles training data for every distributed strategy, even if the loader does not.
    assert [sorted(rows) for rows in epochs] == [list(range(24))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(24))


def test_custom_distributed_sampler_is_kept() -> None:
    even = (0, [list(range(0, 24, 2))] * 2)
    odd = (1, [list(range(1, 24, 2))] * 2)
    assert run_ranks(_rows_seen, 4, TP2_DP2, True) == [even, even, odd, odd]


class _Rotated(Sampler[int]):
    """All rows, from the one of the epoch's number on."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return len(NUMBERED)

    def __iter__(self) -> Iterator[int]:
        return iter([*range(self.epoch, len(self)), *range(self.epoch)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _first_rows(folder: Path) -> list[list[int]]:
    """First row of each epoch: of a run, and of one that resumes it after its second epoch."""
    case = Case()
    runs = []
    for epochs, ckpt_path in ((2, None), (4, folder / "run.ckpt")):
        rows: list[int] = []

        def see(trainer: Any, module: Any, batch: Any, batch_idx: int, rows: Any = rows) -> None:
            if batch_idx == 0:
                rows.append(int(batch["input_ids"][0, 0]))

        trainer = trainer_of(
            case,
            max_steps=-1,
            max_epochs=epochs,
            use_distributed_sampler=False,
            callbacks=[callback(on_train_batch_start=see)],
        )
        loader = DataLoader(NUMBERED, batch_size=12, sampler=_Rotated())
        trainer.fit(module_of(case), loader, ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / "run.ckpt")
        runs.append(rows)
    return runs


def test_samplers_of_other_classes_are_told_the_epoch(tmp_path: Path) -> None:
    assert run_ranks(_first_rows, 1, tmp_path) == [[[0, 1], [2, 3]]]


# ---- training equals one process on every layout --------------------------------------------------------------------


class _Stream(IterableDataset[dict[str, Tensor]]):
    """Rows on data sources; elsewhere noise of a different length, which must not be used."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_data_source = True

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self.is_data_source:
            yield from iter(Sentences(self.num_rows))
        else:
            yield from [{"input_ids": torch.randint(0, VOCAB_SIZE, (3,))}] * self.num_rows


def _on_a_stream(case: Case) -> Outcome:
    from lightning_megatron import MegatronModule

    stream = _Stream(case.steps * case.global_batch_size)

    class Streaming(MegatronModule):
        def train_dataloader(self) -> DataLoader[Any]:
            stream.is_data_source = self.megatron.is_data_source
            return DataLoader(stream, batch_size=case.global_batch_size)

    return train_module(module_of(case, Streaming), case, None)


def _on_a_ragged_last_batch(case: Case) -> Outcome:
    rows = Sentences(2 * case.global_batch_size + 2, "uneven")
    return train_module(
        module_of(case),
        case,
        DataLoader(rows, batch_size=case.global_batch_size // case.layout.dp),
    )


@pytest.mark.parametrize(
    ("train", "case"),
    [
        # Only the batches of a replica's first rank are used.
        (_on_a_stream, Case(layout=TP2_PP2, steps=4)),
        (_on_a_ragged_last_batch, Case(layout=Layout(dp=2, num_microbatches=3), steps=3)),
        (_on_a_ragged_last_batch, Case(layout=Layout(pp=2, num_microbatches=4), steps=3)),
    ],
)
def test_training_on_loader_equals_one_process(train: Any, case: Case) -> None:
    expected, actual = (
        join_outcomes(run_ranks(train, x.layout.world_size, x)) for x in (case.on_one_process, case)
    )
    assert_same_run(actual, expected)


def _train_without_targets(case: Case) -> Outcome:
    row = {
        "input_ids": torch.arange(SEQ_LENGTH),
        "labels": torch.full((SEQ_LENGTH,), -100),
    }
    loader: DataLoader[Any] = DataLoader([row] * 12, batch_size=6)  # type: ignore[arg-type]
    with recorded_warnings("had no targets") as messages:
        run = train_module(module_of(case), case, loader)
    assert len(messages) == (torch.distributed.get_rank() == 0)
    return run


def test_step_without_targets_warns_and_keeps_weights() -> None:
    layout = PP2_DP2
    case = Case(
        layout=layout,
        steps=1,
        optimizer=(("weight_decay", 0.0),),
    )
    run = join_outcomes(run_ranks(_train_without_targets, 4, case))
    assert (run.losses, run.grad_norms) == ([0.0], [0.0])
    assert_same_tensors(run.weights, run.initial_weights, atol=0.0)


def _train_on_weights(case: Case) -> list[tuple[list[float], list[float]]]:
    """Losses and gradient norms with weights of 1, and of 1/1024, whose sum is less than 1."""
    from lightning_megatron import GPTTrainStep

    class Uncounted(GPTTrainStep):
        """Its targets are counted after the backward pass."""

        def counts(self, batch: Any) -> None:
            return None

    runs = []
    for weight in (1.0, 1 / 1024):
        rows = [
            {"input_ids": row["input_ids"], "loss_mask": torch.full((SEQ_LENGTH,), weight)}
            for row in _rows(12)
        ]
        for step in (GPTTrainStep(), Uncounted()):
            loader: DataLoader[Any] = DataLoader(rows, batch_size=12)  # type: ignore[arg-type]
            run = train_module(module_of(case, train_step=step), case, loader)
            runs.append((run.losses, run.grad_norms))
    return runs


def test_weights_of_targets_are_relative() -> None:
    first, *others = common_result(_train_on_weights, Case(steps=2))
    for other in others:
        assert other[0] == pytest.approx(first[0], rel=1e-5)
        assert other[1] == pytest.approx(first[1], rel=1e-4)


# ---- validation -----------------------------------------------------------------------------------------------------


def _val_loss(case: Case, rows: Rows, batch_size: int | None) -> float:
    loader: DataLoader[Any] = DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]
    (metrics,) = trainer_of(case).validate(
        module_of(case),
        loader,
        verbose=False,
    )
    return float(metrics["val_loss"])


def _rows(number: int, labels: Labels = "all") -> Rows:
    sentences = Sentences(number, labels)
    return [sentences[index] for index in range(number)]


def _masked() -> tuple[Rows, Rows]:
    rows = _rows(4)
    masks = [
        {
            # Weights are relative.
            "sample_mask": torch.tensor(1 / 1024),
            "loss_mask": torch.ones(SEQ_LENGTH),
        }
        for _ in rows
    ]
    masked = [
        {"input_ids": row["input_ids"], **mask} for row, mask in zip(rows, masks, strict=True)
    ]
    masked[2]["sample_mask"].zero_()
    rows[2]["labels"][:] = -100
    # ``loss_mask`` applies to the predicting position, labels to the predicted one.
    masked[0]["loss_mask"][4:] = 0
    rows[0]["labels"][5:] = -100
    return masked, rows


_RAGGED = _rows(11, "uneven")
"""Rows with 0 to 15 targets; their number divides into no layout's batches."""


@pytest.mark.parametrize(
    ("layout", "batch_size", "rows"),
    [
        (Layout(num_microbatches=3), 3, (_RAGGED, _RAGGED)),
        (PP2_DP2, 4, (_RAGGED, _RAGGED)),
        (TP2, 4, _masked()),
    ],
    ids=["ragged", "ragged on 4 ranks", "masked"],
)
def test_val_loss_is_mean_over_all_targets(
    layout: Layout, batch_size: int, rows: tuple[Rows, Rows]
) -> None:
    inputs, in_one_batch = rows
    expected = common_result(_val_loss, Case(), in_one_batch, len(in_one_batch))
    assert common_result(_val_loss, Case(layout=layout), inputs, batch_size) == pytest.approx(
        expected, rel=1e-6
    )


def _validate_on_two(case: Case) -> dict[str, float]:
    loaders = [DataLoader(Sentences(num_rows, "uneven"), batch_size=4) for num_rows in (6, 11)]
    trainer = trainer_of(case)
    trainer.fit(module_of(case), loader_of(case), loaders)
    names = ("val_loss", "val_perplexity")
    return {name: value for name, value in metrics_of(trainer).items() if name.startswith(names)}


def test_each_validation_loader_has_its_own_metrics() -> None:
    case = Case(layout=PP2, steps=1)
    expected = common_result(_validate_on_two, case.on_one_process)
    assert len(expected) == 4
    for index in (0, 1):
        loss = expected[f"val_loss/dataloader_idx_{index}"]
        assert expected[f"val_perplexity/dataloader_idx_{index}"] == pytest.approx(
            math.exp(loss), rel=1e-5
        )
    # The exponential of a mean of about 4 has four times its relative error.
    assert common_result(_validate_on_two, case) == pytest.approx(expected, rel=6e-6)


def _evaluate_second_set_alone(case: Case) -> dict[str, float]:
    from lightning_megatron import MegatronModule

    class Own(MegatronModule):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            if dataloader_idx == 1:
                return super().validation_step(batch, batch_idx, dataloader_idx)
            self.log("val_own", 7.0, add_dataloader_idx=False)
            return None

    loaders = [DataLoader(Sentences(num_rows, "uneven"), batch_size=4) for num_rows in (6, 11)]
    trainer = trainer_of(case)
    trainer.fit(module_of(case, Own), loader_of(case), loaders)
    return {name: value for name, value in metrics_of(trainer).items() if name.startswith("val_")}


def test_set_that_an_own_step_evaluates_has_no_metrics_of_the_objective() -> None:
    metrics = common_result(_evaluate_second_set_alone, Case(layout=PP2, steps=1))
    loss = metrics["val_loss/dataloader_idx_1"]
    assert metrics == {
        "val_own": 7.0,
        "val_loss/dataloader_idx_1": loss,
        "val_lm_loss/dataloader_idx_1": loss,
        "val_perplexity/dataloader_idx_1": pytest.approx(math.exp(loss), rel=1e-5),
    }


class _EndsOnce(Sentences):
    """Sentences whose third batch of four cannot be read the first time."""

    has_ended = False

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 8 and not self.has_ended:
            self.has_ended = True
            raise OSError("the disk is away")
        return super().__getitem__(index)


def _validate_again(case: Case) -> tuple[list[dict[str, float]], bool]:
    module = module_of(case)
    rows = _EndsOnce(11, "uneven")
    loader = DataLoader(rows, batch_size=4)
    with contextlib.suppress(OSError):
        trainer_of(case).validate(module, loader, verbose=False)
    again = trainer_of(case).validate(module, loader, verbose=False)
    fresh = trainer_of(case).validate(module_of(case), loader, verbose=False)
    return [again[0], fresh[0]], rows.has_ended


def test_validation_counts_nothing_of_one_that_an_exception_ended() -> None:
    (again, fresh), has_ended = common_result(_validate_again, Case())
    assert has_ended
    assert again == fresh


# ---- invalid batches are refused on every rank ----------------------------------------------------------------------


def _invalid(key: str, value: int) -> Rows:
    """Four rows, the third with an invalid value."""
    zeros = torch.zeros(16, dtype=torch.long)
    rows = [{key: zeros, **row} for row in _rows(4)]
    rows[2][key] = rows[2][key].clone()
    rows[2][key][5] = value
    return rows


REFUSED: tuple[tuple[Any, int | None, tuple[str, ...]], ...] = (
    (_invalid("input_ids", 83), 4, ("input_ids", "83", "vocab")),
    (_invalid("labels", -7), 4, ("labels", "-7", "-100")),
    (_invalid("token_types", 0), 4, ("token_types", "input_ids, ")),
    (
        [{"input_ids": torch.arange(16)[None].repeat(n, 1)} for n in (4, 0)],
        None,
        ("a batch has no rows",),
    ),
)


def _messages(case: Case) -> list[str]:
    """Errors on this rank for each of ``REFUSED``, and for a user's ``check_batch`` that raises."""
    from lightning_megatron import DataError, GPTTrainStep

    class Picky(GPTTrainStep):
        def check_batch(self, batch: dict[str, Tensor]) -> None:
            raise KeyError("mine")

    messages = []
    refused: list[Any] = [(rows, batch_size, None) for rows, batch_size, _ in REFUSED]
    for rows, batch_size, step in (*refused, (Sentences(4), 4, Picky())):
        loader: DataLoader[Any] = DataLoader(rows, batch_size=batch_size)
        with pytest.raises((DataError, KeyError)) as error:
            trainer_of(case).fit(module_of(case, train_step=step), loader)
        messages.append(f"{error.type.__name__}: {error.value}")
    return messages


def test_invalid_batches_are_refused_on_every_rank() -> None:
    ranks = run_ranks(_messages, TP2_PP2.world_size, Case(layout=TP2_PP2))
    *refused, of_user = zip(*ranks, strict=True)
    for (_, _, words), messages in zip(REFUSED, refused, strict=True):
        assert len(set(messages)) == 1
        assert all(word in messages[0] for word in words)
    # An error in a user's check ends all ranks of the replica.
    assert of_user == ("KeyError: 'mine'", *["DataError: KeyError('mine')"] * 3)
