"""Compare greedy texts of the service with vLLM's, on one checkpoint and the windows of both worlds.

    make test-vllm   # once: it makes the environment
    .venv-vllm/bin/python -m lab.benchmarks.vllm_parity --windows 250 --out runs/vllm-parity

Both engines run here, one after the other, in float32. The service decodes once; vLLM once in each arm:
- plain: every prompt whole and computed anew;
- prefix: prefix caching, where windows share their contexts;
- chunked: prompts in chunks of few tokens, beside running decodes;
- preempted: less memory than the running requests need, so that some are dropped and computed again.

Texts may differ where two tokens are equally likely up to rounding. Where they first differ, the gap between the log-
probabilities of the two best tokens must be below GAP, and this may happen in at most SHARE of the texts. An arm whose
mechanism never ran fails, too. Answers are kept in --out; a second call computes only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from eval.models.checkpoint import checkpoint_hash
from eval.scores.suites import load_suite
from loopwm.records.errors import InputError
from loopwm.records.files import PACKAGED, read_json, sha256, write_json
from loopwm.records.template import END, LONGEST_OBSERVATION, fit_context, render_prompt, window_context
from loopwm.records.windows import stratified_sample
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.tokenizer import load_tokenizer

SUITES = ("scienceworld-dev", "alfworld-dev")
HORIZONS = (1, 5)
GAP, SHARE = 1e-4, 0.01

SEQUENCES = 16
"""Requests at a time."""
BLOCK = 32
"""Tokens of a block of vLLM's cache."""
LENGTH = 64 * BLOCK
"""Most tokens of a prompt with its completion."""
CHUNK = 64
"""Most tokens of a pass in the arm `chunked`."""
START_SECONDS = 1800

LIMITS = ["--max-model-len", str(LENGTH), "--block-size", str(BLOCK), "--max-num-seqs", str(SEQUENCES)]
LIMITS += ["--enforce-eager"]
WHOLE = ["--max-num-batched-tokens", str(2 * LENGTH)]
NO_PREFIX = ["--no-enable-prefix-caching"]


class Arm(NamedTuple):
    """options: of vLLM's server. counter: of its metrics, or `cut_prompts`, which is positive if the mechanism ran."""

    options: list[str]
    counter: str


ARMS = {
    "plain": Arm([*NO_PREFIX, *WHOLE], "vllm:prompt_tokens_total"),
    "prefix": Arm(["--enable-prefix-caching", *WHOLE], "vllm:prefix_cache_hits_total"),
    "chunked": Arm([*NO_PREFIX, "--enable-chunked-prefill", "--max-num-batched-tokens", str(CHUNK)], "cut_prompts"),
    # Memory of one longest request, or of a few short ones that outgrow it together.
    "preempted": Arm([*NO_PREFIX, *WHOLE, "--num-gpu-blocks-override", "66"], "vllm:num_preemptions_total"),
}


@dataclass(frozen=True)
class Answer:
    """Greedy completion. gaps: between the two best log-probabilities at each token, and at the end if known."""

    tokens: list[int]
    text: str
    gaps: list[float]


@dataclass(frozen=True)
class Difference:
    """Texts that differ. gap: between the two best tokens where they first do."""

    window: str
    gap: float
    texts: tuple[str, str]


def questions(windows: int, model: Path) -> dict[str, list[int]]:
    """Return the prompts of windows of each suite at each horizon, by name."""
    config, tokenizer = LoopWMConfig.from_pretrained(model), load_tokenizer(model / "tokenizer.json")

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts = {}
    for suite in SUITES:
        for window in stratified_sample(load_suite(suite).windows, windows, seed=0):
            context = window_context(window, "observed")
            context, _ = fit_context(context, lambda text: len(ids(text)), config.context_tokens, config.slots)
            for horizon in HORIZONS:
                prompt = ids(render_prompt(context, window["actions"][:horizon], config.slots))
                prompts[f"{window['id']}@{horizon}"] = prompt
    return prompts


def ask(client: httpx.Client, model: str, end: int, prompt: Sequence[int]) -> Answer:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": LONGEST_OBSERVATION, "temperature": 0,
        "logprobs": 2, "return_token_ids": True,
    }  # fmt: skip
    response = client.post("completions", json=body)
    response.raise_for_status()
    choice = response.json()["choices"][0]
    tops = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    tokens = [token for token in choice["token_ids"] if token != end]
    return Answer(tokens, choice["text"], [top[0] - top[1] for top in tops])


def compare(ours: Mapping[str, Answer], theirs: Mapping[str, Answer]) -> list[Difference]:
    """Return the texts that differ, the largest gap first."""
    differences = []
    for name, mine in ours.items():
        other = theirs[name]
        if mine.tokens == other.tokens:
            continue
        same = [a == b for a, b in zip(mine.tokens, other.tokens, strict=False)]
        place = same.index(False) if False in same else len(same)
        # The service logs no end token: where its text ended first, the gap is vLLM's.
        gaps = mine.gaps if place < len(mine.gaps) else other.gaps
        differences.append(Difference(name, gaps[place], (mine.text, other.text)))
    return sorted(differences, key=lambda difference: -difference.gap)


