"""Convert checkpoints through a live model on the CPU: load it from any format, save it to any format.

One process holds the full model in memory once; under ``torchrun`` each process holds its shard of the tp x pp layout.
Everything that can be checked without reading weights is checked first. The target is written under a temporary name
and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from lightning_megatron.checkpoint.host_buffer import HostBuffer
from lightning_megatron.checkpoint.save import Save
from lightning_megatron.checkpoint.state import RunState
from lightning_megatron.convert import ConvertOptions, Format
from lightning_megatron.convert.companions import companion_files, copy_companions
from lightning_megatron.convert.formats import open_source
from lightning_megatron.convert.hugging_face import hugging_face_names
from lightning_megatron.convert.hugging_face_saving import (
    save_hugging_face,
    size_in_bytes,
    staged_directory,
)
from lightning_megatron.convert.megatron_lm_saving import save_megatron_lm, split_layers
from lightning_megatron.convert.peft import check_expert_format, save_adapter
from lightning_megatron.convert.registry import config_for_task, differences, family_of
from lightning_megatron.convert.shards import TIMEOUT, Key
from lightning_megatron.convert.source import ModelSource
from lightning_megatron.convert.torch_dist import COMPANIONS
from lightning_megatron.convert.weight_loader import WeightLoader, check_overflow
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.engine import groups
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.runtime import Runtime, unchanged_environment
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import CheckpointError, ConfigError, require_choice, require_number
from lightning_megatron.models.build import build_chunks
from lightning_megatron.models.config import ModelConfig, variant_of
from lightning_megatron.models.layout import check_layout
from lightning_megatron.models.lora import merged
from lightning_megatron.planning.startup import check_host_memory
from lightning_megatron.storage.hub import local_folder

_log = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Values of ``--dtype``."""


def convert(options: ConvertOptions, average_with: Sequence[Path] = ()) -> str:
    """Convert a checkpoint to another format or layout, on the CPU and without running code of the checkpoint.

    Collective over the world: under ``torchrun`` each of the tp x pp processes must call.

    Args:
        options: Source, target and format.
        average_with: Further checkpoints of the same model, of any format; the mean of all is written.

    Returns:
        Name of the source format, for messages.

    Raises:
        ConfigError: If the options conflict with each other or with the model.
        CheckpointError: If the source is missing, damaged, unsafe or of an unknown format, or the target cannot be
            written; ``save_path`` is then unchanged.
    """
    world = _world_size()
    layout = _check_options(options, world)
    if options.tokenizer is not None:
        options = replace(options, tokenizer=local_folder(options.tokenizer, "tokenizer"))
    save_path = _check_paths(options)
    source = _open(options.load_path, options, options.iteration)
    if options.to != "hf":
        padding = options.make_vocab_size_divisible_by
        padded = replace(source.model, make_vocab_size_divisible_by=padding)
        source = replace(source, model=padded)
    _check_model(source, options, layout)
    others = _open_others(average_with, source, options)
    live_layout = ParallelConfig()
    if world > 1:
        live_layout = layout
    with live_engine(live_layout) as (runtime, topology):
        chunks = build_on_cpu(source.model, topology.parallel)
        loader = WeightLoader(chunks, source.model, source.parts)
        _check_missing(source, options, loader.missing)
        with staged_directory(save_path) as folder:
            dtype = None
            if options.dtype is not None:
                dtype = _DTYPES[options.dtype]
            if others:
                loader.fill(as_stored=True)
                _average(chunks, loader, source.model, others, dtype)
            else:
                loader.fill(as_stored=True, dtype=dtype)
            companions = companion_files(source.companions, options.tokenizer)
            if options.to == "peft":
                save_adapter(chunks, source.model, folder, source.base, options.expert_format)
            elif options.to == "megatron":
                _save_megatron(chunks, source, runtime, topology, folder)
                _copy_on_first_rank(companions, folder / COMPANIONS)
            else:
                # These formats have no adapters.
                model = replace(source.model, lora=None, lora_dropout=0.0)
                with merged(chunks):
                    if options.to == "hf":
                        save_hugging_face(
                            chunks,
                            model,
                            source.hf_config,
                            folder,
                            max_shard_size=options.max_shard_size,
                            companions=companions,
                            without=loader.missing,
                        )
                    else:
                        rank = None
                        if world > 1:
                            rank = (topology.tp_rank, topology.pp_rank)
                        with raise_on_all_ranks():
                            save_megatron_lm(chunks, source, model, layout, folder, rank)
                        _copy_on_first_rank(companions, folder)
    return source.kind


