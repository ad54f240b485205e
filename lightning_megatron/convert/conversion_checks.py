"""What can be wrong with a conversion before a weight is read? Options, paths, sizes, space on the disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

from lightning_megatron.convert.companions import tokenizer_files
from lightning_megatron.convert.directory import size_in_bytes
from lightning_megatron.convert.options import ConvertOptions, Format
from lightning_megatron.convert.pieces import names_of
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.shapes import rules_by_name, tensor_shapes
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.convert.targets.casting import dtype_of
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import variant_of

_OF_LAYOUTS = "a Hugging Face model directory is whole"
_ONLY_FOR = {
    "tp": (("megatron", "megatron-legacy"), _OF_LAYOUTS),
    "pp": (("megatron", "megatron-legacy"), _OF_LAYOUTS),
    "vpp": (("megatron", "megatron-legacy"), _OF_LAYOUTS),
    "make_vocab_size_divisible_by": (("megatron", "megatron-legacy"), "a Hugging Face model directory has no padding"),
    "max_shard_size": (("hf",), "Megatron's checkpoints have a file for each rank"),
}
"""Option -> for which targets it does something, and why not for others."""
_SMALL_FILES_BYTES = 1 << 20


def check_options(options: ConvertOptions) -> None:
    """Check what needs no file.

    Raises:
        ConfigError: If an option has no meaning, or would do nothing.
    """
    if options.to not in get_args(Format):
        raise ConfigError(f"to={options.to} is not a format; choose from {', '.join(get_args(Format))}")
    dtype_of(options.dtype)
    size_in_bytes(options.max_shard_size)
    if options.make_vocab_size_divisible_by < 1:
        raise ConfigError(
            f"make_vocab_size_divisible_by={options.make_vocab_size_divisible_by} must be at least 1; correct it"
        )
    if options.iteration is not None and options.iteration < 0:
        raise ConfigError(f"iteration={options.iteration} must be at least 0; correct it")
    for name, (targets, reason) in _ONLY_FOR.items():
        value = getattr(options, name)
        if options.to not in targets and value != type(options).__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={value} would do nothing with to={options.to}: {reason}; leave it out")
    _parallel(options)


def check_paths(options: ConvertOptions) -> Path:
    """Check where to write, and the tokenizer's folder.

    Returns:
        ``save_path``, absolute and without links.

    Raises:
        ConfigError: If something is there already, it cannot be written to, or it is a part of the source.
    """
    load, save = options.load_path.resolve(), options.save_path.resolve()
    if os.path.lexists(save) and not (save.is_dir() and not any(save.iterdir())):
        kind = "is not empty" if save.is_dir() else "is a file"
        raise ConfigError(f"save_path={options.save_path} {kind}; give a new name, or remove it")
    if os.path.ismount(save):
        raise ConfigError(
            f"save_path={options.save_path} is a mount point, which cannot be renamed; give a folder in it"
        )
    if save.is_relative_to(load) or load.is_relative_to(save):
        raise ConfigError(
            f"save_path={options.save_path} and load_path={options.load_path} lie in each other; give another save_path"
        )
    there = next(each for each in save.parents if os.path.lexists(each))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"save_path={options.save_path} cannot be made: {there} is no folder that can be written to")
    for name in ("tokenizer", "config"):
        path = getattr(options, name)
        if path is not None and not path.exists():
            raise ConfigError(f"{name}={path} does not exist; correct it")
    if options.tokenizer is not None and not (options.tokenizer.is_dir() and tokenizer_files(options.tokenizer)):
        raise ConfigError(f"tokenizer={options.tokenizer} is no folder with a tokenizer's files; correct it")
    return save


def check_model(source: StoredModel, options: ConvertOptions) -> None:
    """Check whether the model can be cut as asked for, and fits on the disk.

    Raises:
        ConfigError: If tp does not divide its heads, or it has fewer layers than pp x vpp, or the tokenizer has more
            tokens than its vocabulary.
        CheckpointError: If Hugging Face has no such model, it has no head where one is needed, or the disk has not
            enough space.
    """
    parallel = _parallel(options)
    # Its rule for pp is about what the engine trains evenly; here layers need not divide.
    replace(parallel, pp=1, vpp=None).check_model(source.model)
    stages, layers = parallel.pp * parallel.num_model_chunks, source.model.num_layers + source.model.num_decoder_layers
    if stages > layers:
        raise ConfigError(
            f"pp={parallel.pp} x vpp={parallel.num_model_chunks} = {stages} stages are more than the {layers} layers "
            "of this model; use fewer"
        )
    described = family_of(source.model.family).model_config(source.hf_config, source.model.task)
    if options.to == "hf" and variant_of(described, source.model.to_dict()) != described:
        raise CheckpointError(
            f"{source.path}: expected a model that Hugging Face's {source.model.family} computes, got one with "
            f"position_embedding_type={source.model.position_embedding_type} and num_query_groups="
            f"{source.model.num_query_groups}; convert it --to megatron or --to megatron-legacy"
        )
    if options.to != "hf" and (missing := missing_weights(source)):
        raise CheckpointError(
            f"{source.path} lacks tensors of its head ({', '.join(missing)}), and a checkpoint to go on from must be "
            "whole; convert it to=hf, or train from it as it is (pretrained=True begins a new head)"
        )
    if options.tokenizer is not None:
        from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer

        check_vocabulary(load_tokenizer(options.tokenizer), options.tokenizer, source.model.vocab_size)
    _check_space(source, options)


def missing_weights(source: StoredModel) -> list[str]:
    """Hugging Face's names of the tensors that the model has and the source lacks."""
    rules = rules_by_name(source.model)
    absent = (key for key in tensor_shapes(source.model) if key not in source.tensors)
    return [name for key in absent for name in names_of(rules[key.name], key.layer)]


def _parallel(options: ConvertOptions) -> ParallelConfig:
    return ParallelConfig(tp=options.tp, pp=options.pp, vpp=options.vpp, num_microbatches=max(1, options.pp))


def bytes_to_write(source: StoredModel, options: ConvertOptions) -> int:
    """Size of the target's tensors; padding of the vocabulary not counted."""
    dtype = dtype_of(options.dtype)
    return sum(
        spec.num_bytes // spec.dtype.itemsize * (dtype or spec.dtype).itemsize for spec in source.tensors.values()
    )


def _check_space(source: StoredModel, options: ConvertOptions) -> None:
    needed = bytes_to_write(source, options) + _SMALL_FILES_BYTES
    there = next(each for each in options.save_path.absolute().parents if each.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"save_path={options.save_path} needs {needed / 1e9:.3g} GB, and its disk has {free / 1e9:.3g} GB free; "
            "make space, or give another disk"
        )
