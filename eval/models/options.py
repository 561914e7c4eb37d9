"""Values of `--model`, and the options of each kind of model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from loopwm.records.command import above_zero, at_least_zero, positive
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED, read_json
from loopwm.records.template import ContextKind
from loopwm.records.windows import Window

if TYPE_CHECKING:  # imported where they are made: their packages take seconds, and `--help` needs none
    from eval.models.base import Predictor, WindowBaseline

DEFAULT_SHOTS = 4
DEFAULT_CACHE = Path("runs/replies.sqlite")
CHECKPOINT, ENDPOINT = "checkpoint", "endpoint"


@dataclass(frozen=True)
class Baseline:
    """Named baseline. place: module:class in `eval.models`."""

    purpose: str
    place: str

    def make(self, windows: Sequence[Window], train_episodes: Sequence[Path]) -> Predictor:
        kind: type[WindowBaseline] = resolve_name(f"eval.models.{self.place}")
        return kind.load(windows, train_episodes)


BASELINES = {
    "recall": Baseline("what a checkpoint recalls with --memory, by itself", "retrieve:Recall"),
    "copy": Baseline("the last observation again", "base:Copy"),
    "retrieve": Baseline("what followed the most similar place of a train episode (BM25)", "retrieve:Retrieve"),
    "retrieve-names": Baseline(
        "the same, chosen or continued by readings and in the names of the place asked about",
        "retrieve_names:RetrieveNames",
    ),
    "track": Baseline("what the rules of ALFWorld answer to what was seen", "track:Track"),
}


_TAKEN_BY = {
    "depth": {CHECKPOINT},
    "device": {CHECKPOINT},
    "greedy": {CHECKPOINT},
    "memory": {CHECKPOINT},
    "train_episodes": {"recall", "retrieve", "retrieve-names"},
}
"""Kinds of model by option; options not listed here are of endpoints."""


@dataclass(frozen=True)
class ModelOptions:
    """Command-line options of some kinds of model; None: not given."""

    depth: str | None = None
    device: str | None = None
    greedy: bool | None = None
    memory: list[Path] | None = None
    train_episodes: list[Path] | None = None
    shots: int | None = None
    examples: Path | None = None
    concurrency: int | None = None
    request_timeout: float | None = None
    reply_cache: Path | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    no_temperature: bool | None = None
    reasoning_effort: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelOptions:
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls)})


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    named = f"one of {', '.join(BASELINES)}; pretrained, which ships; a folder of a checkpoint; openai:URL#MODEL"
    path = str(PACKAGED)
    parser.add_argument("--model", required=True, type=lambda name: path if name == "pretrained" else name, help=named)
    group = parser.add_argument_group("options of some models")
    add = group.add_argument
    add("--depth", help="loops of every pass, or a rule such as gate:tau=0.5,limit=4 (default: the checkpoint's)")
    add("--device", choices=("auto", "cpu", "cuda"), help="device of a checkpoint (default: auto)")
    add(
        "--greedy",
        action="store_const",
        const=True,
        help="decode a checkpoint's most probable token at a time, not the likelier of two texts",
    )
    add("--memory", type=Path, nargs="+", metavar="FILE", help="train episodes that a checkpoint recalls outcomes from")
    add(
        "--train-episodes",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train episodes of recall, retrieve and retrieve-names",
    )
    add("--shots", type=at_least_zero, help=f"examples in a language model's prompt (default: {DEFAULT_SHOTS})")
    add("--examples", type=Path, metavar="FILE", help="window file of these examples")
    add("--concurrency", type=positive, help="requests to an endpoint at once (default: 8)")
    add("--request-timeout", type=above_zero, metavar="SECONDS", help="seconds of one request in all (default: 120)")
    add("--reply-cache", type=Path, metavar="FILE", help=f"cache of an endpoint's replies (default: {DEFAULT_CACHE})")
    limit = group.add_mutually_exclusive_group().add_argument
    limit("--max-tokens", type=positive, help="most tokens of an answer, reasoning included (default: 512)")
    limit("--max-completion-tokens", type=positive, help="the same limit by the name that OpenAI's current models want")
    add("--no-temperature", action="store_const", const=True, help="send no temperature, for models that refuse 0")
    add(
        "--reasoning-effort", metavar="EFFORT", help="effort of reasoning models, such as low; as the endpoint names it"
    )


def make_predictor(
    model: str, windows: Sequence[Window], options: ModelOptions, context_kind: ContextKind, horizons: Sequence[int]
) -> Predictor:
    """Create the predictor that `--model` names. Raises InputError naming the option at fault."""
    kind = _kind(model)
    for option in fields(options):
        is_set = getattr(options, option.name) is not None
        if is_set and kind not in _TAKEN_BY.get(option.name, {ENDPOINT}):
            raise InputError(f"--{option.name.replace('_', '-')}: not an option of {model!r}")
    if kind in BASELINES:
        return BASELINES[kind].make(windows, options.train_episodes or [])
    if kind == CHECKPOINT:
        # imported late: torch takes seconds, and the baselines run without it
        from eval.models.checkpoint import CheckpointPredictor, read_depth
        from loopwm.runtime import use_device

        depth = None if options.depth is None else read_depth(options.depth)
        device = use_device(options.device or "auto")
        return CheckpointPredictor(Path(model), depth, bool(options.greedy), device, options.memory or ())
    from eval.models.fewshot import load_shots

    count = DEFAULT_SHOTS if options.shots is None else options.shots
    shots = load_shots(windows, options.examples, count, context_kind, horizons)
    from eval.models.endpoint import DEFAULT_MAX_TOKENS, Address, Endpoint, EndpointPredictor, Parameters, ReplyCache

    address = Address.parse(model, "--model")
    cache = ReplyCache(options.reply_cache or DEFAULT_CACHE)
    parameters = Parameters(
        options.max_tokens or DEFAULT_MAX_TOKENS,
        options.max_completion_tokens,
        not options.no_temperature,
        options.reasoning_effort,
    )
    endpoint = Endpoint(address, cache, options.concurrency or 8, options.request_timeout or 120, parameters)
    return EndpointPredictor(endpoint, shots)


def _kind(model: str) -> str:
    if model in BASELINES:
        return model
    if model.startswith("openai:"):
        return ENDPOINT
    folder = Path(model)
    if not folder.is_dir():
        known = ", ".join((*BASELINES, "pretrained"))
        raise InputError(f"--model: must be a model's folder, openai:URL#MODEL or one of {known}, got {model!r}")
    config = folder / "config.json"
    if config.is_file() and read_json(config).get("model_type") != "loopwm":
        raise InputError(f"--model: {model}: serve other language models, then use openai:URL#MODEL")
    return CHECKPOINT