def _open(
    path: Path,
    options: ConvertOptions,
    iteration: int | None = None,
) -> ModelSource:
    return open_source(path, options.config, iteration, options.base, ema=options.ema)


def _open_others(
    paths: Sequence[Path],
    source: ModelSource,
    options: ConvertOptions,
) -> list[ModelSource]:
    """Open the checkpoints to average with ``source``, and check that they are of the same model."""
    others = []
    for path in paths:
        other = _open(path, options)
        _check_same_model(other, source)
        others.append(other)
    if options.to == "peft":
        _check_same_base(others, source)
    return others


def _copy_on_first_rank(companions: Sequence[Path], folder: Path) -> None:
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            copy_companions(companions, folder)


def _check_same_model(source: ModelSource, first: ModelSource) -> None:
    """Check that both checkpoints hold the same model, apart from vocabulary padding.

    Raises:
        CheckpointError: If the models differ.
    """
    padding = first.model.make_vocab_size_divisible_by
    padded = replace(source.model, make_vocab_size_divisible_by=padding)
    names = differences(padded.to_dict(), first.model.to_dict())
    if names:
        raise CheckpointError(
            f"{source.path}: expected the model of {first.path} to average with, got one with other {', '.join(names)}"
        )


def _check_same_base(sources: Sequence[ModelSource], first: ModelSource) -> None:
    """Check that adapters to average belong to one base model: the mean of them holds no weights of the bases.

    Raises:
        CheckpointError: If two of the checkpoints record different bases.
    """
    for source in sources:
        if source.base is None or first.base is None:
            continue
        if Path(source.base).resolve() != Path(first.base).resolve():
            raise CheckpointError(
                f"{source.path}: expected the base {first.base} of {first.path}, got {source.base}; use to=hf, which "
                "averages the bases, too"
            )


@torch.no_grad()
def _average(
    chunks: list[Any],
    first: WeightLoader,
    model: ModelConfig,
    sources: Sequence[ModelSource],
    dtype: torch.dtype | None,
) -> None:
    """Average the weights that ``first`` has filled with those of ``sources``, in place.

    Sums are fp32, of fp64 weights fp64; the mean is stored in ``dtype``, or if None in the dtypes of the first
    checkpoint.

    Raises:
        CheckpointError: If a file is damaged, only some of the checkpoints have a head, or a mean overflows ``dtype``.
    """
    named = first.filled()
    weights = [weight for _, weight in named]
    dtypes = [weight.dtype for weight in weights]
    sums = [_sum_of_one(weight) for weight in weights]
    for source in sources:
        loader = WeightLoader(chunks, model, source.parts)
        if loader.missing != first.missing:
            raise CheckpointError(
                f"{source.path}: expected the tensors of the first checkpoint, got other ones"
            )
        loader.fill(as_stored=True)
        for total, weight in zip(sums, weights, strict=True):
            total += weight
    with raise_on_all_ranks():
        for (key, weight), total, stored_dtype in zip(named, sums, dtypes, strict=True):
            mean = total / (len(sources) + 1)
            weight.data = mean.to(dtype or stored_dtype)
            check_overflow(key, mean, weight)


