"""The questions of ``config``: those of ``accelerate config`` for Megatron-LM, and model and data."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.cli.failure import UsageError
from lightning_megatron.cli.run_settings import Settings, layout, read, setting
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.models.config import ModelConfig

_MODEL = "model.model"
_SEQ_LENGTH = "data.seq_length"


class Interview:
    """Asks, and checks each answer against those before it."""

    def __init__(self) -> None:
        self.settings: Settings = {}
        self._model: ModelConfig | None = None
        self._longest: int | None = None

    def run(self) -> Settings:
        """The answers.

        Raises:
            ConfigError: If an answer that comes from a pipe is wrong, or there are too few.
        """
        for place, default in self._questions():
            while True:
                try:
                    self._ask(place, default)
                    break
                except EOFError:
                    raise UsageError(
                        f"{place}: expected an answer, got the end of the input; an empty line is {default}"
                    ) from None
                except ConfigError as error:
                    if not sys.stdin.isatty():
                        raise
                    self.settings.pop(place, None)
                    print(f"  {error}")
        return self.settings

    def _questions(self) -> Iterator[tuple[str, Any]]:
        """What to ask next, and what no answer means; in the order of ``accelerate config``."""
        strategy, given = "trainer.strategy", self.settings
        yield _MODEL, "gpt2"
        assert self._model is not None
        model = self._model
        named = given[_MODEL] if isinstance(given[_MODEL], str) else ""  # a folder, a file or a name on the hub
        folder = Path(named)
        if named and (not folder.exists() or any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))):
            yield "model.pretrained", "yes"
        yield "trainer.accelerator", "gpu" if shutil.which("nvidia-smi") else "cpu"
        yield "trainer.num_nodes", 1
        yield f"{strategy}.tp", 1
        if given[f"{strategy}.tp"] > 1:
            yield f"{strategy}.sequence_parallel", "yes"
        yield f"{strategy}.pp", 1
        if given[f"{strategy}.pp"] > 1:
            yield f"{strategy}.num_microbatches", given[f"{strategy}.pp"]
        yield f"{strategy}.recompute", "selective"
        yield f"{strategy}.distributed_optimizer", "yes"
        yield "trainer.gradient_clip_val", 1.0
        size = given[f"{strategy}.tp"] * given[f"{strategy}.pp"]
        yield "trainer.devices", -(-size // given["trainer.num_nodes"])
        yield "trainer.precision", "bf16-mixed" if given["trainer.accelerator"] == "gpu" else "32-true"
        yield "data.data_path", f"data/corpus_text_{'document' if model.architecture == 'gpt' else 'sentence'}"
        if (is_text := given["data.data_path"].endswith(".jsonl")) or model.architecture != "gpt":
            yield "data.tokenizer", "data/tokenizer" if folder.is_file() or not named else named
        given["data.class_path"] = "InstructionDataModule" if is_text else "IndexedDataModule"
        yield _SEQ_LENGTH, min(1024, self._longest or 1024)
        yield "data.micro_batch_size", 4
        yield "model.lr", 2e-5 if given.get("model.pretrained") else 3e-4
        yield "trainer.max_steps", 10000

    def _ask(self, place: str, default: Any) -> None:
        kind, meaning = setting(place)
        text = input(f"{place.rpartition('.')[2]}: {meaning} [{default}]: ")
        if not sys.stdin.isatty():
            print(text)  # as a terminal shows it
        try:
            answer = read(kind, text.strip() or default)
        except ConfigError as error:
            raise UsageError(f"{place}: {error}") from None
        if place == _MODEL:
            answer = self._read_model(answer)
        self.settings[place] = answer
        parallel = layout(self.settings)
        if self._model is not None:
            parallel.check_model(self._model)
        parallel.check_sequence(self.settings.get(_SEQ_LENGTH, parallel.tp), self._longest)

    def _read_model(self, answer: str) -> str | dict[str, str]:
        """A path, or the type of a model from scratch, with transformers' default sizes."""
        from lightning_megatron.convert.registry import known_families, model_config
        from lightning_megatron.hub import local_folder

        path = Path(answer).expanduser()
        given = {"model_type": answer} if answer in known_families() and not path.exists() else str(path)
        model = self._model = model_config(given if isinstance(given, dict) else str(local_folder(given, "config")))
        self._longest = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None
        return given
