"""User mistakes in every command: a one-line message with a fix, exit code 2, and no file written."""

import argparse
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.cases import LLAMA_8B
from lightning_megatron.cli.commands import build_parser
from tests.cli.command import run_all
from tests.cli.corpus import configuration

_FIT = "fit --config config.yaml"
_ALONE = "--model lightning.pytorch.demos.boring_classes.BoringModel --data DatasetDataModule --data.train x"
_GENERATE = "generate --prompt x --checkpoint"
_PREPROCESS = "preprocess --input config.yaml --output-prefix out/x --tokenizer tok"
_CONVERT = "convert --load-path hf --save-path sub/x --to"
_PLAN = "plan --model 8b --gpus"
_NOT_INT = "trainer.max_steps: expected a <class 'int'>, got"

MISTAKES = {
    # Found by argparse.
    "": "error: the following arguments are required: COMMAND; see lightning-megatron --help\n",
    "fti": "error: argument COMMAND: invalid choice: 'fti'",
    "convert": "the following arguments are required: --load-path, --save-path, --to",
    f"{_PREPROCESS} --workers many": "argument --workers: invalid int value: 'many'; see lightning-megatron preprocess",
    "inspect tok --png a.png": "error: unrecognized arguments: --png a.png; see lightning-megatron inspect",
    f"{_GENERATE} x --tokens_to_generate 3": "--tokens_to_generate 3; use --max-new-tokens; see",
    # Found by a command, with options named as typed.
    "config --template a --from-accelerate b": "--template, --from-accelerate: expected one of them, got both",
    "config --output tok --overwrite": "error: --output tok is a directory; give the name of a file",
    "config --template gpt2_small --output /dev/full --overwrite": "--output /dev/full cannot be written: [Errn",
    f"{_PREPROCESS} --split-sentences --language english": "--language english: expected an ISO 639 code",
    "inspect nowhere": "path=nowhere does not exist, nor do nowhere.bin and .idx; give the prefix of a dataset",
    "inspect .": "path=. is neither a dataset (.bin and .idx) nor a supported checkpoint; give one of these in it",
    "inspect corpus_text_document --documents -1": "--documents -1 must be at least 0; correct",
    "inspect hf --documents 2": "--documents 2 is for datasets, and hf is a checkpoint; leave it out",
    "merge --input corpus_text_document nowhere --output-prefix x": "--input nowhere needs two files, missing: now",
    "merge --input corpus_text_document --output-prefix config.yaml/x": "config.yaml/x cannot be written ([Errno 20] N",
    "average --load-path hf --save-path sub/x": "--load-path hf: expected at least two checkpoints, got one",
    f"{_GENERATE} hf --tp 0": "--tp 0 must be at least 1; correct --tp\n",
    f"{_CONVERT} hf --tp 2": "--tp 2 would do nothing with --to hf",
    f"{_CONVERT} megatron --tp 3": "--tp 3 does not divide num_attention_heads=2",
    "convert --load-path hf --save-path /proc/x --to hf": "/proc/x cannot be written",
    f"{_PLAN} 8 --memory 80": "--memory 80: expected a unit, got none; give 80GB",
    f"{_PLAN} 8 --memory 0": "--memory 0: expected more than 0 bytes; give that of a GPU, e.g. 80GB",
    f"{_PLAN} 8 --memory 0.0GB": "--memory 0.0GB: expected more than 0 bytes",
    f"{_PLAN} 8 --memory 99999999999999999GB": "expected 1MiB to 1PiB; give that of a GPU",
    f"{_PLAN} 2147483647": "--gpus 2147483647 must be at most 1048576",
    f"{_PLAN} 8 --global-batch-size 2147483647": "--global-batch-size 2147483647 must be at most 1048576",
    "train-tokenizer --input config.yaml --vocab-size 2147483647 --output out": "must be at most 16777216",
    f"{_PREPROCESS} --workers 2147483647": "--workers 2147483647 must be at most 1024",
    f"{_PLAN} 8 --memory 10GB": "error: memory: expected at least ",
    f"{_PLAN} 0": "error: --gpus",
    f"{_PLAN} 8 --output config.yaml": "error: --output config.yaml exists; give another name, or --overwrite",
    f"{_PLAN} 8 --picture no/plan.png": "/no is not a writable directory",
    f"{_PLAN} 8 --picture plan.foo": "error: --picture 'foo' is unknown; choose from eps",
    "plan --model gpt2 --gpus 8": "--seq-length 4096 is longer than max_position_embeddings=1024",
    "plan --model nowhere/at/all --gpus 8": "nowhere/at/all",
    f"{_GENERATE} hf --prompt-file none.txt": "error: only one of the arguments --prompt --prompt-file is required",
    "generate --checkpoint hf --prompt-file none.txt": "none.txt cannot be read: No such file",
    "generate --checkpoint hf --prompt-file - --tp 2": "--prompt-file -: expected one process, which can read it",
    f"{_GENERATE} hf --stream --num-beams 2": "--stream: expected one prompt and completion, without",
    f"{_GENERATE} none": "does not exist",
    f"{_GENERATE} /dev/null": "expected a Hugging Face model directory with weights, a *.ckpt",
    f"{_GENERATE} bare": "bare has no tokenizer; give --tokenizer DIR",
    f"{_GENERATE} bert": "bert is a megatron-bert, generate needs a GPT or T5",
    f"{_GENERATE} classifier": "classifier has a head for task='sequence_classification', generate needs a language",
    f"{_GENERATE} t5 --tokenizer hf --add-bos": "--add-bos: expected a GPT, which continues its prompt",
    f"{_GENERATE} hf --num-beams 2 --top-k 3": "--num-beams 2 is for beam search",
    f"{_GENERATE} hf --tp 3 --accelerator cpu": "--tp 3 does not divide num_attention_heads=2",
    f"{_GENERATE} hf --temperature 0": "--temperature 0 must be more than 0; leave it out for the most likely tokens",
    f"{_GENERATE} hf --tp 2147483647": "--tp 2147483647 must be at most 1024",
    f"{_GENERATE} hf --tp 1 --pp 2147483647": "--pp 2147483647 must be at most 1024",
    # Found by fit: wrong options,
    "fit other.yaml": "arguments: other.yaml; did you mean --config other.yaml?",
    "fit": "give --config FILE, or model and data as options: see --help",
    "fit --data.seq_length 8": "error: data: Option 'seq_length' is not accepted",
    f"{_FIT} --config nowhere.yaml": "nowhere.yaml",
    f"{_FIT} --trainer.max_stepps 3": "max_stepps 3; did you mean --trainer.max_steps?",
    f"{_FIT} --modle.lrr 3": "did you mean --model?",
    "fit --config 3.yaml --config over.yaml": f"error: 3.yaml:2: {_NOT_INT} 'many'",
    f"{_FIT} --trainer.max_steps many": f"error: {_NOT_INT} 'many'",
    f"{_FIT} --trainer.gradient_clip_val nan": "<class 'float'>, <class 'NoneType'>, got 'nan'\n",
    f"{_FIT} --model.num_labels 3": "num_labels=3: expected task='sequence_classification' or 'token_classification', ",
    f"{_FIT} --model.train_step foo": "error: model.train_step: expected one of typing.Literal['gpt', 'bert', 't5', ",
    f"{_FIT} --trainer.max_steps=": f"error: {_NOT_INT} ''",
    f"{_FIT} --model.lr_schedule cosine": 'error: model.lr_schedule: Unable to load config "cosine"\n',
    f"{_FIT} --model.lora.targets q_proj": "model.lora.targets: expected one of tuple[str, ...], typing.Literal['all-",
    f"{_FIT} --data MegatronModule": "LightningDataModule'>, <class 'NoneType'>, got 'MegatronModule'\n",
    f"{_FIT} --data null": "data: expected a data module, or a model with data loaders, got none; give --data",
    f"{_FIT} --seed_everything -3": "seed_everything=-3: expected a number from 0 to 4294967295",
    f"{_FIT} --data.seed 4294967296": "seed=4294967296 must be less than 4294967296, as NumPy's shuffles need it",
    f"{_FIT} --trainer.strategy.tp_degree 3": "Option 'tp_degree' is not accepted; use --trainer.strategy.tp",
    f"{_FIT} --trainer.strategy.tpp 3": "Option 'tpp' is not accepted; did you mean tp?",
    f"{_FIT} --trainer.strategy.recompute some": "trainer.strategy.recompute: expected one of typing.Literal['selec",
    f"{_FIT} --trainer.strategy.load_from.pth x": "error: trainer.strategy.load_from: Option 'pth' is not accepted",
    f"{_FIT} --trainer.strategy.load_from.path x": "/x does not exist; give the path of a *.ckpt directory",
    f"{_FIT} --model.optimizer.beta9 3": "did you mean optimizer.beta2?",
    f"{_FIT} --model MegatronModul": "did you mean MegatronModule?",
    f"{_FIT} --model.lr": "error: argument --model: expected one argument",
    f"{_FIT} --trainer.max_steps=1 -c": "error: argument -c/--config: expected one argument",
    f"{_FIT} --trainer.gradient_clip_val -1e-3": "error: argument --trainer.gradient_clip_val: expected one argument",
    f"{_FIT} --trainer.strategy.heartbeat 60": "heartbeat.Heartbeat'>, <class 'NoneType'>, got '60'\n",
    f"{_FIT} --trainer.precision fp16": "got 'fp16'; did you mean 16-mixed?",
    f"{_FIT} --trainer.precision int4": "error: trainer.precision: expected one of typing.Literal[64",
    f"{_FIT} --model.lora.r 8": "Option 'r' is not accepted; use --model.lora.rank",
    f"{_FIT} --model.lr .inf": "lr=inf must be a finite number",
    f"{_FIT} --learning_rate 3": "--learning_rate 3; use --model.lr",
    f"{_FIT} --data.block_size 3": "Option 'block_size' is not accepted; use --data.seq_length",
    f"{_FIT} --data.per_device_train_batch_size 3": "is not accepted; use --data.micro_batch_size",
    f"{_FIT} --resume_from_checkpoint x": "use --ckpt_path",
    f"{_FIT} --output_dir x": "use --trainer.default_root_dir",
    f"{_FIT} --num_train_epochs 3": "use --trainer.max_epochs",
    # values that name something missing,
    f"{_FIT} --trainer.accelerator tpu": "torch_xla",
    f"{_FIT} --trainer.logger MLFlowLogger": "MLFlowLogger: expected the package 'mlflow>=1.0.0', got none; pip",
    f"{_FIT} --trainer.logger.save_dir /dev/null/x": "saved in /dev/null/x: /dev/null is not a directory",
    f"{_FIT} --trainer.strategy megatron_tp3_pp1": "expected MegatronStrategy, megatron, megatron_tpN",
    f"{_FIT} --trainer.devices many": "devices=many: expected a number of processes of at least 1",
    f"{_FIT} --trainer.devices 2147483647": "devices=2147483647 must be at most 1024",
    f"{_FIT} --trainer.num_nodes 2147483647": "num_nodes=2147483647 must be at most 1048576",
    f"{_FIT} --trainer.max_steps 99999999999999999999": "max_steps=99999999999999999999 must fit into 64 bits",
    f"{_FIT} --trainer.log_every_n_steps -1": "log_every_n_steps=-1 must be at least 0",
    f"{_FIT} --model.model.n_embd 99999999999999999999": "hidden_size=99999999999999999999, which must be at most",
    f"{_FIT} --trainer.devices -1": "devices=-1: expected a number of processes of at least 1",
    f"{_FIT} --model.model nowhere/config.json": "nowhere/config.json does not exist",
    f"{_FIT} --ckpt_path ''": "ckpt_path must not be empty; give the path of a *.ckpt, or leave it out",
    f"{_FIT} --ckpt_path nowhere.ckpt": "nowhere.ckpt does not exist; give the path of a *.ckpt directory",
    f"{_FIT} --ckpt_path /dev/../etc/passwd": "expected a checkpoint directory, got another file",
    f"{_FIT} --ckpt_path /proc": "checkpoint /proc lacks its file meta.pt",
    f"{_FIT} --ckpt_path best": "expected a ModelCheckpoint of this Trainer that has saved, got none",
    # and combinations that do not fit.
    f"{_FIT} --trainer.strategy ddp": "MegatronModule runs on DDPStrategy; use MegatronStrategy(...)",
    f"{_FIT} --trainer.accumulate_grad_batches 2": "accumulate_grad_batches=2: expected 1, since a batch is a whole",
    f"{_FIT} --trainer.val_check_interval 0": "val_check_interval=0: expected steps or a share of an epoch",
    f"{_FIT} --trainer.check_val_every_n_epoch 0": "check_val_every_n_epoch=0: expected epochs; use limit_val_batches",
    "test --config config.yaml": "IndexedDataModule has no test split for trainer.test; give it data or a weight",
    f"{_FIT} --trainer.gradient_clip_val -1": " must be at least 0; correct gradient_clip_val",
}
for _option in ("model.lr_schedule", "model.optimizer", "model.generation", "data.masking"):
    MISTAKES[f"{_FIT} --{_option} 60"] = f'{_option}: Unable to load config "60"\n'
