"""Summary of a training study: `results.json`, `report.md` and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from eval.scores.suites import Suite
from eval.scores.tables import table
from lab.reports.figures import UNITS
from lab.studies.differences import STUDIED, Difference, Mean, differences, means
from lab.studies.study_report import differences_table, latents_table, means_table, plot_latents, plot_study
from lab.studies.text_protocol import Job, TextProtocol
from lab.studies.training_runs import TrainingFacts, make_run, read_training_log
from lab.studies.window_scores import read_scores
from loopwm.core.depth import backward_loops
from loopwm.records.files import read_json, write_atomic
from loopwm.records.provenance import provenance
from loopwm.records.windows import Window, game_of
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.flops import forward_flops, training_flops
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.config import TrainingConfig

FLOPS_KEYS = 512
"""Keys that a token attends to in every layer where FLOPs are given."""


def summarize(
    name: str, protocol: TextProtocol, jobs: Sequence[Job], suite: Suite, windows: Sequence[Window]
) -> dict[str, Any]:
    """Build `results.json`. Arms with a diverged seed have facts, but neither means nor differences."""
    by_arm = {arm: [job for job in jobs if job.arm == arm] for arm in protocol.arms}
    facts = {arm: [read_training_log(job.run.folder) for job in of_arm] for arm, of_arm in by_arm.items()}
    healthy = [arm for arm in by_arm if not any(f.diverged for f in facts[arm])]
    games = [game_of(window) for window in windows]
    found_means: list[Mean] = []
    found_differences: list[Difference] = []
    for regime in protocol.regimes:
        scores = {
            arm: [read_scores(windows, protocol.horizons, job.scores(regime)) for job in by_arm[arm]] for arm in healthy
        }
        for arm in healthy:
            found_means += means(arm, regime, scores[arm], protocol.horizons)
            if protocol.reference in healthy and arm != protocol.reference:
                sides = scores[arm], scores[protocol.reference]
                found_differences += differences((arm, protocol.reference), regime, *sides, protocol.horizons, games)
    return {
        "study": name,
        "protocol": asdict(protocol),
        "suite_sha256": suite.sha256,
        "windows": len(windows),
        "provenance": provenance("lab"),
        "arms": [_arm(protocol, by_arm[arm], facts[arm]) for arm in by_arm],
        "means": [asdict(m) for m in found_means],
        "differences": [asdict(d) for d in found_differences],
    }


def _arm(protocol: TextProtocol, jobs: Sequence[Job], facts: Sequence[TrainingFacts]) -> dict[str, Any]:
    """Return description and cost of an arm."""
    config = LoopWMConfig.from_pretrained(jobs[0].run.model)
    parameters = count_parameters(config)
    depth = protocol.depth or config.default_depth
    mu_bwd = cast(TrainingConfig, jobs[0].run.config).depth.backward_loops or backward_loops(config.mu_rec)
    mean_depth = sum(f.mean_depth for f in facts) / len(facts)
    followed = jobs[0].follows_latents and not any(f.diverged for f in facts)
    return {
        "arm": jobs[0].arm,
        "decode": jobs[0].decode,
        "rate": jobs[0].run.config.optimizer.learning_rate,
        "rates_tried": _rates_tried(protocol, jobs[0]),
        "parameters": parameters.total,
        "parameters_without_embeddings": parameters.without_embeddings,
        "depth": depth,
        "flops_per_token": forward_flops(config, depth, FLOPS_KEYS),
        "training_flops_per_token": training_flops(config, mean_depth, mu_bwd, FLOPS_KEYS),
        "seeds": {str(job.run.seed): _finite(asdict(f)) for job, f in zip(jobs, facts, strict=True)},
        "latents": {r: [read_json(job.latents(r)) for job in jobs] for r in protocol.regimes} if followed else {},
    }


def _rates_tried(protocol: TextProtocol, job: Job) -> dict[str, float | None]:
    """Return the first seed's final dev loss by learning rate."""
    out = job.run.folder.parents[2]
    runs = [make_run(protocol, out, job.run.arm, protocol.seeds[0], rate) for rate in protocol.rates]
    losses = {f"{run.rate:g}": read_training_log(run.folder).dev_loss for run in runs}
    return _finite(losses)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return None for NaN, which JSON lacks."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def write_report(results: dict[str, Any], out: Path) -> None:
    """Write report.md, plot.png, and latents.png if latents were recorded."""
    found_means = [Mean(**m) for m in results["means"]]
    found_differences = [Difference(**d) for d in results["differences"]]
    protocol = results["protocol"]
    parts = [f"# Study: {results['study']}\n\n{protocol['question'].strip()}\n", _how(results), _arms_table(results)]
    for regime in protocol["regimes"]:
        parts += [means_table(found_means, regime, metric) for metric in STUDIED]
    parts.append(differences_table(found_differences))
    followed = {arm["arm"]: arm["latents"] for arm in results["arms"] if arm["latents"]}
    if followed:
        parts.append(latents_table(followed))
        plot_latents(out / "latents.png", followed)
    write_atomic(out / "report.md", "\n".join(parts))
    if found_means:
        plot_study(out / "plot.png", found_means, found_differences)


def _how(results: dict[str, Any]) -> str:
    protocol = results["protocol"]
    return (
        f"Reference arm: {protocol['reference']}. {results['windows']} windows, seeds "
        f"{', '.join(map(str, protocol['seeds']))}. A difference counts where its paired bootstrap 95 % interval over "
        f"games (of the mean over seeds) excludes zero and every seed has the same sign. FLOPs are of one token with "
        f"{FLOPS_KEYS} keys in every layer. Dev loss (nats a token), loss spikes and the largest RMS of h^(T) in "
        f"training are given by seed. {UNITS}\n"
    )


def _arms_table(results: dict[str, Any]) -> str:
    header = ["Arm", "parameters", "w/o embeddings", "loops", "MFLOPs a token", "in training", "decoder calls"]
    header += ["rate", "minutes", "dev loss", "spikes", "largest state"]
    return table(header, [_arm_row(arm) for arm in results["arms"]])


def _arm_row(arm: dict[str, Any]) -> list[str]:
    seeds = list(arm["seeds"].values())
    flops = [f"{arm[name] / 1e6:.2f}" for name in ("flops_per_token", "training_flops_per_token")]
    losses = ["diverged" if seed["dev_loss"] is None else f"{seed['dev_loss']:.4f}" for seed in seeds]
    norms = ["inf" if seed["largest_state_rms"] is None else f"{seed['largest_state_rms']:.2f}" for seed in seeds]
    return [
        arm["arm"], f"{arm['parameters']:,}", f"{arm['parameters_without_embeddings']:,}", str(arm["depth"]), *flops,
        "1" if arm["decode"] == "deferred" else "one a step", f"{arm['rate']:g}",
        f"{sum(seed['seconds'] for seed in seeds) / len(seeds) / 60:.1f}", " ".join(losses),
        " ".join(str(seed["spikes"]) for seed in seeds), " ".join(norms),
    ]  # fmt: skip


@dataclass(frozen=True)
class ParameterCount:
    total: int
    without_embeddings: int


def count_parameters(config: LoopWMConfig) -> ParameterCount:
    """Count the parameters; the tied output embedding counts once."""
    with torch.device("meta"):
        model = LoopWMForCausalLM(config)
    total = sum(p.numel() for p in model.parameters())
    return ParameterCount(total, total - model.model.embed_tokens.weight.numel())
