"""Run notebooks/quickstart.ipynb as a reader does, in an environment without this package; nox -s notebook makes it.

A failed ``!command`` does not fail its cell, so what the cells leave behind is checked, too.
"""

import argparse
import csv
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"
_PROGRESS = re.compile(r"^.*\r(?!\n)|\x1b\[[0-9;]*m", flags=re.MULTILINE)
"""What a terminal would have overwritten, and its colours."""


def run(folder: Path) -> nbformat.NotebookNode:
    """Run all cells in ``folder``; returns the notebook with their outputs.

    Raises:
        CellExecutionError: If a cell fails, after what the cells before it have printed.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    try:
        NotebookClient(notebook, timeout=1200, resources=resources).execute()
    except CellExecutionError:
        print("\n".join(printed(notebook)))
        raise
    return notebook


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell has printed."""
    return [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def check(folder: Path, texts: list[str]) -> None:
    """Check that the model learned, generated in another layout, and was read by transformers.

    Args:
        folder: Folder in which the notebook ran.
        texts: What each code cell has printed.
    """
    with (folder / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    validation = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert losses[-1] < 0.75 * losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    assert (folder / "run" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((folder / "model").glob("*.safetensors"))) == 1
    generated, transformed = texts[-3], texts[-1]
    for text in (generated, transformed):
        assert "The object" in text, text
        assert len(text.split()) > 10, text
    print(
        f"training loss {losses[0]:.3f} to {losses[-1]:.3f}, validation loss {validation[-1]:.3f}; "
        f"generated:\n{generated.strip()}"
    )


def main() -> None:
    """Run the notebook from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty folder to run in")
    parser.add_argument("--save", type=Path, help="write the notebook with its outputs here")
    arguments = parser.parse_args()
    notebook = run(arguments.folder)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = _PROGRESS.sub("", output["text"])
    check(arguments.folder, printed(notebook))
    if arguments.save:
        nbformat.write(notebook, arguments.save)


if __name__ == "__main__":
    main()
