"""`python -m lab COMMAND`."""

from __future__ import annotations

from types import ModuleType

from data_prep.environments.base import SimulatorError
from lab import interpolate, scaling
from lab.agents import plan_transfer
from lab.data import (
    build_entities,
    build_examples,
    build_seen,
    collect_agents,
    collect_probes,
    counterfactual,
    cut_suite,
    export_episodes,
    foreign_contexts,
    pack,
    probe_windows,
    refresh_hidden,
    state_sufficiency,
    stats,
    tokenizer_eval,
    train_tokenizer,
    unpack,
)
from lab.figures import command as figures
from lab.lm_eval import command as lm_eval_tasks
from lab.mutants import command as mutants
from lab.pixels import command as pixels
from lab.reports import command as report
from lab.reports import pictures_page, results_page
from lab.studies import acceptance, fit_gate, losses, plan, rollout
from lab.studies import command as study
from loopwm.records.command import command_parser, exit_status

COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "study": (study, "answer a question about the model by a written protocol"),
    "plan": (plan, "compare an agent that looks ahead in the model with itself without"),
    "plan-transfer": (plan_transfer, "measure how often an agent's plans made in the model work in the real world"),
    "acceptance": (acceptance, "compare accepted actions with a simulator's valid ones"),
    "losses": (losses, "measure how well a model foresees the steps that lose an episode"),
    "interpolate": (interpolate, "interpolate the weights of two checkpoints"),
    "fit-gate": (fit_gate, "fit the exit gate of a finished model"),
    "rollout": (rollout, "imagine whole episodes, scored by depth"),
    "pixels": (pixels, "measure one property of a pixel world"),
    "report": (report, "write one page about several runs"),
    "results": (results_page, "keep results of runs and write the page of all of them"),
    "pictures": (pictures_page, "write the page of pictures and claims beside the results page"),
    "figures": (figures, "recompute the figures of README and the results pages"),
    "scaling": (scaling, "tabulate what each preset costs in training and serving"),
    "mutants": (mutants, "plant faults one at a time and run the tests that must find them"),
    "lm-eval-tasks": (lm_eval_tasks, "write suites as tasks of lm-evaluation-harness"),
    "train-tokenizer": (train_tokenizer, "train the byte-level BPE and freeze it"),
    "tokenizer-eval": (tokenizer_eval, "measure vocabularies: tokens per text, and names spelled in two ways"),
    "state-sufficiency": (state_sufficiency, "measure how far states determine observations"),
    "build-examples": (build_examples, "choose the examples of the few-shot prompt"),
    "build-entities": (build_entities, "make the list of ScienceWorld's names"),
    "build-seen": (build_seen, "find out which windows stand in train episodes"),
    "refresh-hidden": (refresh_hidden, "replay windows and read their hidden states again"),
    "collect-probes": (collect_probes, "collect episodes of what people try first"),
    "collect-agents": (collect_agents, "collect episodes with the mistakes of an agent"),
    "probe-windows": (probe_windows, "cut windows of what people try first"),
    "cut-suite": (cut_suite, "cut a committed suite out of episodes"),
    "counterfactual": (counterfactual, "cut pairs of windows that differ in one earlier action and in the answer"),
    "pack": (pack, "pack collected episodes or solutions into one small file"),
    "unpack": (unpack, "unpack the episodes that come with the project"),
    "stats": (stats, "count what episodes hold"),
    "foreign-contexts": (foreign_contexts, "measure how well foreign contexts are recognised"),
    "export-episodes": (export_episodes, "write episodes as a Hugging Face datasets folder"),
}


def main(arguments: list[str] | None = None) -> int:
    args = command_parser("python -m lab", "Run studies and one-off measurements.", COMMANDS).parse_args(arguments)
    return exit_status(lambda: args.run(args), SimulatorError)
