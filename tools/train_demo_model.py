"""Train the bundled toy chat model, or evaluate it.

    python -m tools.train_demo_model
    python -m tools.train_demo_model --refine 350
    python -m tools.train_demo_model --evaluate
    python -m tools.train_demo_model --mtp 300 --out FOLDER

The same seed, number of steps and number of threads give the same weights.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from tools.demo_model.evaluate import evaluate_model
from tools.demo_model.mtp_layer import train_mtp_layer
from tools.demo_model.train import TRAIN_SIZE, Plan, refine_model, train_model

FOLDER = Path(__file__).parents[1] / "molink" / "data" / "demo_model"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model folder")
    parser.add_argument("--evaluate", action="store_true", help="print figures, train nothing")
    parser.add_argument("--steps", type=int, default=1080, help="batches of 1536 tokens")
    parser.add_argument("--refine", type=int, metavar="STEPS", help="go on with the model in --out")
    parser.add_argument(
        "--mtp",
        type=int,
        metavar="STEPS",
        help="train an MTP layer for the bundled model, and write both to --out",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=TRAIN_SIZE, help="training split")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.evaluate:
        command = shlex.join(["python", "-m", "tools.train_demo_model", *sys.argv[1:]])
        figures = evaluate_model(arguments.out, arguments.seed, arguments.conversations)
        print(json.dumps({"command": command, **figures}, indent=2))
        return
    if arguments.mtp:
        plan = Plan(arguments.mtp, arguments.seed, rate=2e-3, warmup=20)
        train_mtp_layer(arguments.out, FOLDER, plan, arguments.conversations)
        return
    if arguments.refine:
        refine_model(
            arguments.out, Plan(arguments.refine, arguments.seed, rate=1e-3, warmup=20, fall=0.9)
        )
        return
    plan = Plan(steps=arguments.steps, seed=arguments.seed)
    train_model(arguments.out, plan, arguments.conversations)


if __name__ == "__main__":
    main()
