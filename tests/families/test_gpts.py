"""Every GPT family equals Hugging Face: logits, loss, gradients and saved weights, over layouts and variants."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.registry import config_object, family_of, model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.parameters import total_parameters
from tests.families.parity import LAYOUTS, Rows, check_family, tiny_model
from tests.families.parity import padded_sentences as sentences
from tests.models import GPT2, LLAMA, NO_DROPOUT, VOCAB_SIZE
from tests.parity.training import FOUR_RANKS, INTERLEAVED, RECOMPUTED, TP2, TP2_DP2, Layout

_LIKE_GPT2 = {**GPT2, **NO_DROPOUT, "n_inner": 48, "n_positions": 24}
LIKE_LLAMA = {**LLAMA, "max_position_embeddings": 24}
_OF_MANY_KEYS = {name: value for name, value in LIKE_LLAMA.items() if name != "num_key_value_heads"}
_FALCON = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
_GEMMA = {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 5}
_NO_DROPOUT_OF_SEED = {"attention_dropout": 0.0, "residual_dropout": 0.0}
_NEMOTRON = {name: value for name, value in LIKE_LLAMA.items() if name != "rms_norm_eps"}
_WINDOW_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
LINEAR_ATTENTION: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    # Outputs of single tokens are small: with 1e-6 transformers' own two forms of the rule differ by 2e-5.
    "rms_norm_eps": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
"""Fields of layers with linear attention; the pipeline stages have different kinds of layers."""
_MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
}
_MULTIPLIERS |= {"logits_scaling": 2.5}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **fields}}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _LIKE_GPT2),
    "gpt_bigcode": ("GPTBigCode", _LIKE_GPT2),
    # Context shorter than the sentences, so that rotary frequencies are scaled.
    "llama": ("Llama", {**LIKE_LLAMA, "max_position_embeddings": 12, "rms_norm_eps": 1e-5}),
    # The sentences have 16 tokens.
    "mistral": ("Mistral", {**LIKE_LLAMA, "head_dim": 10, "sliding_window": 5}),
    "qwen2": ("Qwen2", {**LIKE_LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**LIKE_LLAMA, "head_dim": 12}),
    "bloom": ("Bloom", {"n_layer": 4, "hidden_size": 32, "n_head": 4, "layer_norm_epsilon": 1e-4}),
    "falcon": ("Falcon", _FALCON),
    "gemma": ("Gemma", {**LIKE_LLAMA, "head_dim": 10, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {**LIKE_LLAMA, **_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3Text", {**LIKE_LLAMA, **_GEMMA, "sliding_window_pattern": 3}),
    "phi3": ("Phi3", {**LIKE_LLAMA, "pad_token_id": 0}),
    "olmo2": ("Olmo2", {**LIKE_LLAMA, "pad_token_id": 0}),
    "granite": ("Granite", {**LIKE_LLAMA, **_MULTIPLIERS}),
    "starcoder2": ("Starcoder2", {**LIKE_LLAMA, "sliding_window": 5}),
    "gpt_neox": ("GPTNeoX", {**_OF_MANY_KEYS, **_rope("default", partial_rotary_factor=0.5)}),
    "smollm3": ("SmolLM3", {**LIKE_LLAMA, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "stablelm": ("StableLm", {**LIKE_LLAMA, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "opt": ("OPT", {**_FALCON, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "cohere": ("Cohere", {**LIKE_LLAMA, "logit_scale": 0.25}),
    "glm": ("Glm", {**LIKE_LLAMA, "head_dim": 12, "pad_token_id": 0}),
    "glm4": ("Glm4", {**LIKE_LLAMA, "head_dim": 12, "pad_token_id": 0}),
    "exaone4": ("Exaone4", {**LIKE_LLAMA, "sliding_window": 5, "sliding_window_pattern": 2}),
    "seed_oss": ("SeedOss", {**LIKE_LLAMA, **_NO_DROPOUT_OF_SEED, "head_dim": 12}),
    "ministral": (
        "Ministral",
        {**LIKE_LLAMA, "head_dim": 10, "sliding_window": 5, "layer_types": _WINDOW_TYPES},
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            **LIKE_LLAMA,
            "head_dim": 12,
            **_rope(
                "dynamic",
                alpha=50.0,
                factor=1.0,
            ),
        },
    ),
    "ernie4_5": ("Ernie4_5", {**LIKE_LLAMA, "head_dim": 10}),
    "ministral3": (
        "Ministral3",
        {
            **LIKE_LLAMA,
            "head_dim": 10,
            **_rope(
                "yarn",
                factor=6.0,
                original_max_position_embeddings=4,
                max_position_embeddings=24,
                mscale=0.7,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    "apertus": (
        "Apertus",
        {**LIKE_LLAMA, **_rope("llama3", original_max_position_embeddings=8, **_LLAMA3)},
    ),
    "qwen3_5_text": ("Qwen3_5Text", {**LIKE_LLAMA, **LINEAR_ATTENTION}),
    "nemotron": ("Nemotron", {**_NEMOTRON, "head_dim": 12, "intermediate_size": 24}),
}
"""Names of transformers' classes, and fields of a tiny model."""


