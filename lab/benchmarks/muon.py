"""A step of our Muon against torch's, on the matrices of a configuration's model; one thread.

python -m lab.benchmarks.muon --config configs/reference.yaml
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.program import model_config
from loopwm.trainer.optimizer import Muon, build_optimizers

REPEATS = 3


def seconds(optimizer: Optimizer) -> float:
    """Return the minimum CPU time of a step; the first one, which creates the momenta, does not count."""
    times = []
    for _ in range(1 + REPEATS):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.randn_like(parameter)
        started = time.process_time()
        optimizer.step()
        times.append(time.process_time() - started)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/reference.yaml"))
    config = load_config(parser.parse_args().config)
    torch.set_num_threads(1)
    model = LoopWMForCausalLM(model_config(config.model, len(load_tokenizer())))
    ours, _ = build_optimizers(model, config.optimizer)
    assert isinstance(ours, Muon)
    group = ours.param_groups[0]
    copies = [nn.Parameter(copy.deepcopy(parameter.detach())) for parameter in group["params"]]
    theirs = torch.optim.Muon(
        copies,
        lr=group["lr"],
        momentum=group["momentum"],
        weight_decay=group["weight_decay"],
        adjust_lr_fn="match_rms_adamw",
    )
    own, other = seconds(ours), seconds(theirs)
    print(f"{len(copies)} matrices: torch.optim.Muon {other:.3f} s, ours {own:.3f} s, {other / own:.1f} times as fast")


if __name__ == "__main__":
    main()
