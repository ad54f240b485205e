"""Run the unchanged scripts with which old releases of transformers converted Megatron-LM checkpoints.

They run as modules of their release, in an environment with a torch that unpickles anything (they load
``argparse.Namespace``), a tokenizer in a directory of the name that they would download, and a stub of the one function
that they import from Megatron-LM.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESHAPE = "transformers.models.megatron_gpt2.checkpoint_reshaping_and_interoperability"
GPT2 = "transformers.models.megatron_gpt2.convert_megatron_gpt2_checkpoint"
BERT = "transformers.models.megatron_bert.convert_megatron_bert_checkpoint"

# At both paths from which releases import it; the newer ones first check Megatron-Core's version.
_STUB = {
    "megatron/tokenizer/tokenizer.py": """
def _vocab_size_with_padding(orig_vocab_size, args):
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-orig_vocab_size // multiple) * multiple
""",
    "megatron/training/tokenizer/tokenizer.py": "from megatron.tokenizer.tokenizer import _vocab_size_with_padding\n",
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": '__version__ = "0.8.0"\n',
}
_TOKENIZERS = ("gpt2", "openai-community/gpt2")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A release of transformers in a separate environment."""

    version: str
    python: Path
    environment: Path
    """Directory made by ``prepare``."""

    def run(self, module: str, *arguments: str | Path) -> None:
        """Run a script.

        Raises:
            RuntimeError: If it fails, with the end of its stderr.
        """
        command = [
            str(self.python),
            "-W",
            "ignore",
            "-m",
            module,
            *map(str, arguments),
        ]
        variables = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, cwd=self.environment, env=variables, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"transformers {self.version}: {' '.join(command[4:])}: {done.stderr[-1500:]}"
            )

    def to_hugging_face(self, load: Path, save: Path) -> None:
        """Convert an iteration's directory of any layout to ``pytorch_model.bin``."""
        save.mkdir(parents=True)
        tokenizer = self.environment / _TOKENIZERS[0]
        self.run(
            RESHAPE,
            "--convert_checkpoint_from_megatron_to_transformers",
            "--load_path",
            load,
            "--save_path",
            save,
            "--tokenizer_name",
            tokenizer,
        )

    def to_megatron(
        self,
        load: Path,
        save: Path,
        options: Sequence[str],
    ) -> None:
        """Convert ``pytorch_model.bin`` to Megatron-LM's directory tree."""
        megatron = ("--megatron-path", self.environment)
        self.run(RESHAPE, "--load_path", load, "--save_path", save, *megatron, *options)


def prepare(folder: Path) -> None:
    """Write the stubs and tokenizers that the scripts need."""
    for name, text in _STUB.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for package in file.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
    for name in _TOKENIZERS:
        tokenizer = folder / name
        tokenizer.mkdir(parents=True)
        tokens = {chr(code): code - 33 for code in range(33, 127)} | {"ab": 94, "<|endoftext|>": 95}
        (tokenizer / "vocab.json").write_text(json.dumps(tokens))
        (tokenizer / "merges.txt").write_text("#version: 0.2\na b\n")
        (tokenizer / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GPT2Tokenizer"})
        )
