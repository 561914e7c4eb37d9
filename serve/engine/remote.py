"""Engine whose tokens come from a server that speaks vLLM's completions API. A world is the tokens up to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any

import httpx
import torch

from loopwm.core.exit_rules import ExitRule, Fixed
from loopwm.text.model.modeling import LoopWMForCausalLM
from serve.engine.engine import DeadlineError, Engine, EngineStoppedError
from serve.engine.forward import TokenScores
from serve.engine.prefix_cache import PrefixCache
from serve.engine.requests import Event, Finish, Request, Scores, WorkItem
from serve.limits import Limits

SILENT_SECONDS = 5.0
"""Time without an answer after which the server is checked again: it may have been restarted with another model."""

CLOSE = 0.08
"""Largest mean difference of log-probabilities between two engines of one checkpoint: of the shipped one and
`serve.run.SAMPLE` it is 0.06 by bfloat16, and 0.11 by one loop more."""

GONE = (404, 502, 503, 504)
"""Statuses of a server without the model, and of a proxy without the server."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens")
"""Parameters that vLLM has by our names. Stop strings end a text here."""

Json = dict[str, Any]


class RemoteEngineError(RuntimeError):
    """The server refuses a request, or is not what the service was started for."""


class RemoteEngine(Engine):
    """Engine that sends its requests to a server. It has no thread: it runs on the service's event loop."""

    def __init__(
        self, url: str, model: LoopWMForCausalLM, end_token: int, depth: Fixed, limits: Limits, key: str | None = None
    ) -> None:
        """Prepare the engine of a server, which `check` must find.

        model: what it serves at this depth. key: API key of the server.
        """
        super().__init__(model, end_token, limits)
        self.cache = PrefixCache(0, max_entries=0)  # a world is rebuilt by tokenizing its text
        self._url, self._depth = url.rstrip("/").removesuffix("/v1"), depth
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._sample: tuple[str, tuple[int, ...], list[float]] = "", (), []
        self._name, self._answered = "", -inf
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = self._connect()

    def __enter__(self) -> RemoteEngine:
        self._running = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._running = False
        for task in self._tasks:
            task.cancel()

    @property
    def alive(self) -> bool:
        return self._running

    @property
    def load(self) -> tuple[int, int]:
        return len(self._tasks), 0

    @torch.inference_mode()
    def drop_weights(self, text: str, ids: tuple[int, ...]) -> None:
        """Drop the model's weights; keep the log-probabilities of a text's tokens, by which `check` knows them."""
        model, tokens = self.runner.model, torch.tensor([ids], device=self.runner.device)
        scores = model(tokens, use_cache=False, depth=self._depth).logits[0, :-1].float().log_softmax(-1)
        self._sample = text, ids, scores.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        torch.nn.Module.to(model, device="meta")

    async def check(self) -> None:
        """Check that the server serves the model.

        Raises:
            EngineStoppedError: it does not answer.
            RemoteEngineError: it serves another one.
        """
        text, ids, expected = self._sample
        try:
            async with self._connect() as client:  # the connections of `_client` belong to one event loop
                card = (await anext(self._replies(client, "/v1/models")))["data"][0]
                self._name, self.max_length = card["id"], min(self.max_length, card["max_model_len"])
                body = {"prompt": text, "add_special_tokens": False, "max_tokens": 1, "prompt_logprobs": 0}
                choice = await anext(self._choices(client, body))
            if tuple(choice["prompt_token_ids"]) != ids:
                raise RemoteEngineError(f"{self._url}: {self._name!r} has another tokenizer than --model")
            distance = fmean(abs(own - other) for own, other in zip(expected, _chosen(ids, choice), strict=True))
        except (LookupError, TypeError) as error:
            raise RemoteEngineError(f"{self._url}: must answer as vLLM's server does ({error!r})") from error
        if not distance <= CLOSE:
            raise RemoteEngineError(
                f"{self._url}: {self._name!r} has other weights than --model, or other loops than {self._depth.limit} "
                f"(--depth): log-probabilities differ by {distance:.2f} in the mean"
            )
        self._answered = time.monotonic()

    async def check_source(self) -> None:
        """Raise like `check`, which is repeated after a silence."""
        if time.monotonic() - self._answered > SILENT_SECONDS:
            await self.check()

    def check_depth(self, rule: ExitRule) -> ExitRule:
        if rule != self._depth:
            raise NotImplementedError(f"the server of --engine runs {self._depth.limit} loops, fixed at its start")
        return rule

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._start(self._generate(request), request, request.fail)

    def add(self, item: WorkItem) -> None:
        self._start(self._work(item), item, item.deliver)

    def call_on(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        call()

    def score(
        self, prompt: tuple[int, ...], loops: int, top: int, start: Any = None
    ) -> Generator[Any, Any, TokenScores]:
        ids, count = (*(start or ()), *prompt), max(top, 1)
        choice = yield {"prompt": ids, "max_tokens": 1, "logprobs": count, "prompt_logprobs": count}
        positions = [{token: one["logprob"] for token, one in each.items()} for each in choice["prompt_logprobs"][1:]]
        tops = [_best(position, count) for position in (*positions, choice["logprobs"]["top_logprobs"][0])]
        before = len(ids) - len(prompt)
        return TokenScores(_chosen(ids, choice)[before:], tuple(tops[before:]))

    def _connect(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(None, connect=10.0)  # an answer may wait behind others; requests have deadlines
        connections = httpx.Limits(max_connections=self.limits.max_batch)
        options: Json = {"headers": self._headers, "timeout": timeout, "limits": connections, "trust_env": False}
        return httpx.AsyncClient(base_url=self._url, **options)

    def _start(self, work: Coroutine[Any, Any, None], item: WorkItem, fail: Callable[[Exception], None]) -> None:
        task = asyncio.create_task(self._supervise(work, item.ctx.deadline, fail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        item.ctx.exit_stack.callback(task.cancel)

    async def _supervise(
        self, work: Coroutine[Any, Any, None], deadline: float, fail: Callable[[Exception], None]
    ) -> None:
        """Await work up to a deadline, and report its error."""
        try:
            async with asyncio.timeout(None if deadline == inf else deadline - time.monotonic()):
                await work
        except TimeoutError:
            fail(DeadlineError("the request took longer than its deadline"))
        except asyncio.CancelledError:  # by `stop`; after the end of a client's call nobody reads it
            fail(EngineStoppedError("the service is shutting down"))
        except Exception as error:
            self._answered = -inf  # the server is checked before the next request
            fail(error)

    async def _work(self, item: WorkItem) -> None:
        """Run an item's forwards: requests to the server, and steps of worlds, which need no model."""
        result = None
        try:
            while True:
                item.advance(result)
                step: Any = item.pending
                result = await anext(self._answers(step)) if isinstance(step, dict) else step.run(())[0]
        except StopIteration as end:
            item.deliver(end.value)

    async def _generate(self, request: Request) -> None:
        params, start, top = request.params, request.start, request.params.logprobs or 0
        sampling = {name: getattr(params, name) for name in SAMPLING}
        if params.ignore_end:  # vLLM goes on after an end token; it samples none before `min_tokens`
            sampling["min_tokens"] = params.max_tokens
        prompt = (*start, *request.prompt) if isinstance(start, tuple) else request.prompt
        async for choice in self._answers({"prompt": prompt, **sampling, "logprobs": top, "stream": True}):
            for event in self._events(choice, top):
                if request.dropped:
                    return
                request.deliver(event)
        request.fail(EngineStoppedError(f"{self._url} ended an answer early"))  # after its end nobody reads on

    def _events(self, choice: Json, top: int) -> Iterator[Event]:
        """Yield the events of a chunk's tokens."""
        tokens, logprobs = choice["token_ids"] or (), choice["logprobs"] or {}
        for place, token in enumerate(tokens):
            scores = Scores(logprobs["token_logprobs"][place], _best(logprobs["top_logprobs"][place], top))
            if token == self.end_token:
                yield Event(loops=self._depth.limit, scores=scores, finish=Finish.STOP)
            else:
                ended = choice["finish_reason"] and place + 1 == len(tokens)
                yield Event(token, self._depth.limit, scores, Finish.LENGTH if ended else None)

    async def _answers(self, body: Json) -> AsyncIterator[Json]:
        """Yield the choices of a completion, or of its chunks, of a server that is known to serve the model."""
        await self.check_source()
        async for choice in self._choices(self._client, body):
            self._answered = time.monotonic()
            yield choice

    async def _choices(self, client: httpx.AsyncClient, body: Json) -> AsyncIterator[Json]:
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        body = {"model": self._name, "temperature": 0, **ids, **body}
        async for reply in self._replies(client, "/v1/completions", body):
            for choice in reply["choices"]:
                yield choice

    async def _replies(self, client: httpx.AsyncClient, path: str, body: Json | None = None) -> AsyncIterator[Json]:
        """Yield the JSON of a response, or of each of its events. Raises EngineStoppedError or RemoteEngineError."""
        try:
            async with client.stream("GET" if body is None else "POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    if (text := line.removeprefix("data: ")) in ("", "[DONE]"):
                        continue
                    if response.is_error or text.startswith('{"error"'):
                        lost = EngineStoppedError if response.status_code in GONE else RemoteEngineError
                        raise lost(f"{self._url} answers {response.status_code}: {text[:200]}")
                    yield json.loads(text)
        except httpx.TransportError as error:
            raise EngineStoppedError(f"{self._url} does not answer: {error or type(error).__name__}") from error
        except ValueError as error:
            raise RemoteEngineError(f"{self._url}: must answer as vLLM's server does, got no JSON") from error


def _chosen(ids: Sequence[int], choice: Json) -> tuple[float, ...]:
    """Return the log-probabilities of a prompt's tokens after the first."""
    pairs = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
    return tuple(scores[str(token)]["logprob"] for token, scores in pairs)


def _best(scores: Mapping[str, float], count: int) -> tuple[tuple[int, float], ...]:
    """Return the most probable tokens, best first. scores: by `ID` or `token_id:ID`."""
    tokens = [(int(name.rpartition(":")[2]), score) for name, score in scores.items()]
    return tuple(sorted(tokens, key=lambda token: -token[1])[:count])
