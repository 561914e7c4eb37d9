"""How much longer 16 requests at once take than one, against a running service.

    python -m serve --model loopwm/pretrained &
    python benchmarks/serve_batching.py --windows eval/suites/scienceworld-500.jsonl.gz

Every request is an evaluation window: goal, history and its deferred actions, answered greedily. Two workloads: one
window 16 times, and 16 different windows, whose prompts have nothing in common that could be run once for all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

Messages = list[dict[str, str]]


def chat(window: dict[str, Any]) -> Messages:
    """A window as the messages of a chat."""
    first, *steps = window["history"]
    messages = [{"role": "system", "content": window["goal"]}, {"role": "assistant", "content": first["observation"]}]
    for step in steps:
        messages.append({"role": "user", "content": step["action"]})
        messages.append({"role": "assistant", "content": step["observation"]})
    return messages + [{"role": "user", "content": action} for action in window["actions"]]


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    client: httpx.Client, model: str, chats: Sequence[Messages], max_tokens: int | None
) -> tuple[float, float, int]:
    """Mean seconds of one request alone, seconds of all at once, and tokens generated."""

    def ask(messages: Messages) -> int:
        body = {"model": model, "messages": messages, "max_tokens": max_tokens}
        response = client.post("/chat/completions", json=body)
        response.raise_for_status()
        tokens: int = response.json()["usage"]["completion_tokens"]
        return tokens

    ask(chats[0])
    alone = [seconds(lambda messages=messages: ask(messages)) for messages in chats]
    with ThreadPoolExecutor(len(chats)) as pool:
        start = time.perf_counter()
        tokens = sum(pool.map(ask, chats))
        together = time.perf_counter() - start
    return statistics.fmean(alone), together, tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--windows", type=Path, required=True, help="window file, .jsonl.gz")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, help="for checkpoints that do not know when to stop")
    args = parser.parse_args()
    with gzip.open(args.windows, "rt", encoding="utf-8") as file:
        windows = [json.loads(line) for line in file]
    rng = random.Random(0)
    with httpx.Client(base_url=args.url, timeout=600, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]
        for round_number in range(1, args.rounds + 1):
            sample = rng.sample(windows, args.requests)
            workloads = {
                "one window": [chat(sample[0])] * args.requests,
                "different windows": [chat(window) for window in sample],
            }
            for name, chats in workloads.items():
                one, together, tokens = measure(client, model, chats, args.max_tokens)
                print(
                    f"round {round_number}, {name}: one {one:.2f} s, {args.requests} at once {together:.2f} s, "
                    f"ratio {together / one:.2f}, {tokens / together:.0f} tokens/s"
                )


if __name__ == "__main__":
    main()
