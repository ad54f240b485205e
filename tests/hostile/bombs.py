"""Small files that claim to be large: one builder for each kind of size, count and length that a file can state.

Each builder damages a copy of the intact files of ``intact_files`` and returns the command that reads the result.
"""

import gzip
import io
import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
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
INSPECT_LEGACY = "inspect legacy"
CONVERT_HF = "convert --load-path hf --save-path new --to megatron"
PREPROCESS = "preprocess --output-prefix new --tokenizer tok --input"


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


# ---- pickles --------------------------------------------------------------------------------------------------------

_MEMO_INDEX = b"\x80\x02Nr\x00\x00\x00\x08."
"""None, stored under the memo's index 2 ** 27: the unpickler allocates a table of twice as many entries."""


def _shared_lists(depth: int) -> list[Any]:
    """A list of 2 ** depth items, of ``depth`` lists."""
    items: list[Any] = []
    for _ in range(depth):
        items = [items, items]
    return items


def memo_index(folder: Path) -> str:
    (folder / "core/.metadata").write_bytes(_MEMO_INDEX)
    return "inspect core"


def memo_index_in_a_checkpoint(folder: Path) -> str:
    (folder / "run.ckpt/.metadata").write_bytes(_MEMO_INDEX)
    update_checksums(folder / "run.ckpt")
    return INSPECT


def memo_index_as_text(folder: Path) -> str:
    (folder / "core/.metadata").write_bytes(b"Np134217728\n.")
    return "inspect core"


def _longest_shard(folder: Path) -> Path:
    return max((folder / "core").glob("*.distcp"), key=lambda file: file.name)


