"""Compare legacy checkpoints bit by bit with transformers' scripts, in both directions; exits with 1 if they differ.

python -m tests.peers --work FOLDER 4.30.2=PYTHON 4.47.1=PYTHON    # nox -s convert_peers makes the environments

Up to about 4.47.0 the script writes correct Hugging Face weights; 4.47.1 keeps only the last file, under Megatron's
names, so that only its other direction is compared. The scripts for one rank work in both releases.
"""

import argparse
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.convert.directories import converted, save_as
from tests.convert.legacy.layouts import flat
from tests.families.test_gpts import gpt_model
from tests.families.test_megatron_bert import bert_model
from tests.peers.scripts import BERT, GPT2, Peer, prepare

WRITES_HUGGING_FACE = "4.30.2"
"""The release whose script converts any layout correctly."""
_OF_VOCABULARY = (
    "transformer.wte.",
    "lm_head.",
    "bert.embeddings.word_embeddings.",
    "cls.predictions.",
)
_MULTIPLE = 8
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Tensors = Mapping[str, torch.Tensor]


def main() -> int:
    """Compare, and print each comparison."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("peers", nargs="+", metavar="VERSION=PYTHON")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    prepare(work / "environment")
    peers = [
        Peer(version=version, python=Path(python), environment=work / "environment")
        for version, _, python in (each.partition("=") for each in arguments.peers)
    ]
    num_problems = 0
    for peer in peers:
        for comparison, problems in _comparisons(peer, work / peer.version):
            print(
                f"transformers {peer.version}: {comparison}: {'; '.join(problems) or 'equal'}",
                flush=True,
            )
            num_problems += len(problems)
    return 1 if num_problems else 0


def _comparisons(peer: Peer, work: Path) -> Iterator[tuple[str, list[str]]]:
    work.mkdir()
    # The script does not compute a default for n_inner.
    gpt2 = gpt_model("gpt2", {"n_inner": 96, "bos_token_id": 0, "eos_token_id": 0})
    bert = bert_model("PreTraining")
    save_as(gpt2, work / "gpt2", "bin")
    save_as(bert, work / "bert", "bin")
    if peer.version == WRITES_HUGGING_FACE:
        for dtype in _DTYPES:
            yield _compare_at_tp2_pp2(peer, work, gpt2, dtype)
    yield _compare_one_rank(peer, work, "gpt2", gpt2, GPT2)
    yield _compare_one_rank(peer, work, "bert", bert, BERT)
    for dtype in _DTYPES:
        for is_distributed in (False, True):
            yield from _read_tree(peer, work, gpt2, dtype, is_distributed)


# ---- our checkpoints, read by transformers --------------------------------------------------------------------------


def _compare_at_tp2_pp2(
    peer: Peer,
    work: Path,
    model: Any,
    dtype: str,
) -> tuple[str, list[str]]:
    ours = work / f"ours-{dtype}"
    theirs = work / f"read-{dtype}"
    _write(work / "gpt2", ours, dtype)
    peer.to_hugging_face(ours / "release", theirs)
    return f"reads our gpt2 in {dtype} at tp=2, pp=2", _differences(
        _hugging_face(theirs), _in(dtype, model)
    )


def _compare_one_rank(
    peer: Peer, work: Path, name: str, model: Any, script: str
) -> tuple[str, list[str]]:
    ours = work / f"ours-{name}"
    _convert(work / name, ours)
    rank = ours / "release" / "mp_rank_00"
    peer.run(script, rank / "model_optim_rng.pt")  # writes into the directory of its input
    return f"reads our {name} of one rank", _differences(_hugging_face(rank), model.state_dict())


def _hugging_face(folder: Path) -> Tensors:
    tensors: Tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return tensors


def _differences(theirs: Tensors, expected: Tensors) -> list[str]:
    problems = [
        f"{name} is new"
        for name in set(theirs) - set(expected)
        if "attn.bias" not in name and "masked" not in name
    ]
    for name, tensor in expected.items():
        if name not in theirs:
            # The script leaves out tensors that transformers creates itself.
            if not (name.endswith("decoder.bias") or name.endswith("position_ids")):
                problems.append(f"{name} is missing")
            continue
        # The scripts for one rank keep vocabulary padding.
        rows = theirs[name][: len(tensor)] if name.startswith(_OF_VOCABULARY) else theirs[name]
        if rows.shape != tensor.shape or not torch.equal(rows.float(), tensor.float()):
            problems.append(f"{name} differs")
    return problems


# ---- checkpoints of transformers, read by us ------------------------------------------------------------------------


def _read_tree(
    peer: Peer, work: Path, model: Any, dtype: str, is_distributed: bool
) -> Iterator[tuple[str, list[str]]]:
    kind = f"{dtype}{', distributed optimizer' * is_distributed}"
    theirs = work / f"theirs-{dtype}-{is_distributed:d}"
    options = [
        "--target_tensor_model_parallel_size",
        "2",
        "--target_pipeline_model_parallel_size",
        "2",
        "--target_params_dtype",
        dtype,
        "--make_vocab_size_divisible_by",
        str(_MULTIPLE),
        *(
            ("--use_distributed_optimizer", "--target_data_parallel_size", "2")
            if is_distributed
            else ()
        ),
    ]
    peer.to_megatron(work / "gpt2", theirs, options)
    if not is_distributed:
        _write(work / "gpt2", work / f"beside-{dtype}", dtype)
        differences = _differences_of_trees(theirs, work / f"beside-{dtype}")
        yield f"writes gpt2 at tp=2, pp=2 in {kind} as we do", differences
    back = work / f"back-{theirs.name}"
    converted(theirs, back)
    yield (
        f"writes gpt2 at tp=2, pp=2 in {kind}, and we read it",
        _differences(_saved(back), _in(dtype, model)),
    )


def _saved(folder: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    tensors: Tensors = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return tensors


def _differences_of_trees(theirs: Path, ours: Path) -> list[str]:
    names, own = (
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        for root in (theirs, ours)
    )
    if names != own:
        return [f"different files: {sorted(names ^ own)}"]
    problems = []
    for name in sorted(names):
        if not name.endswith(".pt"):
            problems += (
                [f"{name} differs"]
                if (theirs / name).read_text() != (ours / name).read_text()
                else []
            )
            continue
        state = _load(theirs / name)
        expected = _load(ours / name)
        more = set(state) - set(expected) - {"optimizer"}  # empty and never read
        problems += [f"{name} also has {sorted(more)}"] if more else []
        problems += [
            f"{name}: {key} is {value!r} there, and {getattr(expected['args'], key, 'absent')!r} here"
            for key, value in vars(state.get("args", types.SimpleNamespace())).items()
            if getattr(expected["args"], key, "absent") != value
        ]
        problems += [f"{name}: {problem}" for problem in _differences_of_ranks(state, expected)]
    return problems


def _differences_of_ranks(
    state: Mapping[str, Any],
    expected: Mapping[str, Any],
) -> Iterator[str]:
    tensors = flat(state.get("model", {}))
    ours = flat(expected.get("model", {}))
    yield from (f"{name} is in only one of both" for name in set(tensors) ^ set(ours))
    for name in set(tensors) & set(ours):
        theirs = tensors[name]
        mine = ours[name]
        if theirs.dtype != mine.dtype or theirs.shape != mine.shape:
            yield f"{name} is {theirs.dtype} {tuple(theirs.shape)} there, and {mine.dtype} {tuple(mine.shape)} here"
        # transformers pads with copies of the last row, we with zeros.
        rows = mine.abs().sum(dim=1) > 0 if "word_embeddings" in name else slice(None)
        if not torch.equal(theirs[rows], mine[rows]):
            yield f"{name} differs"


def _load(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace, types.SimpleNamespace]):
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


# ---- both -----------------------------------------------------------------------------------------------------------


def _convert(source: Path, target: Path, **fields: Any) -> None:
    options = {"to": "megatron-legacy", "make_vocab_size_divisible_by": _MULTIPLE, **fields}
    converted(source, target, **options)


def _write(load: Path, save: Path, dtype: str) -> None:
    _convert(load, save, tp=2, pp=2, dtype=dtype)


def _in(dtype: str, model: Any) -> Tensors:
    return {name: tensor.to(_DTYPES[dtype]) for name, tensor in model.state_dict().items()}


if __name__ == "__main__":
    sys.exit(main())
