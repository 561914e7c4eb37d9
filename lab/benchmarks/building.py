"""Rate at which one process plans and builds batches, beside that at which a device trains them.

    python -m lab.benchmarks.building --train data/shards/reference-train --rate 600000

Prints tokens/s, and the processes of `batch.workers` that keep a device busy which trains at `--rate` tokens/s. Each
process plans all steps and builds every n-th of them: n processes take plan + build / n a step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import time
from pathlib import Path

from loopwm.text.data.data_loader import LoaderState
from loopwm.text.training.config import load_config
from loopwm.text.training.program import TextProgram


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/reference.yaml"))
    parser.add_argument("--train", nargs="+", required=True, help="shard folders")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=600_000, help="tokens/s of the device")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="changes of the configuration"
    )
    args = parser.parse_args()
    program = TextProgram(load_config(args.config, [f"data.train={args.train}", "data.dev=[]", *args.set]))
    gc.freeze()  # as in a worker
    stream, started = program.train_stream, time.process_time()
    steps = stream.steps(LoaderState())
    planned = [next(steps)]
    first = time.process_time() - started
    planned += itertools.islice(steps, args.steps)
    plan = (time.process_time() - started - first) / args.steps
    started = time.process_time()
    few = planned[:: max(1, args.steps // 8)]
    for rows, _ in few:
        stream.collate(rows, program.config.batch.micro_batches, program.config.data.max_horizon)
    build = (time.process_time() - started) / len(few)
    tokens = sum(row.tokens for rows, _ in planned for row in rows) / len(planned)
    room = tokens / args.rate - plan
    print(f"first plan {first:.1f} s; a step of {tokens:,.0f} tokens: {plan:.3f} s to plan, {build:.3f} s to build")
    print(f"one process {tokens / (plan + build):,.0f} tokens/s, 14 {tokens / (plan + build / 14):,.0f}")
    enough = f"{math.ceil(build / room)} processes" if room > 0 else "no number of processes"
    print(f"{enough} for a device that trains {args.rate:,.0f} tokens/s")


if __name__ == "__main__":
    main()
