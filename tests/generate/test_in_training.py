"""Generation does not disturb training, and sampling is the same at every layout."""

from typing import Any

import pytest
import torch

from tests.generate.models import NO_END, generate, make_call
from tests.marks import exhaustive
from tests.parity.training import (
    CP2,
    DP2,
    INTERLEAVED,
    RECOMPUTED,
    TP2,
    TP2_SP,
    Case,
    Layout,
    Outcome,
    loader_of,
    module_of,
    refusal,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.tokenizers import byte_level_tokenizer


def test_same_seed_samples_the_same_at_every_layout() -> None:
    options: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9, "top_p_decay": 0.9, "top_p_bound": 0.2, "seed": 1},
        {"top_k": 20, "temperature": 0.9, "seed": 1},
        {"top_k": 20, "temperature": 0.9, "seed": 2},
        {"do_sample": True, "num_return_sequences": 3},
    )
    calls = [make_call("gpt2", max_new_tokens=8, **o, **NO_END) for o in options]
    alone = generate(calls, Layout())
    assert not torch.equal(alone[1], alone[2])
    # Several different sequences per prompt.
    assert torch.equal(alone[3][:, :7], calls[3].input_ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in alone[3][:, 7:].tolist()}) == len(alone[3])
    for layout in (TP2, Layout(pp=2), DP2, CP2):
        assert all(map(torch.equal, alone, generate(calls, layout))), layout


@pytest.mark.parametrize(
    ("model", "layout", "precision"),
    [
        ("gpt2", RECOMPUTED, "bf16-mixed"),
        exhaustive("gpt2", INTERLEAVED, "16-mixed"),
        ("gpt2", Layout(dp=2, overlap_communication=True), "32-true"),
        ("gpt2", CP2, "bf16-mixed"),
        exhaustive(
            "t5",
            Layout(
                tp=2,
                pp=2,
                num_microbatches=2,
                sequence_parallel=True,
                recompute="full",
            ),
            "32-true",
        ),
    ],
    ids=str,
)
def test_generation_does_not_disturb_training(model: str, layout: Layout, precision: str) -> None:
    # With dropout: random numbers drawn by generation would change the next mask.
    dropout = (
        (("dropout_rate", 0.1),) if model == "t5" else (("embd_pdrop", 0.1), ("resid_pdrop", 0.1))
    )
    case = Case(
        model=model,
        layout=layout,
        steps=3,
        model_fields=dropout,
        precision=precision,
    )
    undisturbed = run_ranks(_train, layout.world_size, case, False)
    disturbed = run_ranks(_train, layout.world_size, case, True)
    for (expected, _), (actual, sequences) in zip(undisturbed, disturbed, strict=True):
        assert actual.losses == expected.losses
        assert actual.grad_norms == expected.grad_norms
        assert sequences == disturbed[0][1]
        untrained, *trained, validated = sequences
        assert len(trained) == 3
        # Generation uses the current weights; validation those of the last step.
        assert len({str(each) for each in (untrained, *trained)}) > 2
        assert validated == trained[-1]


def _train(case: Case, generates: bool) -> tuple[Outcome, list[Any]]:
    from lightning_megatron import MegatronModule

    sequences: list[Any] = []

    class Generating(MegatronModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self._generate()

        def val_dataloader(self) -> Any:
            return loader_of(case)

        def on_validation_end(
            self,
        ) -> None:  # also before the first step: the Trainer's sanity check
            super().on_validation_end()
            self._generate()

        def _generate(self) -> None:
            if not generates:
                return
            settings = _settings(self)
            gradients = [p.requires_grad for p in self.parameters()]
            prompts = torch.tensor(
                [
                    [1, 2],
                    [3, 4],
                    [5, 6],
                ]
            )
            sequences.append(
                self.generate(
                    prompts,
                    max_new_tokens=6,
                    temperature=1.3,
                    eos_token_id=(),
                ).tolist()
            )
            assert _settings(self) == settings
            assert [p.requires_grad for p in self.parameters()] == gradients

    return train_module(module_of(case, Generating), case, loader_of(case)), sequences


def _settings(module: Any) -> list[Any]:
    """Settings that generation changes temporarily, of every submodule of the model chunks."""
    names = (
        "training",
        "sequence_parallel",
        "reduce_scatter_embeddings",
        "kv_cache",
    )
    values = [getattr(m, name, None) for m in module.model_chunks.modules() for name in names]
    return [
        *values,
        *(
            m.config.sequence_parallel
            for m in module.model_chunks.modules()
            if hasattr(m, "config")
        ),
    ]


def _stop_at(token: int) -> dict[str, Any]:
    return {"stop_strings": "a", "tokenizer": byte_level_tokenizer({token: b"a"})}


REFUSED: tuple[tuple[list[dict[str, Any]], str], ...] = (
    # Arguments by rank, of which the last are for all further ranks.
    ([_stop_at(83)], "gives ids up to 83, the model's vocab_size is 83"),
    ([_stop_at(5), _stop_at(6)], "rank 1 has other prompts or options than rank 0"),
    ([{}, {"tokens": [[2]]}], "rank 1 has other prompts or options than rank 0"),
    ([{}, {"on_tokens": 3}], "on_tokens must be callable, got 3"),
    ([{"decoder_input_ids": torch.ones(1, 1)}], "decoder_input_ids is no input of gpt2"),
    ([{"tokens": [[83]]}], "expected tokens of the vocabulary, 0 to 82, got 83"),
    ([{}, {"top_k": -3}], "top_k=-3 must be a number from 0 to 2147483647"),
)


def test_wrong_input_is_refused_on_every_rank_without_side_effects() -> None:
    for errors in run_ranks(
        _refusals,
        2,
        Case(layout=TP2_SP, steps=1),
    ):
        assert [
            part for (_, part), error in zip(REFUSED, errors, strict=True) if part not in error
        ] == [], errors


def _refusals(case: Case) -> list[str]:
    module = module_of(case)
    trainer = trainer_of(case)
    errors = []
    assert "there is no model before" in refusal(module.generate, torch.tensor([[1]]))
    trainer.validate(module, loader_of(case), verbose=False)
    module.model_chunks.train()
    settings = _settings(module)
    assert True in settings
    for calls, _ in REFUSED:
        call = dict(calls[min(trainer.global_rank, len(calls) - 1)])
        ids = torch.tensor(call.pop("tokens", [[1]]))
        errors.append(refusal(module.generate, ids, max_new_tokens=4, **call))

    def fail(*_: Any) -> None:
        raise RuntimeError("a layer fails")

    hook = list(module.model_chunks.modules())[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer fails"):
        module.generate(torch.tensor([[1]]), max_new_tokens=4)
    hook.remove()
    assert _settings(module) == settings
    assert module.generate(torch.tensor([[1]]), max_new_tokens=2).shape == (1, 3)
    return errors
