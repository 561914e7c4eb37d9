"""Requests per second of the service beside vLLM's, on one checkpoint and the windows of both worlds.

    make test-vllm   # once: it makes the environment
    OMP_NUM_THREADS=1 taskset -c 0 .venv-vllm/bin/python -m lab.benchmarks.vllm_speed --out runs/vllm-speed.json

Each server answers a quarter of the prompts with 1, 8, 32 and 64 requests at once (greedy, to the end of the
observation, as token ids, so that neither tokenizes): `new`, and then `again`, when both keep their prefixes. vLLM runs
in float32 and eager mode with prefix caching. Texts are compared: a server that says less would be faster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from lab.benchmarks.vllm_parity import LIMITS, our_server, questions, serving, vllm_server
from loopwm.records.command import positive
from loopwm.records.files import PACKAGED, write_json
from loopwm.records.provenance import provenance
from loopwm.records.template import LONGEST_OBSERVATION

AT_ONCE = (1, 8, 32, 64)
VLLM = [*LIMITS, "--max-num-seqs", str(max(AT_ONCE)), "--enable-prefix-caching"]


def ask(client: httpx.Client, model: str, prompt: Sequence[int]) -> str:
    body = {"model": model, "prompt": list(prompt), "max_tokens": LONGEST_OBSERVATION, "temperature": 0}
    return str(client.post("completions", json=body).raise_for_status().json()["choices"][0]["text"])


def measure(command: Sequence[str], log: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return requests per second by how the prompts came and how many at once, and all texts."""
    rates: dict[str, dict[str, float]] = {"new": {}, "again": {}}
    texts: list[str] = []
    with serving(command, log) as (client, model):
        for number, at_once in enumerate(AT_ONCE):
            part = prompts[number :: len(AT_ONCE)]
            for kind in rates:
                started = time.perf_counter()
                with ThreadPoolExecutor(at_once) as pool:
                    answers = list(pool.map(partial(ask, client, model), part))
                rates[kind][str(at_once)] = len(part) / (time.perf_counter() - started)
                texts += answers
    return {"rates": rates, "texts": texts}


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind and number at once."""
    lines = []
    for kind, rates in ours["rates"].items():
        for at_once, rate in rates.items():
            other = theirs["rates"][kind][at_once]
            shown = f"{rate:.2f} requests/s, vLLM {other:.2f}, ratio {rate / other:.2f}"
            lines.append(f"{kind}, {at_once} at once: {shown}")
    differ = sum(a != b for a, b in zip(ours["texts"], theirs["texts"], strict=True))
    return [*lines, f"{differ} of {len(ours['texts'])} texts differ"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PACKAGED, help="checkpoint folder")
    parser.add_argument("--windows", type=positive, default=100, help="of each world, after one action")
    parser.add_argument("--out", type=Path, required=True, help="file of results")
    args = parser.parse_args()
    prompts = [prompt for name, prompt in questions(args.windows, args.model).items() if name.endswith("@1")]
    commands = {"service": our_server(args.model, max(AT_ONCE)), "vllm": vllm_server(args.model, VLLM)}
    with TemporaryDirectory() as folder:
        results = {name: measure(command, Path(folder) / name, prompts) for name, command in commands.items()}
    for line in compare(results["service"], results["vllm"]):
        print(line)
    write_json(args.out, {"prompts": len(prompts), **results, "provenance": provenance("lab.benchmarks.vllm_speed")})


if __name__ == "__main__":
    main()
