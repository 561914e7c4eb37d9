"""Write suites as tasks of lm-evaluation-harness, one file per task, for its --include_path.

Kinds of task: `observation`, generated from the whole prompt in this project's template; `loss`, the likelihood of the
true observation; `prompted`, instruction, examples and question for any language model. A task is named
loopwm_SUITE_CONTEXT_KIND_hK; without _hK it contains all written horizons.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from eval.commands.run import ascending
from eval.models.fewshot import INSTRUCTION, load_shots
from eval.models.options import DEFAULT_SHOTS
from eval.scores.metrics import HEADLINE
from eval.scores.suites import Suite, load_suite, suite_names
from loopwm.records.command import at_least_zero
from loopwm.records.errors import InputError
from loopwm.records.files import publish
from loopwm.records.template import CONTEXT_KINDS, ContextKind
from loopwm.records.windows import check_runnable

EXAMPLE = "python -m lab lm-eval-tasks --suites scienceworld-500 --contexts snapshot --horizons 1,5 --out runs/tasks"

_SCORED = """\
process_results: !function lab.lm_eval.documents.score_generation
metric_list:
""" + "".join(f"  - {{metric: {name}, aggregation: mean, higher_is_better: true}}\n" for name in HEADLINE)
_COMMON = """\
test_split: test
doc_to_text: prompt
doc_to_target: target
metadata: {version: 1.0}
"""
_KINDS = {
    "observation": """\
custom_dataset: !function lab.lm_eval.documents.load_template
output_type: generate_until
target_delimiter: ""
num_fewshot: 0
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 512, temperature: 0}
"""
    + _SCORED,
    "loss": """\
custom_dataset: !function lab.lm_eval.documents.load_template
output_type: loglikelihood
target_delimiter: ""
num_fewshot: 0
process_results: !function lab.lm_eval.documents.score_target
metric_list:
  - {metric: nats, aggregation: mean, higher_is_better: false}
  - {metric: greedy, aggregation: mean, higher_is_better: true}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
    "prompted": """\
custom_dataset: !function lab.lm_eval.documents.load_prompted
output_type: generate_until
fewshot_split: examples
fewshot_config: {sampler: first_n}
target_delimiter: " "
fewshot_delimiter: "\\n###\\n\\n"
generation_kwargs: {until: ["\\n###"], max_gen_toks: 512, temperature: 0}
"""
    + _SCORED,
}


@dataclass(frozen=True)
class TaskSettings:
    """Tasks to write for each suite. shots and examples are for the prompted kind."""

    contexts: tuple[ContextKind, ...]
    horizons: tuple[int, ...]
    shots: int
    examples: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--suites", nargs="+", metavar="SUITE", help="as --suite of run (default: the committed ones)")
    add(
        "--contexts",
        nargs="+",
        choices=CONTEXT_KINDS,
        default=["observed", "snapshot"],
        help="default: observed snapshot",
    )
    add("--horizons", type=ascending, default=(1, 2, 3, 4, 5), help="such as 1,2,3,4,5 (the default)")
    add("--shots", type=at_least_zero, default=DEFAULT_SHOTS, help="examples in a prompt (default: %(default)s)")
    add("--examples", type=Path, metavar="FILE", help="window file of train episodes to take them from")
    add("--out", type=Path, required=True, metavar="DIR", help="the folder, which must not be there yet")


def run(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise InputError(f"--out: {args.out} is there already; choose another")
    settings = TaskSettings(tuple(args.contexts), args.horizons, args.shots, args.examples)
    files: dict[str, str] = {}
    for name in args.suites or suite_names():
        tasks = task_files(name, settings)
        if tasks.keys() & files.keys():
            raise InputError(f"--suites: {name}: another suite goes by the same name")
        files |= tasks
    _write_folder(args.out, files)
    print(f"{args.out}: {len(files)} tasks")


def task_files(name: str, settings: TaskSettings) -> dict[str, str]:
    """Return file contents by name.

    Raises:
        InputError: the tasks cannot load the suite
    """
    suite = load_suite(name)
    _check(suite, settings)
    committed = name.partition(":")[0] in suite_names()
    place = name if committed else str(Path(name).resolve())
    return dict(
        _task_file(suite.name, place, settings, *task) for task in product(settings.contexts, _KINDS, settings.horizons)
    )


def _check(suite: Suite, settings: TaskSettings) -> None:
    if len(environments := sorted({window["env"] for window in suite.windows})) > 1:
        raise InputError(f"--suites: {suite.name!r} is of several environments: {', '.join(environments)}")
    for context in settings.contexts:
        check_runnable(suite.windows, context, settings.horizons)
        load_shots(suite.windows, settings.examples, settings.shots, context, settings.horizons)


def _task_file(
    suite: str, place: str, settings: TaskSettings, context: ContextKind, kind: str, horizon: int
) -> tuple[str, str]:
    """Return name and content of a task.

    Args:
        suite: short name
        place: name or absolute path to load it from
        settings: settings of all tasks
        context: kind of context
        kind: kind of task
        horizon: number of actions
    """
    tag = f"loopwm_{suite.replace(':', '_')}_{context}_{kind}"
    arguments: dict[str, object] = {"suite": place, "context": context, "horizon": horizon}
    fields: dict[str, object] = {"task": f"{tag}_h{horizon}", "tag": [tag], "dataset_kwargs": arguments}
    if kind == "prompted":
        examples = settings.examples
        arguments |= {"shots": settings.shots, "examples": str(examples.resolve()) if examples else None}
        fields |= {"description": f"{INSTRUCTION}\n\n", "num_fewshot": settings.shots}
    head = "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items())  # JSON is YAML
    return f"{tag}_h{horizon}.yaml", head + _COMMON + _KINDS[kind]


def _write_folder(out: Path, files: Mapping[str, str]) -> None:
    """Write all files or none."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