def _change_table(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "core/.metadata"
    table = pickle.loads(file.read_bytes())
    change(table)
    file.write_bytes(pickle.dumps(table))


def shared_lists(folder: Path) -> str:
    table = metadata.Metadata(state_dict_metadata={"a": _shared_lists(40)}, storage_data={})  # type: ignore[dict-item]
    (folder / "core/.metadata").write_bytes(pickle.dumps(table))
    return "inspect core"


def huge_shape(folder: Path) -> str:
    """A stack of 2 ** 40 layers."""

    def change(table: Any) -> None:
        entries = table.state_dict_metadata
        name = next(name for name in entries if ".layers." in name)
        entries[name].size = torch.Size([2**40, *entries[name].size[1:]])

    _change_table(folder, change)
    return CONVERT_CORE


def compressed_by_the_table(folder: Path) -> str:
    """An entry that the table says is compressed, which torch decompresses without limit."""
    import zstandard

    file = _longest_shard(folder)
    content = zstandard.compress(bytes(1 << 29), 1)
    offset = file.stat().st_size

    def change(table: Any) -> None:
        for entry in table.storage_data.values():
            entry.transform_descriptors = ("stream.zstd",)
            entry.relative_path, entry.offset, entry.length = file.name, offset, len(content)

    _change_table(folder, change)
    file.write_bytes(file.read_bytes() + content)
    return CONVERT_CORE


def _replace_entries(folder: Path, content: bytes) -> str:
    file = _longest_shard(folder)
    offset = file.stat().st_size

    def change(table: Any) -> None:
        for entry in table.storage_data.values():
            entry.relative_path, entry.offset, entry.length = file.name, offset, len(content)

    _change_table(folder, change)
    file.write_bytes(file.read_bytes() + content)
    return CONVERT_CORE


_BYTEARRAY = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x70\x85R."
"""``bytearray(0x70000000)``, which ``weights_only`` allows."""


def _archive(
    pickled: bytes, tensors: dict[str, bytes], compression: int = zipfile.ZIP_STORED
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


def bytearray_in_a_shard(folder: Path) -> str:
    return _replace_entries(folder, _archive(_BYTEARRAY, {}))


def deflated_shard(folder: Path) -> str:
    saved = io.BytesIO()
    torch.save(torch.zeros(1 << 29, dtype=torch.uint8), saved)
    with zipfile.ZipFile(io.BytesIO(saved.getvalue())) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        content = _archive(archive.read(name), {"0": bytes(1 << 29)}, zipfile.ZIP_DEFLATED)
    return _replace_entries(folder, content)


def tensor_of_a_length_in_a_shard(folder: Path) -> str:
    return _replace_entries(
        folder, _archive(b"\x80\x02ctorch\nTensor\nJ\x00\x00\x00\x70\x85R.", {})
    )


def storage_of_a_length_in_a_shard(folder: Path) -> str:
    storage = b"ctorch.storage\nUntypedStorage\n"
    return _replace_entries(
        folder, _archive(b"\x80\x02" + storage + b"J\x00\x00\x00\x70\x85R.", {})
    )


def encoded_in_common(folder: Path) -> str:
    """Hexadecimal digits of hexadecimal digits ..., 30 times."""
    text = b"X\x08\x00\x00\x00aaaaaaaa"
    encoded = b"c_codecs\nencode\n" * 31 + text + b"X\x06\x00\x00\x00latin1\x86R"
    encoded += b"X\x03\x00\x00\x00hex\x86R" * 30
    (folder / "core/common.pt").write_bytes(_archive(b"\x80\x02" + encoded + b".", {}))
    return "inspect core"


def nested_tuples_in_common(folder: Path) -> str:
    """A key of a dict that is a tuple of 2 ** 40 items, whose hash takes as long."""
    tuples = b"K\x01\x85q\x00" + b"0h\x00h\x00\x86q\x00" * 40
    (folder / "core/common.pt").write_bytes(_archive(b"\x80\x02}" + tuples + b"K\x01s.", {}))
    return "inspect core"


def numel_in_a_shard(folder: Path) -> str:
    saved = io.BytesIO()
    torch.save(torch.zeros(7, dtype=torch.uint8), saved)
    with zipfile.ZipFile(io.BytesIO(saved.getvalue())) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        pickled = archive.read(name).replace(b"K\x07", b"J\x00\x00\x00\x70")
    return _replace_entries(folder, _archive(pickled, {"0": bytes(7)}))


def repeated_tensor_in_a_shard(folder: Path) -> str:
    """A tensor of a billion elements of which one is stored: its strides are 0."""
    saved = io.BytesIO()
    torch.save(torch.zeros(1).expand(1 << 30), saved)
    return _replace_entries(folder, saved.getvalue())


def memo_index_in_common(folder: Path) -> str:
    (folder / "core/common.pt").write_bytes(_archive(_MEMO_INDEX, {}))
    return "inspect core"


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


def _change_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def labels(folder: Path) -> str:
    _change_json(folder / "hf/config.json", num_labels=50_000_000)
    return CONVERT_HF


def layers(folder: Path) -> str:
    _change_json(folder / "hf/config.json", n_layer=90_000)
    return CONVERT_HF


def layers_of_a_checkpoint(folder: Path) -> str:
    file = folder / "run.ckpt/meta.pt"
    meta = torch.load(file)
    meta["hugging_face_config"]["n_layer"] = 90_000
    meta["model_description"]["num_layers"] = 90_000
    torch.save(meta, file)
    update_checksums(folder / "run.ckpt")
    return CONVERT


def labels_of_a_checkpoint(folder: Path) -> str:
    file = folder / "run.ckpt/meta.pt"
    meta = torch.load(file)
    meta["hugging_face_config"]["num_labels"] = 50_000_000
    torch.save(meta, file)
    update_checksums(folder / "run.ckpt")
    return CONVERT


def _config(folder: Path, **fields: Any) -> str:
    (folder / "hf/config.json").write_text(json.dumps(fields))
    return CONVERT_HF


_LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 300}


def heads(folder: Path) -> str:
    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": 1 << 26,
        "num_key_value_heads": 1 << 26,
        "head_dim": 16,
    }
    return _config(folder, **_LLAMA, **fields)


def head_dim(folder: Path) -> str:
    return _config(folder, **_LLAMA, num_hidden_layers=2, num_attention_heads=1, head_dim=1 << 31)


def divisors(folder: Path) -> str:
    """The heads do not divide the hidden size, whose divisors the message would list."""
    return _config(folder, **{**_LLAMA, "hidden_size": 2**62, "num_attention_heads": 3})