def _sum_of_one(weight: torch.Tensor) -> torch.Tensor:
    """A sum that begins with ``weight``: always a copy, as the next ``fill`` gives the weight other values."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype, copy=True)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_options(options: ConvertOptions, world: int) -> ParallelConfig:
    """Check the options that need no file.

    Returns:
        Layout of the target or, under ``torchrun``, of the processes.

    Raises:
        ConfigError: If an option is invalid, or would have no effect.
    """
    require_choice("to", options.to, get_args(Format))
    if options.dtype is not None:
        require_choice("dtype", options.dtype, _DTYPES)
    size_in_bytes(options.max_shard_size)
    require_number("make_vocab_size_divisible_by", options.make_vocab_size_divisible_by, 1)
    useless = [] if options.to == "hf" else ["max_shard_size"]
    if options.to != "peft":
        useless.append("expert_format")
    if options.to in ("hf", "peft"):
        if world == 1:  # under torchrun these options apply to any target
            useless += ["tp", "pp", "vpp"]
        useless.append("make_vocab_size_divisible_by")
    for name in useless:
        value = getattr(options, name)
        if value != type(options).__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={value} would do nothing with to={options.to}; leave it out")
    layout = ParallelConfig(
        tp=options.tp,
        pp=options.pp,
        vpp=options.vpp,
        num_microbatches=max(1, options.pp),
    )
    if world > 1 and layout.model_parallel_size != world:
        raise ConfigError(
            f"tp={options.tp} x pp={options.pp}: expected the {world} processes of torchrun, got "
            f"{layout.model_parallel_size}; change tp, pp or the number of processes"
        )
    return layout


def _check_paths(options: ConvertOptions) -> Path:
    """Check that the target does not exist or is an empty directory.

    Returns:
        ``save_path``, absolute, symbolic links resolved.

    Raises:
        ConfigError: If the target is a file or a directory that is not empty.
    """
    save_path = options.save_path.resolve()
    is_folder = save_path.is_dir()
    is_empty = is_folder and not any(save_path.iterdir())
    if os.path.lexists(save_path) and not is_empty:
        kind = "is not empty" if is_folder else "is a file"
        raise ConfigError(f"save_path={options.save_path} {kind}; give a new name, or remove it")
    return save_path


def _check_model(source: ModelSource, options: ConvertOptions, layout: ParallelConfig) -> None:
    """Check whether the target format and layout can hold the model.

    Raises:
        ConfigError: If tp does not divide the heads, there are fewer layers than pp x vpp, the target format cannot
            hold the model, or the tokenizer has more tokens than the vocabulary.
        CheckpointError: If Hugging Face has no such model, or there are no adapters to write.
    """
    model = source.model
    # In one process layers need not divide: the rule for pp concerns training only.
    split = layout
    if _world_size() == 1:
        split = replace(layout, pp=1, vpp=None)
    check_layout(model, split)
    stages = layout.pp * layout.num_model_chunks
    layers = model.num_layers + model.num_decoder_layers
    if stages > layers:
        raise ConfigError(
            f"pp={layout.pp} x vpp={layout.num_model_chunks} = {stages} stages are more than the {layers} layers of "
            "this model; use fewer"
        )
    if options.to == "hf":
        family_of(model.family).class_of(model.task)
    if options.to == "megatron-legacy":
        _check_legacy_model(model, layout)
    if options.to == "peft" and model.lora is None:
        raise CheckpointError(
            f"{source.path}: expected a model with adapters (LoRA), got one without; use --to hf"
        )
    if options.to == "peft":
        check_expert_format(model, options.expert_format)
    described = family_of(model.family).model_config(source.hf_config, model.task)
    if options.to == "hf" and variant_of(described, model.to_dict()) != described:
        raise CheckpointError(
            f"{source.path}: expected a model that Hugging Face's {model.family} computes, got one with "
            f"position_embedding_type={model.position_embedding_type} and num_query_groups={model.num_query_groups}; "
            "convert it --to megatron or --to megatron-legacy"
        )
    if options.tokenizer is not None:
        check_vocabulary(load_tokenizer(options.tokenizer), options.tokenizer, model.vocab_size)


def _check_legacy_model(model: ModelConfig, layout: ParallelConfig) -> None:
    if model.experts is not None:
        raise ConfigError(
            "to=megatron-legacy: expected a model without experts, which that format cannot hold, got "
            f"{model.family}; use to=megatron or to=hf"
        )
    if model.latent_attention is not None:
        raise ConfigError(
            "to=megatron-legacy: expected keys and values with projections of their own, got latent attention "
            f"({model.family}), which that format does not know; use to=megatron or to=hf"
        )
    if model.linear_attention is not None or model.attention_output_gate:
        raise ConfigError(
            "to=megatron-legacy: expected attention without gates in every layer, got linear attention or gates "
            f"({model.family}), which that format does not know; use to=megatron or to=hf"
        )
    if model.architecture == "gpt" and not model.has_output_layer:
        raise ConfigError(
            f"to=megatron-legacy: expected a language model, as Megatron-LM's GPTs have no other heads, got one for "
            f"task={model.task!r}; use to=megatron or to=hf"
        )
    split_layers(model, layout)
    if _world_size() > 1 and model.architecture == "t5" and layout.pp > 1:
        raise ConfigError(
            f"pp={layout.pp}: Megatron-LM splits an encoder-decoder at other layers than torchrun's processes; "
            "convert it in one process"
        )


def _check_missing(
    source: ModelSource,
    options: ConvertOptions,
    missing: frozenset[Key],
) -> None:
    if not missing:
        return
    names = ", ".join(hugging_face_names(missing, source.model))
    if options.to != "hf":
        raise CheckpointError(
            f"{source.path} lacks tensors of its head ({names}), and to={options.to} needs all weights; convert it "
            "to=hf, or train from it directly (pretrained=True initializes a new head)"
        )
    _log.warning("not in %s and left out: %s", source.path, names)


# ---- the live model -------------------------------------------------------------------------------------------------


def _world_size() -> int:
    """World size: of the initialized process group, else of torchrun, else 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"])
    return 1