_SCRIPT_FLAGS = {
    "--load_path hf": "the following arguments are required: --to; see",
    "--convert_checkpoint_from_megatron_to_transformers": "use --to",
    "--target_tensor_model_parallel_size 2": "use --tp",
    "--target_params_dtype fp16": "use --dtype",
    "--print-checkpoint-structure": "use lightning-megatron inspect",
    "--use_distributed_optimizer": "leave it out",
}
MISTAKES |= {f"convert {flag} --save_path x": text for flag, text in _SCRIPT_FLAGS.items()}
MISTAKES[f"convert {' '.join(_SCRIPT_FLAGS)}"] = (
    "--target_tensor_model_parallel_size: use --tp; --target_params_dtype: use"
)
MISTAKES["convert --load-path hf --saver core --save-path x"] = "--saver core; use --to; see"
MISTAKES["preprocess --input x --tokenizer-type HuggingFaceTokenizer"] = (
    "use --tokenizer, a directory of a transf"
)


def _is_integer(action: argparse.Action) -> bool:
    return getattr(action.type, "__name__", "") == "_integer"


def _required(options: argparse.ArgumentParser) -> str:
    """A value for each option that a command cannot be without, as typed."""
    return " ".join(
        f"{action.option_strings[-1]} {1 if _is_integer(action) else 'hf'}"
        for action in options._actions
        if action.required and action.option_strings
    )


