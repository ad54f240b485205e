"""What do ``fit``, ``validate``, ``test`` and ``predict`` say to ``--help``?

Lightning's own help lists some hundred options and takes many seconds, because it loads every class that it describes.
This is the part that people look for; it says which options show the rest.
"""

from __future__ import annotations

TRAINER_COMMANDS = {
    "fit": "train, with validation, checkpoints and loggers",
    "validate": "evaluate on the validation split",
    "test": "evaluate on the test split",
    "predict": "run the model over the prediction data",
}
"""Name of each command that LightningCLI runs, and what it does."""

_TEMPLATE = """\
usage: {prog} {command} [--config FILE]... [options]

{summary}

Options are read from left to right; a later one wins, also over the file. Every option can stand in the file.

  -c, --config FILE       YAML with the sections trainer, model and data; may be repeated
  --print_config          print the complete configuration as YAML, and stop
  --ckpt_path PATH        checkpoint to start from: a directory *.ckpt, "last" or "best"; any tp, pp, vpp or dp
  --seed_everything INT   seed of weights, dropout and data order (default: 1234; false leaves it alone)

  --trainer.KEY VALUE     an argument of Lightning's Trainer, e.g.
      --trainer.accelerator {{cpu,gpu}}    where to run; the same configuration runs on both
      --trainer.devices N                processes on this machine
      --trainer.num_nodes N              machines
      --trainer.max_steps N              optimizer steps
      --trainer.precision {{32-true,bf16-mixed,bf16-true,16-mixed}}
      --trainer.strategy NAME            megatron_tp2_pp2 (tp and pp of 1, 2, 4, 8), or MegatronStrategy and then
      --trainer.strategy.tp N            ... any of its arguments: tp, pp, vpp, sequence_parallel, num_microbatches, ...
      --trainer.default_root_dir DIR     where logs and checkpoints go

  --model CLASS           LightningModule to train (default: MegatronModule)
  --model.KEY VALUE       an argument of it, e.g.
      --model.model PATH                 Hugging Face config.json, or a folder that holds one
      --model.pretrained true            start from the weights in that folder
      --model.task NAME                  its head, e.g. sequence_classification; the config's own if left out
      --model.lr X                       learning rate

  --data CLASS            LightningDataModule, e.g. IndexedDataModule, InstructionDataModule, DatasetDataModule
  --data.KEY VALUE        an argument of it, e.g.
      --data.data_path PREFIX            indexed dataset, without .bin; a blend: '[0.7, PREFIX, 0.3, PREFIX]'
      --data.tokenizer DIR               what samples of BERT, T5 and instructions need
      --data.seq_length N                tokens of one sample

  -h, --help              this text
  --model.help MegatronModule, --trainer.strategy.help MegatronStrategy, --data.help IndexedDataModule
                          every argument of a class, with its type, default and meaning
  --help-all              every option of Trainer, and every argument of all our classes (takes a while)

Examples:
  {prog} {command} --config configs/gpt2_tiny_cpu.yaml
  {prog} {command} --config configs/gpt2_tiny_cpu.yaml --trainer.accelerator gpu --trainer.precision bf16-mixed
  {prog} {command} --config configs/gpt2_tiny_cpu.yaml --trainer.strategy.tp 1 --trainer.devices 2 --ckpt_path last.ckpt
  torchrun --nproc-per-node 8 -m lightning_megatron {command} --config configs/llama_1b.yaml

Exit codes: 0 done, 1 failed, 130 interrupted, 2 wrong arguments or settings (one line says which)."""


def trainer_help(prog: str, command: str) -> str:
    """The text for one command."""
    summary = TRAINER_COMMANDS[command]
    return _TEMPLATE.format(prog=prog, command=command, summary=f"{summary[0].upper()}{summary[1:]}.")
