"""`python -m lab COMMAND`."""

from __future__ import annotations

from data_prep.environments.base import SimulatorError
from loopwm.records.command import command_parser, exit_status

COMMANDS: dict[str, tuple[str, str]] = {
    "study": ("lab.studies.command", "answer a question about the model by a written protocol"),
    "plan": ("lab.studies.plan", "compare an agent that looks ahead in the model with itself without"),
    "imagined-policy": ("lab.studies.imagined_policy", "improve a policy in imagination and play it in real games"),
    "search": ("lab.studies.search", "count the steps of an agent that looks where a model imagines things"),
    "beam": ("lab.studies.beam", "play plans that a beam search finds in imagination in real games"),
    "plan-transfer": (
        "lab.agents.plan_transfer",
        "measure how often an agent's plans made in the model work in the real world",
    ),
    "acceptance": ("lab.studies.acceptance", "compare accepted actions with a simulator's valid ones"),
    "decisions": ("lab.reports.decisions", "count how often models prefer the better of two plans"),
    "goal-pairs": ("lab.studies.goal_pairs", "measure whether a model's rewards depend on the goal"),
    "losses": ("lab.studies.losses", "measure how well a model foresees the steps that lose an episode"),
    "trust-outside": ("lab.studies.trust_outside", "measure trust where action, history, text or memory are foreign"),
    "anchoring": ("lab.studies.anchoring", "compare looks by trust with looks every few steps"),
    "interpolate": ("lab.interpolate", "interpolate the weights of two checkpoints"),
    "fit-gate": ("lab.studies.fit_gate", "fit the exit gate of a finished model"),
    "fit-acceptance": ("lab.studies.fit_acceptance", "fit the acceptance head of a finished model"),
    "fit-goals": ("lab.studies.fit_goals", "fit the reward attention of a finished model to goals"),
    "fit-rewards": ("lab.studies.fit_rewards", "fit the reward head of a finished model"),
    "rollout": ("lab.studies.rollout", "imagine whole episodes, scored by depth"),
    "pixels": ("lab.pixels.command", "measure one property of a pixel world"),
    "report": ("lab.reports.command", "write one page about several runs"),
    "results": ("lab.reports.results_page", "keep results of runs and write the page of all of them"),
    "pictures": ("lab.reports.pictures_page", "write the page of pictures and claims beside the results page"),
    "figures": ("lab.figures.command", "recompute the figures of README and the results pages"),
    "predict-rewards": ("lab.figures.rewards", "predict rewards and ends of stored predictions with other weights"),
    "scaling": ("lab.scaling", "tabulate what each preset costs in training and serving"),
    "serving-limits": ("lab.serving_limits", "tabulate how many GPUs agents need, and what limits them"),
    "mutants": ("lab.mutants.command", "plant faults one at a time and run the tests that must find them"),
    "lm-eval-tasks": ("lab.lm_eval.command", "write suites as tasks of lm-evaluation-harness"),
    "train-tokenizer": ("lab.data.train_tokenizer", "train the byte-level BPE and freeze it"),
    "tokenize-renamed": ("lab.data.tokenize_renamed", "turn episodes into token shards with things renamed"),
    "tokenizer-eval": (
        "lab.data.tokenizer_eval",
        "measure vocabularies: tokens per text, and names spelled in two ways",
    ),
    "state-sufficiency": ("lab.data.state_sufficiency", "measure how far states determine observations"),
    "build-examples": ("lab.data.build_examples", "choose the examples of the few-shot prompt"),
    "build-entities": ("lab.data.build_entities", "make the list of ScienceWorld's names"),
    "build-seen": ("lab.data.build_seen", "find out which windows stand in train episodes"),
    "refresh-hidden": ("lab.data.refresh_hidden", "replay windows and read their hidden states again"),
    "collect-probes": ("lab.data.collect_probes", "collect episodes of what people try first"),
    "collect-deviations": ("lab.data.collect_deviations", "collect episodes that leave a solution in one way"),
    "collect-choices": ("lab.data.collect_choices", "collect play of mazes that chooses a side at their end"),
    "collect-agents": ("lab.data.collect_agents", "collect episodes with the mistakes of an agent"),
    "probe-windows": ("lab.data.probe_windows", "cut windows of what people try first"),
    "cut-suite": ("lab.data.cut_suite", "cut a committed suite out of episodes"),
    "counterfactual": (
        "lab.data.counterfactual",
        "cut pairs of windows that differ in one earlier action and in the answer",
    ),
    "relabel-goals": ("lab.data.relabel_goals", "write ALFWorld's episodes with other goals, and what pays then"),
    "pack": ("lab.data.pack", "pack collected episodes or solutions into one small file"),
    "unpack": ("lab.data.unpack", "unpack the episodes that come with the project"),
    "stats": ("lab.data.stats", "count what episodes hold"),
    "foreign-contexts": ("lab.data.foreign_contexts", "measure how well foreign contexts are recognised"),
    "export-episodes": ("lab.data.export_episodes", "write episodes as a Hugging Face datasets folder"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("python -m lab", "Run studies and one-off measurements.", COMMANDS, arguments)
    args = parser.parse_args(arguments)
    return exit_status(lambda: args.run(args), SimulatorError)
