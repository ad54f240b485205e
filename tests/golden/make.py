"""Make the golden files anew from commit 25d5a27, whose files and numbers later versions must honour.

Run on Linux, in a worktree of that commit, with this folder copied into it:

    git worktree add ../base 25d5a27
    cp -r tests/golden ../base/tests/
    (cd ../base && PYTHONPATH=$PWD python -m tests.golden.make)
    cp -r ../base/tests/golden/{files,*.json,*.tar.xz} tests/golden/

The files were made with torch 2.13 (CPU), megatron-core 0.16.1, Lightning 2.6.6 and transformers 5.23. Make them again
only to record something that 25d5a27 did and that no file here holds yet: what a later commit writes is no reference.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden import products
from tests.golden.interface import interface
from tests.golden.runs import RUNS, WITHOUT_DROPOUT, Steps, merged, trained
from tests.golden.sources import MODELS, write_corpora, write_tokenizers
from tests.ranks import close_pool, run_ranks

HERE = Path(__file__).parent
FILES = HERE / "files"


def make_sources() -> None:
    """Texts, tokenizers and datasets."""
    write_corpora(FILES)
    write_tokenizers(FILES)
    products.make_datasets(FILES, FILES)


def make_words_checkpoint(work: Path, checkpoints: Path) -> None:
    """``words.ckpt``: converted weights with a tokenizer and a generation config inside."""
    import torch
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**{**MODELS["gpt2"], "eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0}))
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, bos_token_id=1)
    model.save_pretrained(work / "words")
    shutil.copytree(FILES / "words", work / "words", dirs_exist_ok=True)
    line = "convert --to megatron --load-path {} --save-path {}"
    products.command(line, work / "words", checkpoints / "words.ckpt")


def make_run(name: str, work: Path, checkpoints: Path) -> dict[str, Any]:
    """``NAME.ckpt``, and the steps that follow."""
    run, world_size, keep_at = RUNS[name]
    folder = work / name
    whole = run_ranks(trained, world_size, run, FILES, folder, keep_at)
    shutil.copytree(folder / f"step={keep_at}.ckpt", checkpoints / f"{name}.ckpt")
    return merged(run, [_after(keep_at, steps) for steps in whole])


def _after(step: int, steps: Steps) -> Steps:
    return {each: numbers for each, numbers in steps.items() if each > step}


def write(name: str, value: Mapping[str, Any]) -> None:
    """A record as JSON."""
    (HERE / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Make everything."""
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    run_ranks(make_sources, 1)
    with tempfile.TemporaryDirectory(prefix="golden_") as folder:
        work, checkpoints = Path(folder), Path(folder, "checkpoints")
        for each in (checkpoints, work / "samples", work / "exports"):
            each.mkdir()
        steps = {name: make_run(name, work, checkpoints) for name in RUNS}
        undropped = WITHOUT_DROPOUT.but(ckpt_path=str(checkpoints / "blend.ckpt"))
        steps["blend without dropout"] = merged(undropped, run_ranks(trained, 1, undropped, FILES, work / "blend"))
        write("steps", steps)
        run_ranks(make_words_checkpoint, 1, work, checkpoints)
        write("exports", run_ranks(products.exports, 1, checkpoints, work / "exports")[0])
        write("texts", run_ranks(products.texts, 1, checkpoints / "words.ckpt")[0])
        write("samples", run_ranks(products.samples, 1, FILES, work / "samples")[0])
        with tarfile.open(HERE / "checkpoints.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(checkpoints.iterdir()):
                archive.add(path, path.name)
    write("interface", run_ranks(interface, 1)[0])
    close_pool()


if __name__ == "__main__":
    from tests.golden import make  # ranks find functions by their module's name, which is another one here

    make.main()
