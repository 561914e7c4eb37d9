"""Predict rewards and ends of the shipped checkpoint's stored predictions again; their texts stay.

For weights that differ from those before in heads that no text depends on (`python -m lab fit-goals`). A sample of the
texts is decoded again, and all must be as stored. Stored results follow.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from eval.models.checkpoint import CheckpointPredictor
from lab.figures.predictions import FOLDER, SUFFIX, Rescored
from lab.reports.results_page import SHIPPED_NAME, write_result
from loopwm.records.command import positive
from loopwm.records.errors import InputError
from loopwm.records.files import read_json_lines, write_lines
from loopwm.records.template import window_context
from loopwm.records.windows import Window

EXAMPLE = "python -m lab predict-rewards --model loopwm/pretrained --data docs/results/data"

Line = dict[str, Any]


def outcomes(predictor: CheckpointPredictor, window: Window, horizons: Sequence[int]) -> dict[int, tuple[float, bool]]:
    """Return reward and whether the episode ends, by horizon. Nothing is decoded."""
    worlds = predictor.worlds()
    worlds.begin([window_context(window, "observed")])
    steps = [worlds.step([action], decode=False)[0] for action in window["actions"][: max(horizons)]]
    return {k: (steps[k - 1].reward or 0.0, steps[k - 1].ends) for k in horizons}


def require_texts(predictor: CheckpointPredictor, windows: Sequence[Window], stored: Rescored) -> None:
    """Raise InputError unless the windows' texts are those that are stored."""
    for window in tqdm(windows, unit="window", desc="texts"):
        (predicted,) = predictor.predict([window], "observed", stored.horizons)
        for horizon in stored.horizons:
            if predicted.texts[horizon] != stored.records[window["id"], horizon]["prediction"]:
                raise InputError(f"{window['id']}, horizon {horizon}: another text than stored; evaluate the model")


def predict_again(predictor: CheckpointPredictor, path: Path, sample: int) -> None:
    """Rewrite a file of predictions, and its results if they are stored."""
    stored = Rescored.read(path)
    require_texts(predictor, Random(0).sample(stored.windows, min(sample, len(stored.windows))), stored)
    head, *lines = (line for _, line in read_json_lines(path))
    head["provenance"] |= {"model_sha256": predictor.identity["model_sha256"]}
    by_window = {
        window["id"]: outcomes(predictor, window, stored.horizons) for window in tqdm(stored.windows, desc=path.name)
    }
    again = (_with(by_window, line) for line in lines)
    write_lines(path, (json.dumps(line, ensure_ascii=False) for line in (head, *again)))
    results = path.parents[1] / f"{path.name.removesuffix(SUFFIX)}.json"
    if results.is_file():
        write_result(results, Rescored.read(path).stored())


def _with(by_window: Mapping[str, Mapping[int, tuple[float, bool]]], line: Line) -> Line:
    reward, ended = by_window[line["id"]][line["horizon"]]
    return {**line, "reward": float(f"{reward:.6g}"), "ended": ended}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of stored results")
    parser.add_argument("--sample", type=positive, default=20, help="windows of a run to decode (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    """Predict all of them. Raises InputError for a model that answers otherwise."""
    paths = sorted((args.data / FOLDER).glob(f"*--{SHIPPED_NAME}*{SUFFIX}"))
    if not paths:
        raise InputError(f"--data: {args.data / FOLDER} must hold predictions of {SHIPPED_NAME}")
    greedy = CheckpointPredictor(args.model, greedy=True)
    likelier = CheckpointPredictor(args.model)
    for path in paths:
        _, head = next(read_json_lines(path))
        predict_again(likelier if "decoding" in head["provenance"] else greedy, path, args.sample)
