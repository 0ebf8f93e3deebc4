"""Command line of the study; `__init__` shows how to call it."""

from __future__ import annotations

import argparse

import torch

from benchmarks.long_answers import merge, pretrain, study, warm


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.long_answers")
    commands = parser.add_subparsers(required=True)
    default = "cuda" if torch.cuda.is_available() else "cpu"

    first = commands.add_parser("pretrain", help="make the model")
    first.add_argument("--out", required=True)
    first.add_argument("--steps", type=int, default=1_000_000)
    first.add_argument("--seconds", type=float, default=330.0)
    first.add_argument("--lr", type=float, default=2e-3)
    first.add_argument(
        "--slip", type=float, default=0.005, help="probability that a demonstrated step is wrong"
    )
    first.add_argument("--longest", type=int, default=160, help="steps of the longest problem")
    first.add_argument("--first", type=int, default=10, help="steps of the longest problem at first")
    first.add_argument("--hold", type=float, default=0.6, help="share of the time at the full learning rate")
    first.add_argument("--start", help="directory of a model to go on from")
    first.add_argument("--batch-tokens", type=int, default=2048)
    first.add_argument("--config", default="{}", help="JSON, changes to task.model_config")
    first.add_argument("--seed", type=int, default=0)
    first.add_argument(
        "--measure", nargs="*", type=int, default=[], help="lengths whose pass rate is reported"
    )
    first.add_argument("--log-every", type=int, default=100)
    first.set_defaults(run=pretrain.pretrain)

    second = commands.add_parser("study", help="run all cells")
    study.add_arguments(second)
    second.set_defaults(run=study.study)

    third = commands.add_parser("warm", help="compile the GPU kernels of the study in several processes")
    third.add_argument("--processes", type=int, default=12)
    third.add_argument("--share", help="i/n: compile this share (used by the processes themselves)")
    third.add_argument("--settings", default="{}")
    third.set_defaults(run=warm.warm)

    fourth = commands.add_parser("merge", help="join studies of the same arms with other seeds")
    fourth.add_argument("parts", nargs="+", help="directories that `study` wrote")
    fourth.add_argument("--out", required=True)
    fourth.add_argument("--title")
    fourth.add_argument("--notes", nargs="*", default=[], help="paragraphs for the report")
    fourth.set_defaults(run=merge.merge)

    for command in (first, second):
        command.add_argument("--device", default=default)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