def gpt_model(family: str, changes: dict[str, Any]) -> Any:
    """Create a tiny model of a family, with fields changed by ``changes``."""
    import transformers

    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": VOCAB_SIZE, **fields, **changes}
    )
    # Falcon without AutoModel, for which tiny_model() selects eager attention: there transformers 5.23 adds ALiBi's
    # biases twice (models/falcon/modeling_falcon.py: to the mask and to the scores), in default attention once.
    auto = getattr(
        transformers, f"{name}ForCausalLM" if family == "falcon" else "AutoModelForCausalLM"
    )
    return tiny_model(auto, config)


def rows_of(kind: str) -> Rows:
    """Sentences with padding on the ``right`` or ``left``, with ``positions``, or without any mask (``bare``)."""
    if kind in ("right", "left"):
        return sentences(side=kind)
    rows = sentences(lengths=(16, 16, 16, 16))
    if kind == "bare":
        return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]
    # Not a shift of 0, 1, 2, ..., to which rotary positions are invariant. With a mask of ones: without a mask Hugging
    # Face takes jumps of positions for document boundaries.
    positions = torch.tensor(
        [
            0,
            0,
            3,
            4,
            4,
            1,
            2,
            9,
            8,
            7,
            15,
            15,
            14,
            2,
            1,
            0,
        ]
    )
    return [{**row, "position_ids": positions.roll(i)} for i, row in enumerate(rows)]


_LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 6.0, 8.0]}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_WITH_BIASES = {"bias": True, "ffn_hidden_size": 72, "tie_word_embeddings": False}
_UNTIED = {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "gelu"}
_FOUR_TP = Layout(tp=4, sequence_parallel=True)
_TWO_TP = Layout(tp=2, sequence_parallel=True)
_RECOMPUTING = replace(_TWO_TP, recompute="selective")
_A2A = Layout(cp=2, cp_comm_type="a2a")
_GATHER = Layout(cp=2, cp_comm_type="all_gather")
_CP_TP = replace(_GATHER, tp=2, sequence_parallel=True)
_CP_PP = replace(_A2A, pp=2, num_microbatches=2)
_CP4 = Layout(cp=4)
"""More ranks than the two key/value heads: keys and values are all-gathered."""

_NEWER = {
    "gemma": "right",
    "gemma2": "left",
    "gemma3_text": "right",
    "phi3": "left",
    "olmo2": "right",
    "granite": "left",
    "starcoder2": "right",
    "gpt_neox": "left",
    "smollm3": "right",
    "stablelm": "left",
    "opt": "left",
    "cohere": "right",
    "glm": "left",
    "glm4": "right",
    "exaone4": "left",
    "seed_oss": "right",
    "ministral": "left",
    "hunyuan_v1_dense": "right",
    "ernie4_5": "left",
    "nemotron": "right",
    "ministral3": "left",
    "apertus": "right",
    "qwen3_5_text": "left",
}
"""Families that differ from others by a field of ``ModelConfig``, and the padding side of their rows."""
_STAGED = ("gemma2", "gemma3_text", "opt", "ministral3", "qwen3_5_text")
"""Those of ``_NEWER`` whose special parts depend on the pipeline stage."""
_SHARDED = ("olmo2", "hunyuan_v1_dense", "nemotron", "apertus")
"""Those of ``_NEWER`` whose special parts depend on the shard of each layer alone."""
_OF_ALL = _rope("longrope", original_max_position_embeddings=8, **_LONGROPE)
_OF_SIX = {name: factors[:3] for name, factors in _LONGROPE.items()}
_PHI4 = {
    "original_max_position_embeddings": 8,
    **_rope("longrope", partial_rotary_factor=0.75, **_OF_SIX),
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}