for _command, _options in build_parser()[1].items():
    for _action in _options._actions:
        # Lightning's own commands have no options here.
        if _is_integer(_action):
            MISTAKES[f"{_command} {_action.option_strings[-1]} 99999999999999999999"] = (
                "expected an integer of at most 64"
            )
        elif _action.type is float:
            # Of --prompt and --prompts, generate needs one, which no parser says.
            _needed = _required(_options) + " --prompt x" * (_command == "generate")
            MISTAKES[f"{_command} {_needed} {_action.option_strings[-1]} inf"] = (
                " must be a finite number"
            )

if not torch.cuda.is_available():
    _NO_GPU = "accelerator=gpu: expected a GPU that torch can use, got none; give accelerator=cpu"
    MISTAKES[f"fit {_ALONE} --data.micro_batch_size 1 --trainer.accelerator gpu"] = _NO_GPU
    MISTAKES[f"{_GENERATE} hf --accelerator gpu"] = _NO_GPU.replace(
        "accelerator=", "--accelerator "
    )

_ALIASES = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
_OF_ACCELERATE = (
    "is a configuration of Accelerate; convert it with lightning-megatron config --from-accelerate"
)
_MANY = "expected at most 100,000 values, nested 100 deep, got more"
FILES = {
    "trainer:\n\tmax_steps: 3": ":2: Problems parsing config: while scanning for the next token found",
    "trainer:\n  max_stepps: 3": ":2: Subcommand 'fit' does not accept option 'trainer.max_stepps'; did",
    "data:\n  class_path: IndexedDataModule\n  init_args:\n    seq_len: 3": ":4: data: Option 'seq_len",
    "trainer:\n  max_steps: many": f":2: {_NOT_INT} 'many'",
    'trainer:\n  max_steps: "\\e]0;mine\\a"': rf":2: {_NOT_INT} '\x1b]0",
    "trainer:\nseed_everything: 3": ":1: trainer: Unexpected config:",
    "data:\n  class_path: IndexedDataModule\n  init_args:\n    rampup_batch_size: 3 4 5": (
        ":4: data.rampup_batch_size: expected one of list[int], <class 'NoneType'>, got '3 4 5'"
    ),
    "trainer.max_steps": ":1: Unexpected config: trainer.max_steps",
    "": ":1: Unexpected config:",
    _ALIASES: f": {_MANY}",
    "trainer: &a {logger: *a}": f": {_MANY}",
    # Newer libraries of YAML have a limit of their own, from 1,000 on.
    f"trainer: {'[' * 500}{']' * 500}": f": {_MANY}",
    f"trainer: {'9' * 5000}": ": expected numbers of at most 1,000 characters, got one of 5,000; correct it",
    f"trainer: 1{':1' * 500_000}": ": expected numbers of at most 1,000 characters, got one of 1,000,001",
    "trainer: !!bool maybe": ": expected values of the types that their tags or forms say, got KeyError('maybe')",
    "trainer: \xff": " is not UTF-8 text",
    **dict.fromkeys(
        ("distributed_type: MEGATRON_LM", '{\n\t"distributed_type": "MEGATRON_LM"}'),
        f" {_OF_ACCELERATE}",
    ),
}
"""Contents of configuration files, and the message that follows the file name."""


