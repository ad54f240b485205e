"""Small files that claim to be large: one builder for each kind of size, count and length that a file can state.

Each builder damages a copy of the intact files of ``make_intact_files`` and returns the command that reads the result.
Tables hold those that differ only in what is written.
"""

import gzip
import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.distributed.checkpoint import metadata

from tests.checkpoint.damage import update_checksums
from tests.cli.command import run_here
from tests.cli.corpus import VOCAB_SIZE, configuration, make_corpus
from tests.models import GPT2

Bomb = Callable[[Path], str]
"""Changes the intact files in a directory; returns a command to run there."""

INSPECT = "inspect run.ckpt"
CONVERT = "convert --load-path run.ckpt --save-path new --to hf"
CONVERT_CORE = "convert --load-path core --save-path new --to hf --config hf"
INSPECT_CORE = "inspect core"
INSPECT_LEGACY = "inspect legacy"
_CONFIG = "hf/config.json"
CONVERT_HF = "convert --load-path hf --save-path new --to megatron"
PREPROCESS = "preprocess --output-prefix new --tokenizer tok --input"
FIT = "fit --config fit.yaml"
FROM_ACCELERATE = "config --from-accelerate accelerate.yaml --output new.yaml"


def make_intact_files(folder: Path) -> None:
    """Write a tiny GPT-2 in every format, its tokenizer and a dataset into ``folder``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    make_corpus(folder)
    sizes = {**GPT2, "n_layer": 2, "n_positions": 32, "vocab_size": VOCAB_SIZE}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder / "hf")
    shutil.copytree(folder / "tok", folder / "hf", dirs_exist_ok=True)
    convert = "convert --load-path hf --save-path"
    commands = [f"{convert} run.ckpt --to megatron", f"{convert} legacy --to megatron-legacy"]
    results = run_here(str(folder), [command.split() for command in commands])
    assert [code for code, _, _ in results] == [0, 0], results
    shutil.copytree(folder / "run.ckpt", folder / "core")
    for name in ("meta.pt", "checksums.json"):
        (folder / "core" / name).unlink()


def _write(
    name: str,
    content: bytes,
    command: str,
    folder: Path,
) -> str:
    (folder / name).write_bytes(content)
    return command


# ---- pickles --------------------------------------------------------------------------------------------------------

_MEMO_INDEX = b"\x80\x02Nr\x00\x00\x00\x08."
"""None, stored under the memo's index 2 ** 27: the unpickler allocates a table of twice as many entries."""


def _shared_lists(depth: int) -> list[Any]:
    """A list of 2 ** depth items, of ``depth`` lists."""
    items: list[Any] = []
    for _ in range(depth):
        items = [items, items]
    return items


def memo_index_in_a_checkpoint(folder: Path) -> str:
    (folder / "run.ckpt/.metadata").write_bytes(_MEMO_INDEX)
    update_checksums(folder / "run.ckpt")
    return INSPECT


def _longest_shard(folder: Path) -> Path:
    return max((folder / "core").glob("*.distcp"), key=lambda file: file.name)