def _layout_of(family: str) -> Layout:
    """The smallest layout that splits what is special in one of ``_NEWER``."""
    if family in _STAGED:
        return FOUR_RANKS
    return _TWO_TP if family in _SHARDED else Layout()


Case = tuple[str, str, dict[str, Any], Layout, str]
"""Family, variant, its fields, layout, and kind of rows."""
CASES: tuple[Case, ...] = (
    *(("llama", "", {}, layout, "right") for layout in (LAYOUTS[0], FOUR_RANKS, INTERLEAVED)),
    ("llama", "more ranks than keys", {}, _FOUR_TP, "right"),
    ("llama", "tied, biased", dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), True),
     TP2_DP2, "left"),
    ("llama", "longrope", _OF_ALL, Layout(), "right"),
    ("gpt2", "", {}, FOUR_RANKS, "right"),
    ("gpt_bigcode", "one key", {}, _TWO_TP, "right"),
    ("mistral", "", {}, FOUR_RANKS, "left"),
    ("mistral", "a window of one", {"sliding_window": 1}, Layout(), "right"),
    ("qwen2", "windows in later layers", _WINDOWED, FOUR_RANKS, "left"),
    ("qwen3", "", {}, RECOMPUTED, "right"),
    ("bloom", "", {}, FOUR_RANKS, "right"),
    ("falcon", "40b", _40B, _TWO_TP, "right"),
    ("falcon", "11b", {**_40B, "num_ln_in_parallel_attn": 1, "bias": True}, Layout(), "left"),
    ("falcon", "rw", _RW, _TWO_TP, "right"),
    ("falcon", "one after the other", {"parallel_attn": False, **_rope("default")}, Layout(), "left"),
    *((family, "", {}, _layout_of(family), rows) for family, rows in _NEWER.items()),
    ("phi3", "longrope of a part", _PHI4, Layout(), "right"),
    # Yarn scales the scores only of layers with positions; layer_types selects layers with windows.
    ("smollm3", "yarn, windows by type", {"sliding_window": 5, "layer_types": _WINDOW_TYPES,
     **_rope("yarn", factor=4.0, original_max_position_embeddings=8)}, FOUR_RANKS, "right"),
    ("llama", "", {}, _CP_TP, "right"),
    ("bloom", "", {}, replace(_A2A, tp=2), "left"),
    ("gpt2", "", {}, replace(_CP_PP, vpp=2), "positions"),
    ("ministral3", "", {}, _GATHER, "positions"),
)  # fmt: skip
RARER_CASES: tuple[Case, ...] = (
    ("llama", "longrope", _OF_ALL, FOUR_RANKS, "right"),
    ("gpt_bigcode", "one key", {}, FOUR_RANKS, "right"),
    ("falcon", "40b", _40B, FOUR_RANKS, "right"),
    ("falcon", "rw", _RW, FOUR_RANKS, "right"),
    ("llama", "dynamic, positions", _rope("dynamic", factor=3.0), INTERLEAVED, "positions"),
    ("llama", "llama3", _rope("llama3", original_max_position_embeddings=8, **_LLAMA3,), FOUR_RANKS, "positions"),
    ("gpt2", "untied", {**_UNTIED, "reorder_and_upcast_attn": True, "n_inner": None, "layer_norm_epsilon": 1e-3},
     FOUR_RANKS, "right"),
    ("gpt_bigcode", "a key for each head", {"multi_query": False, **_UNTIED,
     **dict.fromkeys(("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), False)}, INTERLEAVED, "left"),
    ("bloom", "untied", {"tie_word_embeddings": False}, INTERLEAVED, "bare"),
    ("falcon", "7b", {}, INTERLEAVED, "positions"),
    # Ranks that share a key sum the gradients of its norm.
    ("qwen3", "more ranks than keys", {}, _FOUR_TP, "right"),
    ("mistral", "", {}, _CP4, "left"),
    ("gpt2", "", {}, INTERLEAVED, "right"),
    ("qwen2", "windows by type", {**_WINDOWED, "layer_types": _WINDOW_TYPES}, INTERLEAVED, "right"),
    ("qwen3", "biased, tied, windows", {"attention_bias": True, "tie_word_embeddings": True, **_WINDOWED},
     INTERLEAVED, "left"),
    ("bloom", "six heads have slopes, too", {"n_head": 6, "hidden_size": 48}, TP2, "right"),
    ("bloom", "recomputed", {"pretraining_tp": 2}, _RECOMPUTING, "left"),
    ("falcon", "7b with biases", _WITH_BIASES, RECOMPUTED, "left"),
    ("falcon", "40b", _40B, Layout(tp=4), "right"),
    ("falcon", "alibi, one key", {"alibi": True, "activation": "gelu_new"}, Layout(), "left"),
    # The window counts tokens, not position ids.
    ("mistral", "given positions", {}, TP2, "positions"),
    ("olmo2", "more ranks than keys", {}, _FOUR_TP, "right"),
    *((family, "", {}, Layout(), _NEWER[family]) for family in (*_STAGED, *_SHARDED)),
    *((family, "", {}, FOUR_RANKS, rows) for family, rows in _NEWER.items() if family not in _STAGED),
    ("gemma3_text", "scaled", {"rope_parameters": _GEMMA3_ROPE}, INTERLEAVED, "positions"),
    ("olmo2", "recomputed", {}, _RECOMPUTING, "left"),
    ("gpt_neox", "one after the other", {"use_parallel_residual": False, "attention_bias": False},
     INTERLEAVED, "right"),
    ("stablelm", "one norm", {"use_parallel_residual": True, "use_qkv_bias": False}, _RECOMPUTING, "left"),
    ("smollm3", "windows", {"use_sliding_window": True, "sliding_window": 5, "mlp_bias": True}, INTERLEAVED, "left"),
    ("granite", "tied, biased", dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), True),
     TP2, "left"),
    ("opt", "without biases", {"enable_bias": False, "tie_word_embeddings": False}, INTERLEAVED, "positions"),
    ("cohere", "biased", {"attention_bias": True}, _RECOMPUTING, "positions"),
    ("glm4", "without biases", {"attention_bias": False}, _FOUR_TP, "positions"),
    *(("llama", "", {}, layout, "left") for layout in (_A2A, _GATHER, _CP4, _CP_PP, replace(_CP_TP, recompute="full"))),
    *(("mistral", "", {}, layout, "positions") for layout in (_A2A, _GATHER, _CP_TP)),
    *(("bloom", "", {}, layout, "bare") for layout in (_A2A, _GATHER, _CP4)),
    *(("falcon", "rw", _RW, layout, "left") for layout in (_A2A, _CP_TP)),
    *(("ministral3", "", {}, layout, "positions") for layout in (_A2A, _CP_TP, RECOMPUTED)),
    ("ministral3", "", {"sliding_window": 5}, TP2, "right"),
    *(("apertus", "", {}, layout, "left") for layout in (_A2A, _CP_TP, TP2, _RECOMPUTING, INTERLEAVED)),
    ("apertus", "another activation", {"hidden_act": "relu2", "attention_bias": True}, FOUR_RANKS, "left"),
    *(("gpt2", "", {}, layout, "bare") for layout in (_CP4, _CP_TP, replace(_A2A, dp=2))),
)  # fmt: skip


def changes_of(family: str, variant: str) -> dict[str, Any]:
    """Return the config changes of a variant by its name in the cases."""
    return next(case[2] for case in (*CASES, *RARER_CASES) if case[:2] == (family, variant))


CONFIGS: dict[str, dict[str, Any]] = {
    f"{family} {variant}".strip(): {
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        **FAMILIES[family][1],
        **(changes_of(family, variant) if variant else {}),
    }
    for family, variant in (
        *((family, "") for family in FAMILIES),
        ("gpt2", "untied"),
        ("gpt_bigcode", "a key for each head"),
        ("llama", "tied, biased"),
        ("qwen2", "windows in later layers"),
        ("qwen3", "biased, tied, windows"),
        ("falcon", "7b with biases"),
        ("falcon", "40b"),
        ("falcon", "11b"),
        ("falcon", "rw"),
        ("gpt_neox", "one after the other"),
        ("smollm3", "windows"),
        ("stablelm", "one norm"),
        ("granite", "tied, biased"),
        ("opt", "without biases"),
    )
}
"""Configs of each family, and of variants with different weights."""


@pytest.mark.parametrize(
    ("family", "variant", "changes", "layout", "rows"),
    [
        pytest.param(*case, id=f"{case[0]} {case[1]}-{case[3]}-{case[4]}", marks=marks)
        for cases, marks in ((CASES, ()), (RARER_CASES, pytest.mark.exhaustive))
        for case in cases
    ],
)
def test_gpt_equals_hugging_face(
    family: str,
    variant: str,
    changes: dict[str, Any],
    layout: Layout,
    rows: str,
) -> None:
    check_family(gpt_model(family, changes), layout, rows_of(rows))


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_count_equals_hugging_face(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(config_object(CONFIGS[name]))
    assert total_parameters(model_config(CONFIGS[name])) == sum(
        p.numel() for p in hf_model.parameters()
    )


IGNORED_FIELDS: dict[str, str] = {
    "is about generation": "use_cache bos_token_id eos_token_id eod_token_id keys_to_ignore_at_inference",
    "is given by the attention mask; see Family in convert/family.py": "pad_token_id",
    "is about names": "attribute_map",
    "is for unsupported heads": (
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
    ),
    "is read for token_classification; see tests/families/test_heads.py": "classifier_dropout",
    "is about the rounding of 16-bit scores": (
        "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32"
    ),
    "is contained in sliding_window, layer_types, no_rope_layers or rope_parameters": (
        "use_sliding_window max_window_layers no_rope_layer_interval original_max_position_embeddings "
        "sliding_window_pattern"
    ),
    "is used only by families that read or refuse it": "embd_pdrop is_decoder",
    "is read if another field requires it": "pretraining_tp num_kv_heads num_ln_in_parallel_attn",
}
"""Config fields that are ignored, by reason."""


class _RecordingConfig:
    """A config object that records which fields are read."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.read = set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize(
    "model_type", sorted({config["model_type"] for config in CONFIGS.values()})
)
def test_every_config_field_is_read_checked_or_ignored_on_purpose(model_type: str) -> None:
    # New fields of a new transformers version fail here until they are handled.
    from transformers import CONFIG_MAPPING, PretrainedConfig

    family = family_of(model_type)
    read = set[str]()
    for fields in CONFIGS.values():
        if fields["model_type"] == model_type:
            recording = _RecordingConfig(config_object(fields))
            family.describe(recording)
            read |= recording.read
    config_class = CONFIG_MAPPING[model_type]
    own = {field.name for field in dataclasses.fields(config_class)}
    own -= {field.name for field in dataclasses.fields(PretrainedConfig)} - {"tie_word_embeddings"}
    read |= {config_class.attribute_map.get(name, name) for name in read}
    ignored = " ".join(IGNORED_FIELDS.values()).split()
    unhandled = own - read - family.required.keys() - set(ignored)
    assert not unhandled, f"unhandled fields of {model_type} configs: {sorted(unhandled)}"


def test_unknown_config_keys_are_ignored(tmp_path: Path) -> None:
    """Files may have any keys; transformers keeps unknown ones as attributes."""
    for family, foreign in (
        ("llama", {"sliding_window": 4, "dropout": 0.5}),
        ("bloom", {"rope_parameters": {}}),
    ):
        fields = {"model_type": family, "num_hidden_layers": 1}
        file = {**fields, **foreign, "logit_scale": 0.5, "layer_types": ["sliding_attention"]}
        (tmp_path / "config.json").write_text(json.dumps(file))
        assert model_config(tmp_path) == model_config(fields)


@pytest.mark.parametrize("model", [None, 5, [], object()])
def test_invalid_config_types_are_refused(model: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"model is an? {type(model).__name__}; give a Hugging Face config object"
    ):
        model_config(model)


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # Fields with a required value are in docs/families.md, which test_every_family.py compares with the registry.
    ("gpt2", "add_cross_attention=True of this gpt2 config changes the result", {"add_cross_attention": True}),
    ("gpt2", "activation 'quick_gelu'", {"activation_function": "quick_gelu"}),
    ("gpt2", "GPT2ForQuestionAnswering.* choose from causal_lm, sequence_.* GPT2ForTokenClassification", {
        "architectures": ["GPT2ForQuestionAnswering"],
    }),
    ("olmo2", "Olmo2ForTokenClassification' is unknown", {"architectures": ["Olmo2ForTokenClassification"]}),
    ("llama", "kv_channels=3 x rotary_percent=1.0 = 3 is odd", {"hidden_size": 12, "num_attention_heads": 4}),
    ("mistral", "num_key_value_heads|num_query_groups", {"num_attention_heads": 4, "num_key_value_heads": 3}),
    ("qwen2", "layer_types has 'chunked_attention'", {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}),
    ("qwen2", "use_sliding_window is not True", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
    ("mixtral", "num_experts_per_tok=1: expected at least 2", {"num_experts_per_tok": 1}),
    ("gemma2", "logits_softcap=-1.0 must be positive", {"final_logit_softcapping": -1.0}),
    ("gemma3_text", "rope_parameters of full_attention: .*'yarn'", {"rope_parameters": {"full_attention": {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 8,
    }}}),
    ("llama", "partial_rotary_factor=0.5", _rope("default", partial_rotary_factor=0.5)),
    ("ministral3", "partial_rotary_factor=0.5", _rope("default", partial_rotary_factor=0.5)),
    ("llama", "layernorm_epsilon=inf: expected a finite number", {"rms_norm_eps": float("inf")}),
    ("llama", "rotary_base=nan: expected a finite number", _rope("default", rope_theta=float("nan"))),
    ("phi3", "rotary_percent=0.0 = 0 is odd or 0", _rope("default", partial_rotary_factor=0.0)),
    ("ministral3", "llama_4_scaling_beta of rope_parameters: expected a number", _rope("default")),
    ("ministral3", "original_max_position_embeddings of rope_parameters: expected a number",
     _rope("default", llama_4_scaling_beta=0.1)),
    ("ministral3", "llama_4_scaling_beta=-1.0 must be at least 0", _rope(
        "default", llama_4_scaling_beta=-1.0, original_max_position_embeddings=8,
    )),
    ("llama", "activation 'xielu' is not supported", {"hidden_act": "xielu"}),
    ("gpt_neox", "hidden_dropout=0.1 of this gpt_neox config: expected 0.0", {"hidden_dropout": 0.1}),
    ("opt", "word_embed_proj_dim=512", {"word_embed_proj_dim": 512}),
    ("t5", "relative_attention_num_buckets=32: .* relative_attention_max_distance=16", {
        "relative_attention_max_distance": 16,
    }),
    ("roberta", r"post-LN.*model_type='megatron-bert'.*known families: .*llama", {}),
    ("umt5", "'umt5' is not a known model family; choose from apertus, bloom, .*falcon, .*llama, .*qwen3", {}),
    ("gpt2", r"quantization_config of the gpt2 config \(gptq\)", {"quantization_config": {"quant_method": "gptq"}}),
    *(("gpt2", "the gpt2 config is invalid|num_attention_heads=0 does not divide|is unknown", {name: value})
      for name, value in (("architectures", 5), ("architectures", [["x"]]), ("n_head", 0), ("n_inner", "x"))),
)  # fmt: skip
"""Family, message, and fields that are not supported."""


@pytest.mark.parametrize(("family", "message", "fields"), REFUSED)
def test_unsupported_config_fields_are_refused(
    family: str, message: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config({"model_type": family, **fields})


def test_unused_sliding_window_is_none() -> None:
    for fields in (
        {"sliding_window": 6, "max_window_layers": 0},
        {**_WINDOWED, "max_window_layers": 99},
    ):
        assert model_config({"model_type": "qwen2", **fields}).sliding_window is None
