"""Command line of the study; `__init__` shows how to call it."""

from __future__ import annotations

import argparse

import torch

from benchmarks.long_answers import merge, pretrain, study, warm


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.long_answers")
    commands = parser.add_subparsers(required=True)
    for name, module, run, about in (
        ("pretrain", pretrain, pretrain.pretrain, "make the model"),
        ("study", study, study.study, "run all cells"),
        ("warm", warm, warm.warm, "compile the GPU kernels of the study in several processes"),
        ("merge", merge, merge.merge, "join studies of the same arms with other seeds"),
    ):
        command = commands.add_parser(name, help=about)
        module.add_arguments(command)
        if module in (pretrain, study):
            command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.set_defaults(run=run)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
