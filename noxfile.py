"""nox sessions; each creates its own environment and installs its dependencies.

python3 -m pip install nox
python3 -m nox -s quickstart    # train a GPT-2 on real text with tp=2, pp=2, in four processes
python3 -m nox -s tests         # all required checks: tests, lint, types
"""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
WORK = ROOT / "quickstart"
TEXT = "examples/data/shakespeare.jsonl.gz"
HAS_GPU = shutil.which("nvidia-smi") is not None
# Without a GPU, a version that has a CPU build:
# the default build comes with gigabytes of CUDA libraries.
TORCH = "torch>=2.10" if HAS_GPU else "torch==2.13.0"
# Three processes on two cores: tests spend two fifths of their time waiting for ranks, disks or timeouts. The
# tests of a file stay in one process, as many share slow fixtures. Files run in alphabetical order: by default those
# with few, long tests would run last, when the other processes are idle.
PYTEST = ("pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
CODE = ("lightning_megatron", "tests", "benchmarks", "examples", "recipes", "docs", "noxfile.py")


def install(session: nox.Session, *extras: str) -> None:
    """Install torch and this package with ``extras``; bytecode is compiled on import, not on installation.

    Bytecode is cached even if the container image disables it: hundreds of processes would each compile torch again.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    names = [*extras, *(["flash"] if HAS_GPU else [])]
    session.install("--no-compile", TORCH, "-e", f".[{','.join(names)}]" if names else ".")


def run_folders(session: nox.Session, *folders: str) -> None:
    """Run the tests of ``folders`` below tests/, or what the arguments after -- select."""
    selected = session.posargs or [f"tests/{name}" for name in folders]
    session.run(*PYTEST, "-m", "not exhaustive", *selected)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff: lint and format."""
    session.install("ruff>=0.9")
    check_style(session)


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, strict; those of the tests need pytest and what else they import."""
    install(session, "test", "lint")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run all required checks: tests without GPUs, then style and types.

    With arguments for pytest after --, only the selected tests.
    """
    install(session, "test", "lint")
    if not session.posargs:
        check_style(session)
        # mypy takes one core. On the other, what the tests import is compiled: once, not in each of their processes.
        python = Path(session.bin) / "python"
        imports = "from tests.ranks import preload; preload()"
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        with subprocess.Popen([python, "-W", "ignore", "-c", imports], cwd=ROOT, env=environment):
            session.run("mypy")
    session.run(*PYTEST, "-m", "not exhaustive", *(session.posargs or ["--verbose"]))


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Run additional cases of the tests: more crash points, optimizers, and ways to save; and those of lm_eval."""
    install(session, "test", "eval")
    session.run(*PYTEST, "-m", "exhaustive", *session.posargs)


@nox.session
def campaign(session: nox.Session) -> None:
    """Inject faults at random times, for --minutes M (after --); reports losses, hangs and detection times."""
    install(session, "test")
    session.run("python", "-m", "tests.campaigns", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Test runs on two and three nodes, simulated by network namespaces; needs root, ip and, for some tests, SLURM."""
    install(session, "test")
    session.run(
        "pytest",
        "-s",
        "tests/hosts/cases.py",
        "tests/hosts/slurm.py",
        *session.posargs,
        success_codes=[0, 5],
    )


@nox.session
@nox.parametrize(
    "engine", ["megatron-core==0.16.1", "megatron-core<0.20"], ids=["oldest", "newest"]
)
def engines(session: nox.Session, engine: str) -> None:
    """Run the tests that use Megatron-Core with its oldest and newest supported releases."""
    install(session, "test")
    session.install("--no-compile", TORCH, engine)
    run_folders(
        session,
        "parity",
        "checkpoint",
        "golden",
        "trainer",
        "families",
        "generate",
        "convert",
        "unit/engine",
    )


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the tests of units, conversion and training with the lowest versions that pyproject.toml accepts.

    Those of direct dependencies, torch among them: its default build, with gigabytes of CUDA libraries.
    """
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    session.install("uv>=0.9")
    session.run("uv", "pip", "install", "--resolution", "lowest-direct", "-e", ".[test,lint]")
    folders = ("unit", "golden", "parity", "checkpoint", "trainer", "generate", "convert", "cli")
    run_folders(session, *folders)


@nox.session
def prereleases(session: nox.Session) -> None:
    """Run the core tests with the newest pre-releases of Lightning, transformers and Megatron-Core (on GPUs of torch).

    Whatever this package requires: what its requirements exclude is what this looks at.
    """
    install(session, "test")
    names = ["lightning", "transformers", "megatron-core"]
    if HAS_GPU:
        names.append("torch")
    session.install("--no-compile", "--pre", "--upgrade", *names)
    session.run("python", "-m", "pip", "list")
    folders = ("parity", "checkpoint", "trainer", "generate", "convert", "unit/engine")
    run_folders(session, *folders)


@nox.session
def notebook(session: nox.Session) -> None:
    """Run notebooks/quickstart.ipynb, which installs the wheel that this session builds.

    With --save FILE (after --), the notebook with its outputs is written there.
    """
    session.install("--no-compile", TORCH, "nbclient>=0.10", "ipykernel>=6.29")
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "lightning-megatron")
    work = Path(session.create_tmp()).resolve()
    wheels = work / "wheels"
    folder = work / "notebook"
    for path in (wheels, folder):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    session.run(
        "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(wheels), str(ROOT)
    )
    # The first cell finds the wheel beside the index, and the program that runs it does not see the clone.
    links = f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
    session.run(
        "python",
        str(ROOT / "tests" / "run_notebook.py"),
        str(folder),
        *session.posargs,
        env={"PIP_FIND_LINKS": links, "PYTHONDONTWRITEBYTECODE": ""},
    )


@nox.session
def release(session: nox.Session) -> None:
    """Build sdist and wheel, check them, and train with the wheel in a fresh environment; uploads nothing."""
    session.install("build>=1.2", "twine>=6")
    work = Path(session.create_tmp()).resolve()
    dist = work / "dist"
    fresh = work / "fresh"
    run = work / "run"
    for path in (dist, fresh, run):
        shutil.rmtree(path, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist), str(ROOT))
    files = sorted(str(path) for path in dist.iterdir())
    session.run("twine", "check", "--strict", *files)
    session.run("python", "-m", "venv", str(fresh))
    program = str(fresh / "bin" / "lightning-megatron")
    (wheel,) = dist.glob("*.whl")
    python = str(fresh / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", TORCH, str(wheel), external=True)
    run.mkdir()
    session.chdir(run)  # not in the clone, whose package would be imported
    make_dataset(session, program, str(ROOT / TEXT))
    config = str(ROOT / "configs" / "gpt2_tiny_cpu.yaml")
    steps = ("--trainer.max_steps", "20", "--trainer.val_check_interval", "10")
    session.run(program, "fit", "--config", config, *steps, external=True)
    generate(session, program, "quickstart/runs/gpt2_tiny/version_0/checkpoints/last.ckpt")
    session.log(f"ready to upload: {' '.join(files)}")


@nox.session
def convert_peers(session: nox.Session) -> None:
    """Compare conversion of legacy Megatron-LM checkpoints with old transformers' scripts, in separate environments."""
    install(session, "test")
    peers = []
    for version in ("4.30.2", "4.47.1"):
        folder = Path(session.virtualenv.location).parent / f"transformers-{version}"
        python = folder / "bin" / "python"
        if not python.exists():
            session.run("python", "-m", "venv", str(folder))
        # These releases support only NumPy 1.
        session.run(
            str(python),
            "-m",
            "pip",
            "install",
            TORCH,
            "numpy<2",
            f"transformers=={version}",
            external=True,
        )
        peers.append(f"{version}={python}")
    work = Path(session.create_tmp()) / "peers"
    shutil.rmtree(work, ignore_errors=True)
    session.run("python", "-W", "ignore", "-m", "tests.peers", "--work", str(work), *peers)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in site/: pages and API reference; warnings are errors."""
    session.install("mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2")
    pages = Path(session.create_tmp()) / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir()
    for name in ("docs", "configs", "examples", "recipes", "notebooks", "benchmarks"):
        shutil.copytree(ROOT / name, pages / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, pages)
    site = str(ROOT / "site")
    session.run(
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        site,
        *session.posargs,
        env={"DOCS_DIR": str(pages)},
    )


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU."""
    install(session, "test")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the training benchmark: median step time of the Trainer; arguments after -- select the case."""
    install(session)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a GPT-2 on text with tp=2, pp=2, resume it with tp=1, pp=2, and generate text."""
    install(session)
    shutil.rmtree(WORK, ignore_errors=True)
    program = "lightning-megatron"
    fit = (program, "fit", "--config", "configs/gpt2_tiny_cpu.yaml", *session.posargs)
    first, second = (
        f"quickstart/runs/gpt2_tiny/version_{run}/checkpoints/last.ckpt" for run in (0, 1)
    )

    session.log(f"1/4 train a byte-level BPE with 2,048 entries on {TEXT}, and tokenize the text")
    make_dataset(session, program, TEXT)

    session.log(
        "2/4 train a small GPT-2 with tp=2, pp=2 in four processes; each imports PyTorch, Lightning and Megatron-Core"
        " before it prints anything, on a busy machine for half a minute"
    )
    session.run(*fit)

    session.log(
        "3/4 resume it with tp=1, pp=2 in two processes for 20 more steps; imports come first again"
    )
    session.run(
        *(*fit, "--ckpt_path", first, "--trainer.strategy.tp", "1", "--trainer.devices", "2"),
        *("--trainer.max_steps", "220", "--trainer.val_check_interval", "20"),
    )

    session.log("4/4 generate text; after the imports, 60 tokens for each of three prompts")
    generate(session, program, second)
    session.log(f"validation loss: {', '.join(validation_losses())}")
    for picture in sorted(WORK.rglob("*.png")):
        session.log(f"loss curve: {picture.relative_to(ROOT)}")
    session.log(f"losses by step: tensorboard --logdir {(WORK / 'runs').relative_to(ROOT)}")
    session.log("more: examples/README.md, and your own text in docs/training.md")


def validation_losses() -> list[str]:
    """Each validation of the quickstart: its loss and step."""
    found = []
    for file in sorted(WORK.rglob("metrics.csv")):
        with file.open() as lines:
            rows = [row for row in csv.DictReader(lines) if row["val_loss"]]
        found += [f"{float(row['val_loss']):.3f} at step {row['step']}" for row in rows]
    return found


def make_dataset(session: nox.Session, program: str, text: str) -> None:
    """Train a tokenizer on the text, and make an indexed dataset of it, in the folder quickstart."""
    tokenizer = "quickstart/tokenizer"
    session.run(
        program,
        "train-tokenizer",
        "--input",
        text,
        "--vocab-size",
        "2048",
        "--output",
        tokenizer,
        external=True,
    )
    session.run(
        program,
        "preprocess",
        "--input",
        text,
        "--output-prefix",
        "quickstart/shakespeare",
        "--tokenizer",
        tokenizer,
        "--append-eod",
        external=True,
    )


def generate(session: nox.Session, program: str, checkpoint: str) -> None:
    """Generate text with a checkpoint of the small GPT-2."""
    session.run(
        program,
        "generate",
        "--checkpoint",
        checkpoint,
        "--tokenizer",
        "quickstart/tokenizer",
        "--prompt",
        "ROMEO:",
        "JULIET:",
        "KING RICHARD III:",
        "--max-new-tokens",
        "60",
        "--temperature",
        "0.7",
        "--top-k",
        "40",
        external=True,
    )


def check_style(session: nox.Session) -> None:
    """Run ruff; it must be installed in the session."""
    present = [name for name in CODE if (ROOT / name).exists()]
    session.run("ruff", "check", *present)
    session.run("ruff", "format", "--check", *present)
