"""The command ``config``: a YAML for ``fit`` from questions, from Accelerate's configuration, or from a template."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.cli.failure import DONE, UsageError
from lightning_megatron.errors import ConfigError

_DESCRIPTION = """\
Write a YAML for fit, every line with its meaning. Without an option it asks the questions of accelerate config for
Megatron-LM, and for model and data; each answer is checked at once, an empty one takes the default in brackets."""
_EPILOG = """\
examples:
  {prog}
  {prog} --from-accelerate ~/.cache/huggingface/accelerate/default_config.yaml
  {prog} --template gpt2_small --output gpt2.yaml
  {prog} --output try.yaml < answers.txt

docs/from_accelerate.md shows what each key of Accelerate's is called here."""
_PACKAGE = Path(__file__).parents[1]


def add_config_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the parser of this file to those of the program."""
    parser = commands.add_parser(
        "config",
        help="write a configuration: from questions, Accelerate's, or a template",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.epilog = _EPILOG.format(prog=parser.prog)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from-accelerate", type=Path, metavar="FILE", help="YAML or JSON that accelerate config wrote"
    )
    source.add_argument("--template", metavar="NAME", help="one that comes with the package; another name lists them")
    parser.add_argument(
        "--output", type=Path, default=Path("config.yaml"), metavar="FILE", help="what to write (default: config.yaml)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if there is one")
    parser.set_defaults(run=_config)


def _config(parsed: argparse.Namespace) -> int:
    output: Path = parsed.output
    template = None if parsed.template is None else _template(parsed.template, output)
    if output.exists() and not parsed.overwrite:
        raise UsageError(f"--output {output} exists; give another name, or --overwrite")
    if not output.absolute().parent.is_dir():  # before any question
        raise UsageError(f"--output {output}: {output.parent} is no folder; make it, or give another name")
    launch: dict[str, str] = {}
    if template is not None:
        _write(output, template)
        print(f"{output} is written: {parsed.template}. Edit it, and run what its first lines say.")
        return DONE
    from lightning_megatron.cli.run_settings import as_yaml

    if parsed.from_accelerate is not None:
        from lightning_megatron.cli.accelerate_config import from_accelerate

        settings, launch, left_out = from_accelerate(parsed.from_accelerate)
        origin = f"made from {parsed.from_accelerate.name}, which says nothing of model and data: change those"
        print("\n".join(f"not taken over: {', '.join(keys)}: {why}" for why, keys in left_out.items()))
    else:
        from lightning_megatron.cli.questions import Interview

        settings, origin = Interview().run(), "made by lightning-megatron config"
    title = f"# {' '.join(origin.split())}.\n#\n#   lightning-megatron fit --config {shlex.quote(str(output))}\n"
    _write(output, title + as_yaml(settings))
    edit = "Edit model and data in it, then run" if parsed.from_accelerate else "Run"
    print(f"{output} is written. {edit}\n\n{_how_to_run(output, settings, launch)}")
    return DONE


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error.strerror}; give another name") from None


def _template(name: str, output: Path) -> str:
    """One of configs/, which is beside the package in a checkout, and within it where it is installed."""
    folder = next(each for each in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if each.is_dir())
    files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in files:
        raise UsageError(f"--template {name} is unknown; choose from {', '.join(files)}")
    return files[name].read_text(encoding="utf-8").replace(f"configs/{name}.yaml", shlex.quote(str(output)))


def _how_to_run(output: Path, settings: Mapping[str, Any], launch: Mapping[str, str]) -> str:
    """Command lines, by Accelerate's words for how processes meet."""
    fit = ["fit", "--config", str(output)]
    nodes = settings["trainer.num_nodes"]
    torchrun = ["torchrun", f"--nproc-per-node={settings['trainer.devices']}"]
    if nodes > 1:
        address = f"{launch.get('main_process_ip', 'FIRST_MACHINE')}:{launch.get('main_process_port', 29500)}"
        torchrun += [f"--nnodes={nodes}", f"--node-rank={launch.get('machine_rank', 0)}"]
        torchrun += [f"--rdzv-backend={launch.get('rdzv_backend', 'static')}", f"--rdzv-endpoint={address}"]
    elif "main_process_port" in launch:
        torchrun.append(f"--master-port={launch['main_process_port']}")
    commands = [torchrun + ["-m", "lightning_megatron", *fit], *([["lightning-megatron", *fit]] * (nodes == 1))]
    gpus = launch.get("gpu_ids", "all")
    environment = "" if gpus == "all" else f"CUDA_VISIBLE_DEVICES={shlex.quote(gpus)} "
    lines = "\n  or\n".join(f"  {environment}{shlex.join(command)}" for command in reversed(commands))
    return lines if nodes == 1 else f"{lines}\n\non this machine, and on the others with their own --node-rank"


def refuse_accelerates(options: Sequence[str]) -> None:
    """Raise if one of the configurations for a Trainer is Accelerate's; cheap, before anything is imported.

    Args:
        options: Of the command line.

    Raises:
        UsageError: With the command that makes one of ours.
    """
    words = [word for option in options for word in option.split("=", 1)]
    for flag, file in zip(words, words[1:], strict=False):
        if flag in ("-c", "--config") and Path(file).is_file():
            text = Path(file).read_text(encoding="utf-8", errors="replace")
            if re.search(r"""^\s*["']?distributed_type["']?\s*:""", text, flags=re.MULTILINE):
                raise UsageError(
                    f"--config {file} is a configuration of accelerate's; make one of ours with lightning-megatron"
                    f" config --from-accelerate {file}"
                )
