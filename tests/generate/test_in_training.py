"""Training goes on as if no text had been generated, and what is drawn is the same in every layout."""

from typing import Any

import pytest
import torch

from tests.generate.models import NO_END, generate, make_call
from tests.parity.training import Case, Layout, Outcome, loader_of, module_of, refusal, train_module, trainer_of
from tests.ranks import run_ranks
from tests.tokenizers import byte_level_tokenizer


def test_the_same_seed_draws_the_same_text_in_every_layout() -> None:
    ways: tuple[dict[str, Any], ...] = (
        {"top_p": 0.9, "top_p_decay": 0.9, "top_p_bound": 0.2, "seed": 1},
        {"top_k": 20, "temperature": 0.9, "seed": 1},
        {"top_k": 20, "temperature": 0.9, "seed": 2},
        {"do_sample": True, "num_return_sequences": 3},
    )
    calls = [make_call("gpt2", max_new_tokens=8, **way, **NO_END) for way in ways]
    alone = generate(calls, Layout())
    assert not torch.equal(alone[1], alone[2])
    # Several texts of each prompt, which none of them shares with another.
    assert torch.equal(alone[3][:, :7], calls[3].input_ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in alone[3][:, 7:].tolist()}) == len(alone[3])
    for layout in (Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(cp=2)):
        for mine, other in zip(alone, generate(calls, layout), strict=True):
            assert torch.equal(mine, other), layout


@pytest.mark.parametrize(
    ("model", "layout", "precision"),
    [
        ("gpt2", Layout(tp=2, sequence_parallel=True, recompute="full"), "bf16-mixed"),
        pytest.param("gpt2", Layout(pp=2, vpp=2, num_microbatches=2), "16-mixed", marks=pytest.mark.exhaustive),
        ("gpt2", Layout(dp=2, overlap_communication=True), "32-true"),
        ("gpt2", Layout(cp=2), "bf16-mixed"),
        pytest.param(
            "t5",
            Layout(tp=2, pp=2, num_microbatches=2, sequence_parallel=True, recompute="full"),
            "32-true",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_training_goes_on_as_if_nothing_had_happened(model: str, layout: Layout, precision: str) -> None:
    # With dropout: a random number drawn by generation would change the next mask.
    dropout = (("dropout_rate", 0.1),) if model == "t5" else (("embd_pdrop", 0.1), ("resid_pdrop", 0.1))
    case = Case(model=model, layout=layout, steps=3, model_fields=dropout, precision=precision)
    undisturbed = run_ranks(_trained, layout.world_size, case, False)
    disturbed = run_ranks(_trained, layout.world_size, case, True)
    for (one, _), (other, texts) in zip(undisturbed, disturbed, strict=True):
        assert one.losses == other.losses
        assert one.grad_norms == other.grad_norms
        assert texts == disturbed[0][1]
        untrained, *trained, validated = texts
        assert len(trained) == 3
        # Trained weights, not those of the start: validation sees those of the last step.
        assert len({str(text) for text in (untrained, *trained)}) > 2
        assert validated == trained[-1]


def _trained(case: Case, generates: bool) -> tuple[Outcome, list[Any]]:
    from lightning_megatron import MegatronModule

    texts: list[Any] = []

    class Writing(MegatronModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self._write()

        def val_dataloader(self) -> Any:
            return loader_of(case)

        def on_validation_end(self) -> None:  # before the first step, too: the Trainer tries two batches
            super().on_validation_end()
            self._write()

        def _write(self) -> None:
            if not generates:
                return
            switches, gradients = _switches(self), [p.requires_grad for p in self.model_chunks.parameters()]
            prompts = torch.tensor([[1, 2], [3, 4], [5, 6]])
            texts.append(self.generate(prompts, max_new_tokens=6, temperature=1.3, eos_token_id=()).tolist())
            assert _switches(self) == switches
            assert [p.requires_grad for p in self.model_chunks.parameters()] == gradients

    return train_module(module_of(case, Writing), case, loader_of(case)), texts


def _switches(module: Any) -> list[Any]:
    """What generation switches, of every module of the chunks."""
    names = ("training", "sequence_parallel", "reduce_scatter_embeddings", "kv_cache", "rotary_length")
    found = [getattr(m, name, None) for m in module.model_chunks.modules() for name in names]
    return [*found, *(m.config.sequence_parallel for m in module.model_chunks.modules() if hasattr(m, "config"))]


def _spelled(token: int) -> dict[str, Any]:
    return {"stop_strings": "a", "tokenizer": byte_level_tokenizer({token: b"a"})}


REFUSED: tuple[tuple[list[dict[str, Any]], str], ...] = (
    # What each rank asks, the last one also the ranks behind it.
    ([_spelled(83)], "gives ids up to 83, the model's vocab_size is 83"),
    ([_spelled(5), _spelled(6)], "rank 1 has other prompts or options than rank 0"),
    ([{}, {"tokens": [[2]]}], "rank 1 has other prompts or options than rank 0"),
    ([{}, {"on_tokens": 3}], "on_tokens must be callable, got 3"),
    ([{"decoder_input_ids": torch.ones(1, 1)}], "decoder_input_ids is no input of gpt2"),
    ([{"tokens": [[83]]}], "expected tokens of the vocabulary, 0 to 82, got 83"),
    ([{}, {"top_k": -3}], "top_k=-3 must be a number at least 0"),
)


def test_wrong_input_is_refused_on_all_ranks_and_leaves_the_model_as_it_was() -> None:
    for said in run_ranks(_refused, 2, Case(layout=Layout(tp=2, sequence_parallel=True), steps=1)):
        assert [says for (_, says), line in zip(REFUSED, said, strict=True) if says not in line] == [], said


def _refused(case: Case) -> list[str]:
    module, trainer, said = module_of(case), trainer_of(case), []
    assert "there is no model before" in refusal(module.generate, torch.tensor([[1]]))
    trainer.validate(module, loader_of(case), verbose=False)
    module.model_chunks.train()
    switches = _switches(module)
    assert True in switches
    for calls, _ in REFUSED:
        call = dict(calls[min(trainer.global_rank, len(calls) - 1)])
        ids = torch.tensor(call.pop("tokens", [[1]]))
        said.append(refusal(module.generate, ids, max_new_tokens=4, **call))

    def fail(*_: Any) -> None:
        raise RuntimeError("a layer fails")

    hook = list(module.model_chunks.modules())[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer fails"):
        module.generate(torch.tensor([[1]]), max_new_tokens=4)
    hook.remove()
    assert _switches(module) == switches
    assert module.generate(torch.tensor([[1]]), max_new_tokens=2).shape == (1, 3)
    return said