@pytest.fixture(scope="module")
def folder(corpus: Path, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory with a dataset and its tokenizer, models, and configurations."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(corpus.parent, folder, dirs_exist_ok=True)
    for name in ("hf", "bare", "bert", "classifier", "t5"):
        shutil.copytree(checkpoints / name, folder / name)
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(corpus, folder)))
    (folder / "over.yaml").write_text("trainer: {devices: 1}")
    (folder / "8b").mkdir()
    (folder / "8b/config.json").write_text(json.dumps(LLAMA_8B))
    for number, text in enumerate(FILES):
        (folder / f"{number}.yaml").write_text(text, encoding="latin-1")
    return folder


def test_mistakes_print_one_line_exit_with_two_and_write_nothing(folder: Path) -> None:
    cases = MISTAKES | {
        f"{_FIT} --config={i}.yaml": f"{i}.yaml{message}"
        for i, message in enumerate(FILES.values())
    }
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    results = run_all(folder, map(shlex.split, cases))
    wrong = [
        f"{line} [{code}]: {out}{err}"
        for (line, message), (code, out, err) in zip(cases.items(), results, strict=True)
        if (code, out, err.count("\n"), err[:7], err[:-1].isprintable())
        != (2, "", 1, "error: ", True)
        or message not in err
    ]
    assert not wrong, "".join(wrong)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