@contextlib.contextmanager
def live_engine(layout: ParallelConfig) -> Iterator[tuple[Runtime, groups.Topology]]:
    """Initialize the engine on the CPU; creates a process group if there is none, and destroys it on exit."""
    is_own = not dist.is_initialized()
    if is_own and _world_size() > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    elif is_own:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        topology = groups.initialize(layout, TIMEOUT)
        runtime = Runtime(torch.device("cpu"))
        runtime.seed(1, topology.pp_rank)
        with runtime.active():
            yield runtime, topology
    finally:
        if is_own:
            groups.destroy()
            dist.destroy_process_group()


def build_on_cpu(model: ModelConfig, layout: ParallelConfig) -> list[Any]:
    """Build this rank's model chunks; their weights take no memory until they are filled.

    Raises:
        ConfigError: If the filled weights would not fit in host memory.
    """
    settings = EngineSettings(
        parallel=layout,
        params_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    # Stored weights have two bytes or more each.
    check_host_memory(model, replace(settings, params_dtype=torch.bfloat16), 1)
    with unchanged_environment():
        return list(build_chunks(model, settings))


def _save_megatron(
    chunks: list[Any],
    source: ModelSource,
    runtime: Runtime,
    topology: groups.Topology,
    folder: Path,
) -> None:
    """Write a ``*.ckpt`` without optimizer state: usable to initialize a run, not to resume one."""
    model = source.model
    config = config_for_task(source.hf_config, model)
    run = RunState(
        chunks=chunks,
        optimizer=None,
        runtime=runtime,
        topology=topology,
        model_description=model.to_dict(),
        hugging_face_config=json.loads(config.to_json_string()),
    )
    lightning = {
        "epoch": 0,
        "global_step": source.iteration,
        "state_dict": {},
        "pytorch-lightning_version": version("lightning"),
    }
    save = Save(run, lightning, folder)
    save.start(HostBuffer(in_place=True))
    save.finish()
