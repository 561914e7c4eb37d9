"""Tabulate and draw how many GPUs agents need that imagine with a model, and what limits them, from its configuration.

An agent keeps a world of `context` tokens and imagines a step every so many seconds: `read` tokens of its action go in,
`written` tokens of what it would see come out. Three things can run out on a GPU:

- memory: keys and values of the kept worlds beside the weights; a shared start of contexts is kept once;
- bandwidth: each written token reads its world's keys and values, and its share of a batch's pass over the weights,
  which a looped block makes once a loop;
- FLOPs: of tokens read and written.

No GPU is asked: shares of peak rates are assumptions, as in `lab.scaling`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes

from eval.scores.tables import table
from lab.reports.plots import COLORS, MARKERS, STYLE, make_canvas, svg_text
from lab.scaling import BFLOAT16, kv_bytes
from loopwm.records.command import above_zero
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.flops import forward_flops
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer

EXAMPLE = "python -m lab serving-limits --preset 1b --seconds 10 --picture docs/scaling.svg"
AGENTS = (10**3, 10**4, 10**5)
MIDDLE = 10**4
"""Agents of the panel that draws their pace."""
SECONDS = (0.3, 1, 3, 10, 30)
SHARED = (0.0, 0.5, 0.9)
DEPTHS = (1, 2, 4, 8)
PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Gpu:
    """memory: bytes. bandwidth: bytes a second. flops: a second. share: of both rates that is reached."""

    memory: float
    bandwidth: float
    flops: float
    share: float


@dataclass(frozen=True)
class Load:
    """Demand of an agent.

    context: tokens of its world. shared: part of them that all agents have in common. read, written: tokens of an
    imagined step. seconds: from one to the next. batch: most worlds that a GPU decodes at a time.
    """

    context: int = 1000
    shared: float = 0.0
    read: int = 10
    written: int = 30
    seconds: float = 10.0
    batch: int = 256


@dataclass(frozen=True)
class Model:
    """Costs at a depth: weights: bytes kept. pass_bytes: bytes of weights that a pass reads. kv: bytes a token."""

    weights: int
    pass_bytes: int
    kv: int
    flops: float

    @classmethod
    def of(cls, config: LoopWMConfig, depth: int, context: int) -> Model:
        with torch.device("meta"):
            model = LoopWMForCausalLM(config)
        weights = BFLOAT16 * model.num_parameters()
        in_block = [weight.numel() for name, weight in model.named_parameters() if name.startswith("model.core.block.")]
        return cls(
            weights=weights,
            pass_bytes=weights + (depth - 1) * BFLOAT16 * sum(in_block),
            kv=kv_bytes(config, depth),
            flops=forward_flops(config, depth, context),
        )


def limits(model: Model, load: Load, gpu: Gpu) -> dict[str, float]:
    """Return GPUs an agent by what they run out of. The largest one holds. A start that agents share is not counted.

    Raises InputError if the weights leave no memory.
    """
    if gpu.memory <= model.weights:
        raise InputError(f"--memory: must be above the {model.weights:,} bytes of the weights, got {gpu.memory:,.0f}")
    own = load.context * (1 - load.shared) + load.read + load.written
    token_bytes = model.kv * load.context + model.pass_bytes / load.batch
    rate = gpu.share * load.seconds
    return {
        "memory": model.kv * own / (gpu.memory - model.weights),
        "bandwidth": load.written * token_bytes / (gpu.bandwidth * rate),
        "FLOPs": (load.read + load.written) * model.flops / (gpu.flops * rate),
    }


def token_seconds(model: Model, load: Load, gpu: Gpu) -> float:
    """Return the seconds of a written token of a world alone on a GPU; N GPUs divide them, exchanges left out."""
    return (model.pass_bytes + model.kv * load.context) / (gpu.bandwidth * gpu.share)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load = Load()
    parser.add_argument("--preset", choices=tuple(PRESETS), default="1b", help="of the model (default: 1b)")
    parser.add_argument("--context", type=int, default=load.context, help="tokens of a world (default: 1000)")
    parser.add_argument("--read", type=int, default=load.read, help="tokens of an action (default: 10)")
    parser.add_argument("--written", type=int, default=load.written, help="tokens of an observation (default: 30)")
    parser.add_argument(
        "--seconds", type=above_zero, default=load.seconds, help="from a step to the next (default: 10)"
    )
    parser.add_argument("--memory", type=above_zero, default=72e9, help="bytes of a GPU to use (default: H100, 90 %%)")
    parser.add_argument("--bandwidth", type=above_zero, default=3.35e12, help="bytes a second (default: H100)")
    parser.add_argument("--peak", type=above_zero, default=989e12, help="FLOPs a second (default: H100, bfloat16)")
    parser.add_argument("--share", type=above_zero, default=0.4, help="of both rates that is reached (default: 0.4)")
    parser.add_argument("--picture", type=Path, help="an SVG to write")


def run(args: argparse.Namespace) -> None:
    gpu = Gpu(args.memory, args.bandwidth, args.peak, args.share)
    load = Load(context=args.context, read=args.read, written=args.written, seconds=args.seconds)
    shape: dict[str, Any] = {**PRESETS[args.preset], "vocab_size": len(load_tokenizer())}
    config = LoopWMConfig(**shape)
    depths = {depth: Model.of(config, depth, load.context) for depth in sorted({*DEPTHS, config.default_depth})}
    print(_table(depths[config.default_depth], depths, load, gpu))
    if args.picture:
        write_atomic(args.picture, draw(depths[config.default_depth], depths, load, gpu))


def _table(model: Model, depths: Mapping[int, Model], load: Load, gpu: Gpu) -> str:
    cases = {"as it stands": (model, load)}
    cases |= {_loops(depth): (of, load) for depth, of in depths.items() if of is not model}
    cases |= {f"{share:.0%} of contexts shared": (model, replace(load, shared=share)) for share in SHARED if share}
    rows = []
    for name, (of, demand) in cases.items():
        each = limits(of, demand, gpu)
        worst = max(each, key=each.__getitem__)
        rows.append([name, worst, *(f"{agents * each[worst]:,.1f}" for agents in AGENTS)])
    return table(["", "runs out", *(f"GPUs, {agents:,} agents" for agents in AGENTS)], rows)


def draw(model: Model, depths: Mapping[int, Model], load: Load, gpu: Gpu) -> str:
    """Return an SVG of four panels: what runs out, loops, shared contexts, and GPUs that share one model."""
    with mpl.rc_context(STYLE):
        canvas, (out, loops, shared, split) = make_canvas(9, 5.5, 2, 2)
        paces = [limits(model, replace(load, seconds=seconds), gpu) for seconds in SECONDS]
        _lines(out, SECONDS, {name: [MIDDLE * pace[name] for pace in paces] for name in paces[0]})
        by_depth = {_loops(depth): max(limits(of, load, gpu).values()) for depth, of in depths.items()}
        _lines(loops, AGENTS, {name: [agents * each for agents in AGENTS] for name, each in by_depth.items()})
        by_share = {f"{share:.0%}": limits(model, replace(load, shared=share), gpu)["memory"] for share in SHARED}
        _lines(shared, AGENTS, {name: [agents * each for agents in AGENTS] for name, each in by_share.items()})
        alone = {depth: token_seconds(of, load, gpu) for depth, of in depths.items()}
        _lines(split, PARALLEL, {_loops(depth): [1e3 * t / gpus for gpus in PARALLEL] for depth, t in alone.items()})
        out.set(title=f"what runs out, {MIDDLE:,} agents", xlabel="seconds between imagined steps", ylabel="GPUs")
        loops.set(title="loops", xlabel="agents", ylabel="GPUs")
        shared.set(title="shared part of contexts, memory alone", xlabel="agents", ylabel="GPUs")
        split.set(title="a world alone, model split over GPUs", xlabel="GPUs", ylabel="ms a token", yscale="linear")
        return svg_text(canvas, "scaling")


def _loops(depth: int) -> str:
    return f"{depth} loop" + "s" * (depth > 1)


def _lines(axes: Axes, xs: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    for (name, ys), color, marker in zip(lines.items(), COLORS, MARKERS, strict=False):
        axes.plot(xs, ys, color=color, marker=marker, ms=3, lw=1.2, label=name)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(xs, [f"{x:,g}" for x in xs])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.legend(fontsize=7)
