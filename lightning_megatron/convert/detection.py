"""What kind of checkpoint is at a path, and who opens it?"""

from __future__ import annotations

from pathlib import Path

from lightning_megatron.checkpoint.files import META, is_distributed
from lightning_megatron.convert.hugging_face_files import directory_of, has_weights
from lightning_megatron.convert.iterations import iteration_folder, named
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.errors import CheckpointError, ConfigError


def open_model(path: Path, options: ConvertOptions) -> StoredModel:
    """Open the checkpoint at ``path``, whatever its format.

    Args:
        path: A folder or file.
        options: Of which ``config`` and ``iteration`` say more about it.

    Raises:
        CheckpointError: If there is none, or it is damaged or unsafe.
        ConfigError: If an option would do nothing.
    """
    if not path.exists():
        raise CheckpointError(f"load_path={path} does not exist; give a checkpoint or a Hugging Face model directory")
    folder = iteration_folder(path, options.iteration)
    if folder.is_dir() and ((folder / META).is_file() or is_distributed(folder)):
        from lightning_megatron.convert.stored.distributed import open_distributed

        return open_distributed(folder, options.config)
    folder = directory_of(folder) or folder
    if folder.is_dir() and has_weights(folder):
        from lightning_megatron.convert.stored.hugging_face import CONFIG_FILE, open_hugging_face

        if options.config is not None and (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"config={options.config} would do nothing: {folder} has a {CONFIG_FILE}; leave it out")
        return open_hugging_face(folder, options.config)
    if path.is_file() and ((path.parent / META).is_file() or is_distributed(path.parent)):
        raise CheckpointError(f"load_path={path} is one file of the checkpoint {path.parent}; give that")
    from lightning_megatron.convert.legacy.reading import is_legacy, open_legacy

    if is_legacy(folder):
        return open_legacy(folder, options.config, None)
    raise _unknown(folder)


def _unknown(path: Path) -> CheckpointError:
    known = (
        "a Hugging Face model directory, a *.ckpt of MegatronStrategy, a checkpoint of Megatron-Core (torch_dist) or "
        "of Megatron-LM (mp_rank_*/model_optim_rng.pt), or NVIDIA's .zip of one"
    )
    if path.is_file():
        return CheckpointError(f"load_path={path} is a file of another kind; give {known}")
    checkpoints = named(sorted(each.name for each in path.glob("*.ckpt")))
    if checkpoints:
        return CheckpointError(f"load_path={path} is a folder of checkpoints; give one of them: {checkpoints}")
    if (path / "config.json").is_file():
        return CheckpointError(f"load_path={path} has a config.json and no weights beside it; fetch them")
    inside = named(sorted(each.name for each in path.iterdir())) or "nothing"
    return CheckpointError(f"load_path={path} is no checkpoint (it has {inside}); give {known}")
