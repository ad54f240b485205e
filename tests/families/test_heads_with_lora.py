"""LoRA trains a classification head in full, and saves and loads it with the adapters, as ``peft`` does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron.convert.peft import LoRA, with_adapters
from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import CheckpointError
from lightning_megatron.planning.flops import head_flops, model_flops
from lightning_megatron.planning.parameters import adapter_parameters, trained_with_lora
from tests.convert.directories import converted
from tests.families.parity import check_family, pretrained_module
from tests.families.test_gpts import gpt_model
from tests.families.test_heads import HEADS, PAD, classifier, sentences
from tests.families.test_megatron_bert import CASES as BERTS
from tests.families.test_megatron_bert import bert_model
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.training import FOUR_RANKS, RECOMPUTED, TP2_SP, Case, Layout, trainer_of
from tests.ranks import run_ranks

_CP = Layout(cp=2, cp_comm_type="a2a")


@pytest.mark.parametrize(
    ("family", "head", "layout"),
    [
        ("llama", "classes", FOUR_RANKS),
        exhaustive("llama", "one value", Layout(dp=2, num_microbatches=2)),
        exhaustive("llama", "classes of tokens", _CP),
        exhaustive("gpt2", "classes of tokens", FOUR_RANKS),  # called "classifier"
        exhaustive("gpt_neox", "several labels", RECOMPUTED),
        exhaustive("mixtral", "classes", TP2_SP),
    ],
)
def test_gpts_with_adapters_and_head_equal_peft(family: str, head: str, layout: Layout) -> None:
    options, rows = HEADS[head]
    check_family(classifier(family, *options), layout, rows, adapters=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["SequenceClassification", "TokenClassification", "QuestionAnswering"]
)
def test_berts_with_adapters_and_head_equal_peft(name: str) -> None:
    head, _, rows = next(case for case in BERTS.values() if case[0][0] == name)
    check_family(bert_model(*head), FOUR_RANKS, rows, adapters=True)


_OPTIONS: dict[str, Any] = {"task": "sequence_classification", "num_labels": 3}


def _train(directory: str, layout: Layout) -> list[torch.Tensor]:
    """Train a new head with adapters on a language model; logits now, and from all that is saved."""
    from lightning_megatron import MegatronModule

    rows = sentences(labels=torch.tensor([0, 2, 1, 2]))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    case = Case(layout=layout, steps=3)
    base = f"{directory}/base"
    inputs = [torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")]
    module = pretrained_module(
        base,
        lora=LoRA(rank=2, targets=("q_proj", "down_proj")),
        **_OPTIONS,
    )
    trainer = trainer_of(case)
    trainer.fit(module, loader)
    logits = [module.logits(*inputs)]
    module.save_pretrained(f"{directory}/adapter")
    module.save_pretrained(f"{directory}/merged", merge=True)
    trainer.save_checkpoint(f"{directory}/weights.ckpt", weights_only=True)
    trainer.save_checkpoint(f"{directory}/run.ckpt")
    restored = MegatronModule.load_from_checkpoint(f"{directory}/weights.ckpt")
    resumed = MegatronModule.load_from_checkpoint(f"{directory}/run.ckpt")
    continued = pretrained_module(base, lora=f"{directory}/adapter", **_OPTIONS)
    for other in (restored, resumed, continued):
        trainer_of(case).validate(other, loader, verbose=False)
        logits.append(other.logits(*inputs))
    return logits


def test_a_new_head_is_kept_with_its_adapters(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    gpt_model("llama", {"pad_token_id": PAD}).save_pretrained(tmp_path / "base")
    ranks = run_ranks(_train, 2, str(tmp_path), TP2_SP)
    logits = ranks[0]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["classifier", "score"]
    assert config["target_modules"] == ["down_proj", "q_proj"]
    auto = AutoModelForSequenceClassification
    base = auto.from_pretrained(tmp_path / "base", num_labels=3)
    models = [
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        auto.from_pretrained(tmp_path / "merged"),
        auto.from_pretrained(converted(tmp_path / "adapter", tmp_path / "one")),
        auto.from_pretrained(converted(tmp_path / "weights.ckpt", tmp_path / "two")),
        auto.from_pretrained(converted(tmp_path / "run.ckpt", tmp_path / "three")),
    ]
    again = converted(tmp_path / "weights.ckpt", tmp_path / "again", to="peft")
    base = auto.from_pretrained(tmp_path / "base", num_labels=3)
    models.append(PeftModel.from_pretrained(base, again))
    rows = sentences()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = models[0].eval()(**batch).logits.detach()
    for other in models[1:]:
        torch.testing.assert_close(
            other.eval()(**batch).logits.detach(), expected, rtol=0.0, atol=2e-5
        )
    for actual in (*logits, *ranks[1]):
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=2e-5)


def test_the_head_counts_as_trained() -> None:
    config = classifier("llama", "ForSequenceClassification").config
    model = with_adapters(model_config(config, "sequence_classification"), LoRA())
    language_model = with_adapters(model_config(config, "causal_lm"), LoRA())
    adapters = adapter_parameters(model)
    assert trained_with_lora(model) == adapters + 5 * model.hidden_size
    assert trained_with_lora(language_model) == adapters
    # All three products of the head, and two of the output layer.
    of_head = 3 * head_flops(model, (8,), VOCAB_SIZE)
    of_output_layer = 2 * head_flops(language_model, (8,), VOCAB_SIZE)
    of_body = model_flops(language_model, (8,), VOCAB_SIZE) - of_output_layer
    assert model_flops(model, (8,), VOCAB_SIZE) == pytest.approx(of_body + of_head)


def test_adapters_that_save_other_modules_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    gpt_model("llama", {"pad_token_id": PAD}).save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    adapted = get_peft_model(gpt_model("llama", {}), config)
    adapted.save_pretrained(tmp_path / "adapter")
    message = r"expected only heads \(classifier, qa_outputs, score\) for modules_to_save"
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
