"""Training studies: every arm with every seed on the same windows, compared with the reference arm.

The study's folder contains all finished work: OUT/ARM/seed-N is a training run with its scores under eval/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eval.commands.harness import RunSettings
from eval.models.base import Predictor
from eval.models.checkpoint import CheckpointPredictor
from eval.scores.suites import load_suite
from lab.agents.imagination import FedBack, imagination_of
from lab.studies.summary import summarize, write_report
from lab.studies.text_protocol import Job, TextProtocol
from lab.studies.training_runs import best_run, in_processes, locked, make_run, read_training_log, train
from lab.studies.window_scores import add_losses, latent_norms, score, select_windows
from loopwm.records.files import write_json
from loopwm.records.template import ContextKind
from loopwm.records.windows import Window


def run_training_study(name: str, protocol: TextProtocol, out: Path, workers: int) -> None:
    """Complete the study, then write results.json, report.md and plots to `out`."""
    suite = load_suite(protocol.windows)
    chosen = [select_windows(suite, settings_for(protocol, "", regime)) for regime in protocol.regimes]
    rates = choose_rates(protocol, out, workers)
    jobs = [
        Job(protocol, arm, make_run(protocol, out, protocol.model_arm(arm), seed, rates[protocol.model_arm(arm)]))
        for seed in protocol.seeds
        for arm in protocol.arms
    ]
    in_processes(complete, jobs, workers)
    results = summarize(name, protocol, jobs, suite, chosen[0])
    write_json(out / "results.json", results)
    write_report(results, out)


def choose_rates(protocol: TextProtocol, out: Path, workers: int) -> dict[str, float | None]:
    """Return the learning rate of each arm; in a sweep, the first seed's best on dev loss."""
    if not protocol.rates:
        return dict.fromkeys(protocol.trained_arms)
    runs = {
        arm: [make_run(protocol, out, arm, protocol.seeds[0], rate) for rate in protocol.rates]
        for arm in protocol.trained_arms
    }
    in_processes(train, [run for of_arm in runs.values() for run in of_arm], workers)
    return {arm: best_run(of_arm).rate for arm, of_arm in runs.items()}


def complete(job: Job) -> None:
    """Train and score a job; skip finished work. A diverged run is not scored."""
    train(job.run)
    if read_training_log(job.run.folder).diverged:
        return
    with locked(job.run):
        score_contexts(job)


def score_contexts(job: Job) -> None:
    protocol, fed_back = job.protocol, job.decode == "fed_back"
    checkpoint = CheckpointPredictor(job.run.model, protocol.depth or None)
    predictor: Predictor = FedBack(checkpoint, imagination_of(checkpoint)) if fed_back else checkpoint
    suite = load_suite(protocol.windows)
    for regime in protocol.regimes:
        settings = settings_for(protocol, f"{job.arm}/seed-{job.run.seed}", regime)
        windows = select_windows(suite, settings)
        score(predictor, suite, windows, settings, job.scores(regime))
        if not fed_back:  # a text that is fed back has no loss of the true ones
            add_losses(checkpoint, windows, settings, job.scores(regime))
        if job.follows_latents:
            add_latents(checkpoint, windows, protocol, regime, job.latents(regime))


def settings_for(protocol: TextProtocol, model: str, regime: ContextKind) -> RunSettings:
    return RunSettings(model, regime, protocol.horizons, protocol.limit or None, 0, protocol.batch_size)


def add_latents(
    predictor: CheckpointPredictor, windows: Sequence[Window], protocol: TextProtocol, regime: ContextKind, path: Path
) -> None:
    """Write the norms of the latent over a long rollout, unless `path` exists."""
    if not path.exists():
        chosen = windows[: protocol.latent_windows]
        norms = latent_norms(predictor, chosen, regime, protocol.latent_horizon, protocol.batch_size)
        write_json(path, asdict(norms))