def experts(folder: Path) -> str:
    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 10**8,
    }
    return _config(folder, **{**_LLAMA, "model_type": "mixtral"}, **fields)


def small_experts(folder: Path) -> str:
    fields = {
        "num_hidden_layers": 500,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 10**5,
    }
    return _config(
        folder,
        **{**_LLAMA, "model_type": "mixtral", "hidden_size": 2, "intermediate_size": 1},
        **fields,
    )


def most_layers(folder: Path) -> str:
    """As many layers as a config may have, which no file of weights has."""
    _change_json(folder / "hf/config.json", n_layer=1_000)
    return CONVERT_HF


def most_layers_to_train_from(folder: Path) -> str:
    _change_json(folder / "hf/config.json", n_layer=1_000)
    settings = _settings(folder)
    settings["model"]["init_args"] = {"model": "hf", "pretrained": True}
    return _fit(folder, yaml.safe_dump(settings))


_T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 300,
}


def most_layers_of_an_encoder_decoder(folder: Path) -> str:
    return _config(folder, **{**_T5, "num_layers": 1000, "num_decoder_layers": 1000})


def token_types(folder: Path) -> str:
    fields = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return _config(
        folder, model_type="megatron-bert", **fields, vocab_size=300, type_vocab_size=1 << 40
    )


def distances(folder: Path) -> str:
    distance = {
        "relative_attention_num_buckets": 1 << 40,
        "relative_attention_max_distance": 1 << 41,
    }
    return _config(folder, **_T5, **distance)


def dense_layers(folder: Path) -> str:
    fields = {"num_hidden_layers": 100_000, "num_attention_heads": 4, "layer_types": None}
    return _config(folder, **{**_LLAMA, "model_type": "qwen3_moe"}, **fields)


def buckets(folder: Path) -> str:
    return _config(folder, **_T5, relative_attention_num_buckets=1 << 40)


def vocabulary(folder: Path) -> str:
    _change_json(folder / "hf/config.json", vocab_size=1 << 40)
    return CONVERT_HF


def positions(folder: Path) -> str:
    _change_json(folder / "hf/config.json", n_positions=1 << 40)
    return CONVERT_HF


def sub_config_labels(folder: Path) -> str:
    _change_json(
        folder / "hf/config.json", text_config={"model_type": "llama", "num_labels": 50_000_000}
    )
    return CONVERT_HF