def _change_table(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "core/.metadata"
    table = pickle.loads(file.read_bytes())
    change(table)
    file.write_bytes(pickle.dumps(table))


def huge_shape(folder: Path) -> str:
    """A stack of 2 ** 40 layers."""

    def change(table: Any) -> None:
        entries = table.state_dict_metadata
        name = next(name for name in entries if ".layers." in name)
        entries[name].size = torch.Size([2**40, *entries[name].size[1:]])

    _change_table(folder, change)
    return CONVERT_CORE


def _archive(
    pickled: bytes,
    tensors: Mapping[str, bytes] = MappingProxyType({}),
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/padding", bytes(100_000))  # beyond the size of every tensor
        for name, data in tensors.items():
            archive.writestr(f"archive/data/{name}", data)
    return content.getvalue()


def _saved(tensor: Tensor) -> bytes:
    content = io.BytesIO()
    torch.save(tensor, content)
    return content.getvalue()


def _pickled(tensor: Tensor) -> bytes:
    """The pickle within the archive of ``torch.save``."""
    with zipfile.ZipFile(io.BytesIO(_saved(tensor))) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def _replace_entries(content: bytes, folder: Path, *transforms: str) -> str:
    file = _longest_shard(folder)
    offset = file.stat().st_size

    def change(table: Any) -> None:
        for entry in table.storage_data.values():
            entry.relative_path = file.name
            entry.offset = offset
            entry.length = len(content)
            if transforms:
                entry.transform_descriptors = transforms

    _change_table(folder, change)
    file.write_bytes(file.read_bytes() + content)
    return CONVERT_CORE


_SHARDS = {
    # ``bytearray(0x70000000)``, which ``weights_only`` allows.
    "bytearray": _archive(b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x70\x85R."),
    "tensor_of_a_length": _archive(b"\x80\x02ctorch\nTensor\nJ\x00\x00\x00\x70\x85R."),
    "storage_of_a_length": _archive(
        b"\x80\x02ctorch.storage\nUntypedStorage\nJ\x00\x00\x00\x70\x85R."
    ),
    "numel": _archive(
        _pickled(torch.zeros(7, dtype=torch.uint8)).replace(b"K\x07", b"J\x00\x00\x00\x70"),
        {"0": bytes(7)},
    ),
    # A billion elements of which one is stored: the strides are 0.
    "repeated_tensor": _saved(torch.zeros(1).expand(1 << 30)),
}
"""Content of every entry of the shards."""


def deflated_shard(folder: Path) -> str:
    pickled = _pickled(torch.zeros(1 << 29, dtype=torch.uint8))
    return _replace_entries(
        _archive(pickled, {"0": bytes(1 << 29)}, zipfile.ZIP_DEFLATED),
        folder,
    )


def compressed_by_the_table(folder: Path) -> str:
    """An entry that the table says is compressed, which torch decompresses without limit."""
    import zstandard

    return _replace_entries(zstandard.compress(bytes(1 << 29), 1), folder, "stream.zstd")


# Hexadecimal digits of hexadecimal digits ..., 30 times.
_ENCODED = b"c_codecs\nencode\n" * 31 + b"X\x08\x00\x00\x00aaaaaaaaX\x06\x00\x00\x00latin1\x86R"
_ENCODED += b"X\x03\x00\x00\x00hex\x86R" * 30
# A tuple of 2 ** 40 items, whose hash takes as long.
_NESTED_TUPLES = b"K\x01\x85q\x00" + b"0h\x00h\x00\x86q\x00" * 40
_COMMON = {
    "memo_index": _MEMO_INDEX,
    "encoded": b"\x80\x02" + _ENCODED + b".",
    "nested_tuples": b"\x80\x02}" + _NESTED_TUPLES + b"K\x01s.",
}
"""Pickles of the unsharded state."""

_TABLES = {
    "memo_index": _MEMO_INDEX,
    "memo_index_as_text": b"Np134217728\n.",
    "shared_lists": pickle.dumps(
        metadata.Metadata(state_dict_metadata={"a": _shared_lists(40)}, storage_data={})  # type: ignore[dict-item]
    ),
}
"""Content of .metadata."""

_META: dict[str, dict[str, dict[str, int]]] = {
    "layers": {
        "hugging_face_config": {"n_layer": 90_000},
        "model_description": {"num_layers": 90_000},
    },
    "labels": {"hugging_face_config": {"num_labels": 50_000_000}},
}
"""Changes of a checkpoint's meta.pt."""


def _change_meta(changes: dict[str, dict[str, int]], folder: Path) -> str:
    file = folder / "run.ckpt/meta.pt"
    meta = torch.load(file)
    for section, fields in changes.items():
        meta[section] |= fields
    torch.save(meta, file)
    update_checksums(folder / "run.ckpt")
    return CONVERT


class _Enum:
    """Pickled as a call of a class of Megatron-LM."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        from megatron.core.enums import ModelType

        return ModelType, (self.value,)


def nested_stand_ins(folder: Path) -> str:
    """Stand-ins that hold each other twice, so that their text doubles with each."""
    value: Any = _Enum(1)
    for _ in range(26):
        value = _Enum((value, value))
    file = next((folder / "legacy").rglob("*.pt"))
    state = torch.load(file, weights_only=False)
    state["args"].model_type = value
    torch.save(state, file)
    return INSPECT_LEGACY


def deflated_legacy(folder: Path) -> str:
    file = next((folder / "legacy").rglob("*.pt"))
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in entries.items():
            archive.writestr(name, bytes(1 << 29) if name.endswith("/data/0") else data)
    return INSPECT_LEGACY


def zip_of_a_checkpoint(folder: Path) -> str:
    """NVIDIA's zip of a checkpoint, whose only member is 256 MB of zeros."""
    member = "release/mp_rank_00/model_optim_rng.pt"
    with (
        zipfile.ZipFile(
            folder / "release.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive,
        archive.open(member, "w", force_zip64=True) as stream,
    ):
        for _ in range(4):
            stream.write(bytes(1 << 26))
    return "inspect release.zip"


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def _change_json(
    name: str,
    fields: dict[str, Any],
    command: str,
    folder: Path,
) -> str:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return command


_FIELDS: dict[str, dict[str, Any]] = {
    "labels": {"num_labels": 50_000_000},
    "layers": {"n_layer": 90_000},
    # As many layers as a config may have, which no file of weights has.
    "most_layers": {"n_layer": 1_000},
    "vocabulary": {"vocab_size": 1 << 40},
    "positions": {"n_positions": 1 << 40},
    "sub_config_labels": {"text_config": {"model_type": "llama", "num_labels": 50_000_000}},
}
"""Changes of GPT-2's config.json."""

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "num_key_value_heads": 2}
_T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 300,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "heads": {
        **_LLAMA,
        "num_attention_heads": 1 << 26,
        "num_key_value_heads": 1 << 26,
        "head_dim": 16,
    },
    "head_dim": {**_LLAMA, "num_attention_heads": 1, "head_dim": 1 << 31},
    # The heads do not divide the hidden size, whose divisors the message would list.
    "divisors": {**_LLAMA, "hidden_size": 2**62, "num_attention_heads": 3},
    "experts": {**_MIXTRAL, "num_local_experts": 10**8},
    "small_experts": {
        **_MIXTRAL,
        "hidden_size": 2,
        "intermediate_size": 1,
        "num_hidden_layers": 500,
        "num_local_experts": 10**5,
    },
    "most_layers_of_an_encoder_decoder": {**_T5, "num_layers": 1000, "num_decoder_layers": 1000},
    "token_types": {**_LLAMA, "model_type": "megatron-bert", "type_vocab_size": 1 << 40},
    "distances": {
        **_T5,
        "relative_attention_num_buckets": 1 << 40,
        "relative_attention_max_distance": 1 << 41,
    },
    "dense_layers": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 100_000,
        "num_attention_heads": 4,
        "layer_types": None,
    },
    "buckets": {**_T5, "relative_attention_num_buckets": 1 << 40},
}
"""Whole configs."""
_TEXTS_OF_CONFIGS = {
    **{name: json.dumps(fields) for name, fields in _CONFIGS.items()},
    "nested_config": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "long_number": '{"model_type": "gpt2", "n_layer": ' + "9" * 4_000_000 + "}",
}


def most_layers_to_train_from(folder: Path) -> str:
    _change_json(_CONFIG, {"n_layer": 1_000}, "", folder)
    settings = _settings(folder)
    settings["model"]["init_args"] = {"model": "hf", "pretrained": True}
    return _fit(yaml.safe_dump(settings), folder)


def index_of_weights(folder: Path) -> str:
    """An index with many tensors in one file: 20 MB, of which the message must not hold every name."""
    (folder / "hf/model.safetensors").unlink()
    names = {f"h.{number}.w": "missing.safetensors" for number in range(100_000)}
    (folder / "hf/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return CONVERT_HF


def safetensors_header(folder: Path) -> str:
    (folder / "hf/model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    return CONVERT_HF


def safetensors_layers(folder: Path) -> str:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "hf/model.safetensors")
    tensors["h.999999999.ln_1.weight"] = torch.zeros(2)
    save_file(tensors, folder / "hf/model.safetensors", {"format": "pt"})
    return CONVERT_HF


def legacy_layers(folder: Path) -> str:
    file = next((folder / "legacy").rglob("*.pt"))
    state = torch.load(file, weights_only=False)
    del state["args"].hugging_face_config
    layers = state["model"]["language_model"]["encoder"]
    layers["layers.999999998.input_layernorm.weight"] = torch.zeros(16)
    torch.save(state, file)
    return "convert --load-path legacy --save-path new --to hf"


def adapter_rank(folder: Path) -> str:
    from safetensors.torch import save_file

    adapter = folder / "adapter"
    adapter.mkdir()
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
    save_file({name: torch.zeros(1, 16)}, adapter / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(folder / "hf"),
        "r": 1 << 40,
        "lora_alpha": 1,
    }
    (adapter / "adapter_config.json").write_text(
        json.dumps({**fields, "lora_dropout": 0.0, "bias": "none"})
    )
    return "convert --load-path adapter --save-path new --to hf"


# ---- tokenizers -----------------------------------------------------------------------------------------------------

_TOKENIZERS: dict[str, dict[str, Any]] = {
    "token_id_in_settings": {
        "added_tokens_decoder": {
            "4294967295": {
                "content": "far",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            }
        }
    },
    "extra_ids": {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 30_000_000},
    "extra_ids_of_t5": {"tokenizer_class": "T5Tokenizer", "extra_ids": 30_000_000},
    "madeup_words": {"tokenizer_class": "XGLMTokenizer", "num_madeup_words": 30_000_000},
    "pegasus_offset": {"tokenizer_class": "PegasusTokenizer", "offset": 30_000_000},
}
"""Changes of tokenizer_config.json."""


def token_id(folder: Path) -> str:
    file = folder / "tok/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = 4294967295
    file.write_text(json.dumps(content))
    return f"{PREPROCESS} text"


def labels_beside_a_tokenizer(folder: Path) -> str:
    """transformers reads config.json beside a tokenizer whose class its own configuration does not name."""
    file = folder / "tok/tokenizer_config.json"
    fields = json.loads(file.read_text())
    del fields["tokenizer_class"]
    file.write_text(json.dumps(fields))
    (folder / "tok/config.json").write_text(
        json.dumps({"model_type": "gpt2", "num_labels": 50_000_000})
    )
    return f"{PREPROCESS} text"


# ---- text -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Text:
    """A compressed file of ``blocks`` times 16 MiB of one letter."""

    name: str
    begin: bytes = b""
    letter: bytes = b"a"
    blocks: int = 32
    end: bytes = b""

    def __call__(self, folder: Path) -> str:
        import zstandard

        file = folder / self.name
        compressor = zstandard.ZstdCompressor(1)
        is_zst = file.suffix == ".zst"
        with (
            zstandard.open(file, "wb", compressor) if is_zst else gzip.open(file, "wb", 1) as stream
        ):
            stream.write(self.begin)
            for _ in range(self.blocks):
                stream.write(self.letter * (1 << 24))
            stream.write(self.end)
        return f"{PREPROCESS} {self.name}"


_TEXTS = {
    "zst_line": _Text(name="x.jsonl.zst", begin=b'{"text": "', end=b'"}\n'),
    "zst_blank_lines": _Text(name="x.jsonl.zst", letter=b"\n"),
    "zst_text": _Text(name="x.txt.zst"),
    "gzip_line": _Text(
        name="x.jsonl.gz",
        begin=b'{"text": "',
        end=b'"}\n',
        blocks=20,
    ),
    "gzip_text": _Text(name="x.txt.gz", blocks=20),
}


def training_tokenizer(folder: Path) -> str:
    _TEXTS["zst_text"](folder)
    return "train-tokenizer --vocab-size 300 --output newtok --input x.txt.zst"


def parquet_dictionary(folder: Path) -> str:
    """2,048 rows that all refer to one text of 400 kB."""
    import pyarrow
    import pyarrow.parquet

    indices = pyarrow.array([0] * 2048, pyarrow.int32())
    array = pyarrow.DictionaryArray.from_arrays(indices, ["a" * 400_000])
    pyarrow.parquet.write_table(
        pyarrow.table({"text": array}), folder / "x.parquet", compression="zstd", store_schema=False
    )
    return f"{PREPROCESS} x.parquet"


def parquet_page(folder: Path) -> str:
    """One text of half a gigabyte in a compressed page."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["a" * (1 << 29)]})
    pyarrow.parquet.write_table(
        table,
        folder / "x.parquet",
        compression="zstd",
        use_dictionary=False,
        store_schema=False,
        write_statistics=False,
    )
    return f"{PREPROCESS} x.parquet"


# ---- datasets and caches --------------------------------------------------------------------------------------------


def index_counts(folder: Path) -> str:
    file = folder / "corpus_text_document.idx"
    data = bytearray(file.read_bytes())
    data[18:26] = struct.pack("<Q", 1 << 60)
    file.write_bytes(data)
    return "inspect corpus_text_document"


# ---- YAML -----------------------------------------------------------------------------------------------------------

_ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n" for number in range(1, 12)
)
"""The last list has 9 ** 11 lists."""


def _settings(folder: Path) -> dict[str, Any]:
    settings = configuration(folder / "corpus_text_document", folder)
    settings["trainer"]["logger"] = False
    return settings


def _fit(text: str, folder: Path) -> str:
    return _write("fit.yaml", text.encode(), FIT, folder)


def aliases(folder: Path) -> str:
    return _fit(_ALIASES + yaml.safe_dump(_settings(folder)), folder)


def aliases_of_a_value(folder: Path) -> str:
    settings = _settings(folder)
    settings["trainer"]["callbacks"] = "ALIAS"
    return _fit(_ALIASES + yaml.safe_dump(settings).replace("ALIAS", "*a11"), folder)


_ALIASES_OF_MAPPINGS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{number}: &a{number} {{<<: *a{number - 1}, "
    + ", ".join(f"k{key}: *a{number - 1}" for key in range(9))
    + "}\n"
    for number in range(1, 12)
)
"""Mappings of mappings, merged and not."""
_SETTINGS = {
    "aliases_of_a_section": f"{_ALIASES}trainer: *a11\n",
    "aliases_of_mappings": f"{_ALIASES_OF_MAPPINGS}model: *a11\n",
    "alias_of_itself": "trainer: &a {callbacks: [*a]}\n",
    "number_to_base_60": f"trainer: 1{':1' * 500_000}\n",
    "nested_yaml": "trainer: " + "[" * 100_000 + "]" * 100_000,
}
_ACCELERATE = {
    "aliases_of_accelerate": f"{_ALIASES}mixed_precision: *a11\n",
    "aliases_of_accelerates_section": (
        f"{_ALIASES}megatron_lm_config: {{megatron_lm_tp_degree: *a11}}\n"
    ),
    "accelerates_number_to_base_60": f"mixed_precision: 1{':1' * 500_000}\n",
    "nested_accelerate": "mixed_precision: " + "[" * 100_000 + "]" * 100_000,
}


def _table() -> Iterator[tuple[str, Bomb]]:
    for name, pickled in _TABLES.items():
        yield name, partial(_write, "core/.metadata", pickled, INSPECT_CORE)
    for name, pickled in _COMMON.items():
        content = _archive(pickled)
        yield f"{name}_in_common", partial(_write, "core/common.pt", content, INSPECT_CORE)
    for name, content in _SHARDS.items():
        yield f"{name}_in_a_shard", partial(_replace_entries, content)
    for name, changes in _META.items():
        yield f"{name}_of_a_checkpoint", partial(_change_meta, changes)
    for name, fields in _FIELDS.items():
        yield name, partial(_change_json, _CONFIG, fields, CONVERT_HF)
    for name, fields in _TOKENIZERS.items():
        yield name, partial(_change_json, "tok/tokenizer_config.json", fields, f"{PREPROCESS} text")
    for name, text in _TEXTS_OF_CONFIGS.items():
        yield name, partial(_write, _CONFIG, text.encode(), CONVERT_HF)
    for name, text in _SETTINGS.items():
        yield name, partial(_fit, text)
    for name, text in _ACCELERATE.items():
        yield name, partial(_write, "accelerate.yaml", text.encode(), FROM_ACCELERATE)


BOMBS: dict[str, Bomb] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not name.startswith(("_", "make_"))
}
BOMBS |= _TEXTS
BOMBS |= dict(_table())
HARMLESS = {"sub_config_labels", "token_id_in_settings"}
"""Bombs that are read, as nothing is built from what they claim."""
