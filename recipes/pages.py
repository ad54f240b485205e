"""Pages of recipes, made of their configurations and of the figures of a run.

    python -m recipes.pages runs/recipes/results    # takes figures and curves over, and writes all pages
    python -m recipes.pages                         # writes the pages anew

A page begins with the comment at the top of its YAML; every figure in it is of recipes/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.run import RECIPES, ROOT

FOLDER = ROOT / "recipes"
RESULTS = FOLDER / "results"
TITLES = {
    "gpt2_small": "GPT-2 small from scratch",
    "llama_1b_fp8": "Llama-1B in fp8",
    "lora_llama_8b": "LoRA of an 8B shape",
    "experts_8_layers": "Eight layers of experts",
    "bert": "BERT",
    "t5": "T5 on a pipeline",
    "packed_chats": "Packed chats",
}


def page(name: str, figures: dict[str, Any] | None) -> str:
    """Return the page of a recipe in Markdown.

    Args:
        name: Name of the recipe.
        figures: What ``recipes.run`` has written to NAME.json; None if it has not run yet.
    """
    parts = [f"# {TITLES[name]}", introduction(name)]
    if figures is None:
        parts.append(
            f"Not run yet, so there are no figures: the tests run [{name}.yaml]({name}.yaml) with a tiny model on a CPU"
            f" alone. `python -m recipes.run {name}` runs it."
        )
        return "\n\n".join(parts) + "\n"
    commands = "\n".join(each["command"] for each in figures["commands"])
    rows = "\n".join(f"| {key} | {value} |" for key, value in _rows(figures))
    parts.append(
        f"`python -m recipes.run {name}` ran these commands, with [{name}.yaml]({name}.yaml):"
    )
    parts.append(f"```\n{commands}\n```")
    if (RESULTS / f"{name}.png").exists():
        parts.append(f"![Loss over optimizer steps](results/{name}.png)")
    parts.append(f"| | |\n|---|---|\n{rows}")
    if figures.get("note"):
        parts.append(figures["note"])
    exported = figures["export"] or {}
    if "prompt" in exported:
        parts.append("The exported model in transformers, greedy:")
        completion = _without_blanks(exported["completion"])
        parts.append(f"```\n{exported['prompt'].rstrip()}\n---\n{completion}\n```")
    return "\n\n".join(parts) + "\n"


def figures_of(name: str) -> dict[str, Any] | None:
    """Figures of a recipe's run; None if it has not run yet."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return None
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def introduction(name: str) -> str:
    """The comment at the top of a recipe's YAML, without its command."""
    lines = []
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith(" ")).strip()


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of the table: a name and a value with its unit."""
    machine = figures["machine"]
    packages = figures["packages"]
    yield "machine", ", ".join(machine["gpus"]) or f"{machine['cores']} CPU cores"
    yield "torch, Megatron-Core", f"{packages['torch']}, {packages['megatron-core']}"
    yield "text", f"{figures['text_bytes'] / 1e6:.1f} MB"
    steps = f"{figures['steps']}"
    if "tokens_per_step" in figures:
        steps += f" of {figures['tokens_per_step']:,} tokens"
    yield "steps", steps
    yield "time of `fit`, imports and saving included", f"{figures['fit_seconds']:.0f} s"
    if "tokens_per_s" in figures:
        yield "tokens/s, median", f"{figures['tokens_per_s']:,.0f}"
    if "mfu" in figures:
        yield "model FLOPs utilization, median", f"{figures['mfu']:.1%}"
    if "peak_memory_gib" in figures:
        yield "peak memory", f"{figures['peak_memory_gib']:.1f} GiB"
    yield "first training loss", f"{figures['first_loss']:.3f}"
    yield "last training loss", f"{figures['last_loss']:.3f}"
    if figures["val_losses"]:
        yield "validation losses", ", ".join(f"{loss:.3f}" for loss in figures["val_losses"])
    exported = figures["export"]
    if exported is None:
        return
    seconds = figures["commands"][-1]["seconds"]
    yield "export", f"{exported['parameters']:,} parameters in {seconds:.0f} s"
    files = (f"{file} ({size:,} bytes)" for file, size in exported["files"].items())
    yield "files", ", ".join(files)


def _without_blanks(text: str) -> str:
    """The text without trailing spaces and repeated blank lines."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    kept = [line for number, line in enumerate(lines) if line or lines[number - 1]]
    return "\n".join(kept) or repr(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="*", type=Path, help="folders that recipes.run has filled")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(exist_ok=True)
    for folder in options.results:
        for name in RECIPES:
            if (folder / f"{name}.json").exists():
                shutil.copy(folder / f"{name}.json", RESULTS)
                shutil.copy(folder / f"{name}.png", RESULTS)
    for name in RECIPES:
        path = FOLDER / f"{name}.md"
        path.write_text(page(name, figures_of(name)))
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