def nested_config(folder: Path) -> str:
    (folder / "hf/config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    return CONVERT_HF


def long_number(folder: Path) -> str:
    (folder / "hf/config.json").write_text(
        '{"model_type": "gpt2", "n_layer": ' + "9" * 4_000_000 + "}"
    )
    return CONVERT_HF


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

_INSPECT_TOKENS = "inspect corpus_text_document --tokenizer tok"


def token_id(folder: Path) -> str:
    file = folder / "tok/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["far"] = 4294967295
    file.write_text(json.dumps(content))
    return f"{PREPROCESS} text"


def token_id_in_settings(folder: Path) -> str:
    token = {
        "content": "far",
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    _change_json(folder / "tok/tokenizer_config.json", added_tokens_decoder={"4294967295": token})
    return f"{PREPROCESS} text"


def extra_ids(folder: Path) -> str:
    _change_json(
        folder / "tok/tokenizer_config.json", tokenizer_class="ByT5Tokenizer", extra_ids=30_000_000
    )
    return f"{PREPROCESS} text"


def extra_ids_of_t5(folder: Path) -> str:
    _change_json(
        folder / "tok/tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=30_000_000
    )
    return f"{PREPROCESS} text"


def madeup_words(folder: Path) -> str:
    _change_json(
        folder / "tok/tokenizer_config.json",
        tokenizer_class="XGLMTokenizer",
        num_madeup_words=30_000_000,
    )
    return f"{PREPROCESS} text"


def pegasus_offset(folder: Path) -> str:
    _change_json(
        folder / "tok/tokenizer_config.json", tokenizer_class="PegasusTokenizer", offset=30_000_000
    )
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


def _zst(file: Path, begin: bytes, size: int, end: bytes) -> None:
    import zstandard

    with file.open("wb") as stream, zstandard.ZstdCompressor(1).stream_writer(stream) as writer:
        writer.write(begin)
        for _ in range(size >> 24):
            writer.write(b"a" * (1 << 24))
        writer.write(end)


def zst_line(folder: Path) -> str:
    _zst(folder / "x.jsonl.zst", b'{"text": "', 1 << 29, b'"}\n')
    return f"{PREPROCESS} x.jsonl.zst"


def zst_blank_lines(folder: Path) -> str:
    import zstandard

    with (
        (folder / "x.jsonl.zst").open("wb") as stream,
        zstandard.ZstdCompressor(1).stream_writer(stream) as writer,
    ):
        for _ in range(32):
            writer.write(b"\n" * (1 << 24))
    return f"{PREPROCESS} x.jsonl.zst"


def zst_text(folder: Path) -> str:
    _zst(folder / "x.txt.zst", b"", 1 << 29, b"")
    return f"{PREPROCESS} x.txt.zst"


def gzip_line(folder: Path) -> str:
    with gzip.open(folder / "x.jsonl.gz", "wb", 1) as stream:
        stream.write(b'{"text": "')
        for _ in range(20):
            stream.write(b"a" * (1 << 24))
        stream.write(b'"}\n')
    return f"{PREPROCESS} x.jsonl.gz"


def gzip_text(folder: Path) -> str:
    with gzip.open(folder / "x.txt.gz", "wb", 1) as stream:
        for _ in range(20):
            stream.write(b"a" * (1 << 24))
    return f"{PREPROCESS} x.txt.gz"


def training_tokenizer(folder: Path) -> str:
    zst_text(folder)
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


def _fit(folder: Path, text: str) -> str:
    (folder / "fit.yaml").write_text(text)
    return "fit --config fit.yaml"


def aliases(folder: Path) -> str:
    return _fit(folder, _ALIASES + yaml.safe_dump(_settings(folder)))


def aliases_of_a_section(folder: Path) -> str:
    return _fit(folder, f"{_ALIASES}trainer: *a11\n")


def aliases_of_a_value(folder: Path) -> str:
    settings = _settings(folder)
    settings["trainer"]["callbacks"] = "ALIAS"
    return _fit(folder, _ALIASES + yaml.safe_dump(settings).replace("ALIAS", "*a11"))


def aliases_of_mappings(folder: Path) -> str:
    """Mappings of mappings, merged and not."""
    text = "a0: &a0 {x: 1}\n" + "".join(
        f"a{number}: &a{number} {{<<: *a{number - 1}, "
        + ", ".join(f"k{key}: *a{number - 1}" for key in range(9))
        + "}\n"
        for number in range(1, 12)
    )
    return _fit(folder, f"{text}model: *a11\n")


def alias_of_itself(folder: Path) -> str:
    return _fit(folder, "trainer: &a {callbacks: [*a]}\n")


def nested_yaml(folder: Path) -> str:
    return _fit(folder, "trainer: " + "[" * 100_000 + "]" * 100_000)


def _from_accelerate(folder: Path, text: str) -> str:
    (folder / "accelerate.yaml").write_text(text)
    return "config --from-accelerate accelerate.yaml --output new.yaml"


def aliases_of_accelerate(folder: Path) -> str:
    return _from_accelerate(folder, f"{_ALIASES}mixed_precision: *a11\n")


def aliases_of_accelerates_section(folder: Path) -> str:
    return _from_accelerate(
        folder, f"{_ALIASES}megatron_lm_config: {{megatron_lm_tp_degree: *a11}}\n"
    )


def nested_accelerate(folder: Path) -> str:
    return _from_accelerate(folder, "mixed_precision: " + "[" * 100_000 + "]" * 100_000)


BOMBS: dict[str, Bomb] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not name.startswith(("_", "make_"))
}
HARMLESS = {"sub_config_labels", "token_id_in_settings"}
"""Bombs that are read, as nothing is built from what they claim."""