def passes(differences: Sequence[Difference], compared: int) -> bool:
    return len(differences) <= SHARE * compared and all(difference.gap < GAP for difference in differences)


@contextmanager
def serving(command: Sequence[str], log: Path) -> Iterator[tuple[httpx.Client, str]]:
    """Run a server whose command ends with its port; yield a client and the model's name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with (
        log.open("w") as out,
        subprocess.Popen([*command, str(port)], stdout=out, stderr=out, env=os.environ | offline) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/", timeout=3600, trust_env=False) as client,
    ):
        try:
            yield client, _wait(client, process, log)
        finally:
            process.terminate()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            return str(client.get("models").raise_for_status().json()["data"][0]["id"])
        except httpx.HTTPError:
            time.sleep(0.5)
    raise InputError(f"{log}: a server did not start: {log.read_text()[-2000:]}")


def our_server(model: Path, sequences: int = SEQUENCES) -> list[str]:
    options = ["--max-batch", str(sequences), "--access-log", "off", "--device", "cpu", "--port"]
    return [sys.executable, "-m", "serve", "--model", str(model), *options]


def vllm_server(model: Path, options: Sequence[str]) -> list[str]:
    options = ["--dtype", "float32", "--host", "127.0.0.1", *options, "--port"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]


def answers(
    command: Sequence[str], checkpoint: str, prompts: Mapping[str, list[int]], end: int, file: Path
) -> tuple[dict[str, Answer], dict[str, float]]:
    """Return the answers of a server and the sums of its metrics; answers in `file` are not computed again.

    Raises InputError if the file has answers of another checkpoint or command, or to other prompts.
    """
    hashes = {question: sha256(json.dumps(prompt)) for question, prompt in prompts.items()}
    run = {"checkpoint": checkpoint, "command": list(command)}
    stored: dict[str, Any] = (
        read_json(file) if file.exists() else {"run": run, "prompts": {}, "answers": {}, "metrics": {}}
    )
    if stored.get("run") != run or any(hashes.get(name, old) != old for name, old in stored["prompts"].items()):
        raise InputError(f"{file}: answers are of another checkpoint, command or prompts; choose another --out")
    if missing := {name: prompt for name, prompt in prompts.items() if name not in stored["answers"]}:
        with serving(command, file.with_suffix(".log")) as (client, name), ThreadPoolExecutor(SEQUENCES) as pool:
            replies = pool.map(partial(ask, client, name, end), missing.values())
            stored["answers"] |= {one: asdict(reply) for one, reply in zip(missing, replies, strict=True)}
            metrics = counters(client.get(f"{str(client.base_url).removesuffix('/v1/')}/metrics").text)
        # Summed over calls: a mechanism may have run for earlier questions only.
        stored["metrics"] = {one: value + stored["metrics"].get(one, 0.0) for one, value in metrics.items()}
        stored["prompts"] |= {name: hashes[name] for name in missing}
        write_json(file, stored)
    return {name: Answer(**stored["answers"][name]) for name in prompts}, stored["metrics"]


def counters(text: str) -> dict[str, float]:
    """Return the counters of a server's metrics."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}


def cut_prompts(prompts: Mapping[str, list[int]], log: Path) -> int:
    """Return the number of prompts longer than a pass may be, by the log of vLLM; its metrics do not count chunks."""
    budget = re.search(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)", log.read_text())
    return sum(len(prompt) > int(budget[1]) for prompt in prompts.values()) if budget else 0


def report(model: Path, windows: int, out: Path, arms: Sequence[str], say: Callable[[str], None] = print) -> bool:
    """Compare the arms; return True if all pass."""
    out.mkdir(parents=True, exist_ok=True)
    prompts = questions(windows, model)
    end = load_tokenizer(model / "tokenizer.json").get_vocab()[END]
    checkpoint = checkpoint_hash(model)
    ours, _ = answers(our_server(model), checkpoint, prompts, end, out / "service.json")
    good, summary = True, {}
    for name in arms:
        command = vllm_server(model, [*LIMITS, *ARMS[name].options])
        theirs, metrics = answers(command, checkpoint, prompts, end, out / f"{name}.json")
        metrics["cut_prompts"] = cut_prompts(prompts, out / f"{name}.log")
        differences, ran = compare(ours, theirs), metrics.get(ARMS[name].counter, 0.0)
        good = good and passes(differences, len(prompts)) and ran > 0
        gap = differences[0].gap if differences else 0.0
        say(f"{name}: {len(differences)} of {len(prompts)} texts differ, largest gap {gap:.1e}; "
            f"{ARMS[name].counter} {ran:.0f}")  # fmt: skip
        summary[name] = {"texts": len(prompts), "ran": ran, "differences": [asdict(each) for each in differences]}
    write_json(out / "results.json", summary)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--windows", type=int, default=250, help="of each world")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, required=True, help="folder of answers and results.json")
    args = parser.parse_args()
    return 0 if report(args.model, args.windows, args.out, args.arms) else 1


if __name__ == "__main__":
    sys.exit(main())
