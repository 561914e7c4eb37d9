"""A served world answers the likelier of two texts, as the library does, whole or streamed."""

from __future__ import annotations

import gzip
import json
import threading
from itertools import islice
from pathlib import Path

import httpx
import pytest
import torch

from loopwm.records.files import PACKAGED
from loopwm.records.template import Context, render_prompt, window_context
from loopwm.text import decoding
from loopwm.text.memory import Memory, TrainEpisode
from loopwm.text.world import WorldModel
from loopwm.worlds.local import LocalWorlds
from serve.engine.engine import Engine
from serve.engine.requests import Request
from serve.generation import streams
from tests.fixtures.service import Serving, wait_until
from tests.serve.http.test_http import events, post_without_reading
from tests.serve.worlds.test_worlds import GOAL, SEEN

SUITE = Path(__file__).parents[3] / "eval/suites/alfworld-dev.jsonl.gz"
WINDOWS = 12


@pytest.fixture(scope="module")
def shipped() -> WorldModel:
    return WorldModel.from_pretrained(PACKAGED)


@pytest.fixture(scope="module")
def client(serving: Serving, shipped: WorldModel):
    with serving(shipped.model, end_token=shipped._end) as client:
        yield client


@pytest.fixture(scope="module")
def asked() -> list[tuple]:
    """Contexts and actions of ALFWorld: what unseen places hold leaves the model unsure."""
    with gzip.open(SUITE, "rt", encoding="utf-8") as lines:
        windows = [json.loads(line) for line in islice(lines, WINDOWS)]
    return [(window_context(window, "observed"), window["actions"][0]) for window in windows]


def create(client: httpx.Client, context) -> str:
    steps = [{"action": step.action, "observation": step.observation} for step in context.history]
    body = {"model": "tiny", "goal": context.goal, "observation": context.observation, "history": steps}
    return client.post("/v1/worlds", json=body).raise_for_status().json()["id"]


def imagined(worlds: LocalWorlds, asked: list[tuple]):
    worlds.begin([context for context, _ in asked])
    return worlds.step([action for _, action in asked])


@pytest.mark.slow
def test_served_texts_are_the_librarys_whole_and_streamed(client, shipped, asked):
    expected = imagined(LocalWorlds(shipped), asked)
    greedy = imagined(LocalWorlds(shipped, greedy=True), asked)
    others = [place for place, (one, two) in enumerate(zip(expected, greedy, strict=True)) if one != two]
    assert 0 < len(others) < WINDOWS
    for place in others:
        assert expected[place].trust > (greedy[place].trust or 0.0)
    held = 0
    for (context, action), step in zip(asked, expected, strict=True):
        name = create(client, context)
        (copy,) = (world["id"] for world in client.post(f"/v1/worlds/{name}/fork").json()["data"])
        (whole,) = client.post(f"/v1/worlds/{name}/step", json={"actions": [action]}).json()["steps"]
        assert whole["observation"] == step.observation
        assert whole["trust"] == pytest.approx(step.trust, rel=1e-3)
        body = {"actions": [action], "logprobs": True}
        *chunks, last = events(client, f"/v1/worlds/{copy}/step", body)
        deltas = [chunk["delta"] for chunk in chunks if "observation" in chunk["delta"]]
        assert "".join(delta["observation"] for delta in deltas) == step.observation
        assert last["steps"][0]["trust"] == pytest.approx(step.trust, rel=1e-3)
        tokens = [token for delta in deltas for token in delta["tokens"]]
        assert "".join(token["token"] for token in tokens) == step.observation
        held += len(deltas) > 3
    assert held > WINDOWS / 2


@pytest.mark.slow
def test_likelier_second_text_too_long_is_not_chosen(client, shipped, asked):
    whole, greedy = imagined(LocalWorlds(shipped), asked), imagined(LocalWorlds(shipped, greedy=True), asked)
    place = next(place for place, step in enumerate(whole) if step != greedy[place])
    context, action = asked[place]

    def served(**fields):
        body = {"actions": [action], "logprobs": True, **fields}
        (step,) = client.post(f"/v1/worlds/{create(client, context)}/step", json=body).json()["steps"]
        return step

    room = len(served()["tokens"])
    for most, finish in ((room, "length"), (room + 1, "stop")):  # the end mark is a token, too
        (cut,) = imagined(LocalWorlds(shipped, max_new_tokens=most), [asked[place]])
        step = served(max_tokens=most)
        assert (step["observation"], step["finish_reason"]) == (cut.observation, cut.finish)
        assert cut.finish == finish


@pytest.mark.slow
def test_recalled_texts_are_weighed_as_by_the_library(serving, shipped, asked):
    """What is recalled is the greedy text, which is chosen where the likelier one is not much more so, or nonsense."""
    said, greedy = imagined(LocalWorlds(shipped), asked), imagined(LocalWorlds(shipped, greedy=True), asked)
    unsure = [row for row, step in enumerate(said) if step != greedy[row]]
    some = [*unsure, *[row for row in range(WINDOWS) if row not in unsure][:2]]
    episodes = []
    for row in some:
        (context, action), text = asked[row], greedy[row].observation if row in unsure else "Qwerty."
        seen = [("", context.observation), *((step.action, step.observation) for step in context.history)]
        episodes.append(TrainEpisode("", "", context.goal, (*seen, (action, text)), 0))
    memory = Memory(episodes)
    expected = imagined(LocalWorlds(shipped, memory=memory), [asked[row] for row in some])
    chosen = {row for row, step in zip(some, expected, strict=True) if step != said[row]}
    assert chosen
    assert chosen <= set(unsure)
    with serving(shipped.model, end_token=shipped._end, memory=memory) as client:
        for (context, action), step in zip([asked[row] for row in some], expected, strict=True):
            name = create(client, context)
            (tried,) = client.post(f"/v1/worlds/{name}/actions", json={"candidates": [action]}).json()["data"]
            assert tried["trust"] == pytest.approx(step.trust, rel=1e-3)
            chunks = events(client, f"/v1/worlds/{name}/step", {"actions": [action], "logprobs": True})
            deltas = [chunk["delta"] for chunk in chunks if "observation" in chunk.get("delta", {})]
            assert "".join(delta["observation"] for delta in deltas) == step.observation
            assert chunks[-1]["steps"][0]["trust"] == pytest.approx(step.trust, rel=1e-3)


def test_words_that_differ_from_what_is_recalled_wait_for_the_end(serving, library, monkeypatch):
    monkeypatch.setattr(streams, "UNLIKELY", 2.0)  # as if every word were sure
    monkeypatch.setattr(library.model.config, "tokens_per_byte", 0.0)  # and the memory foreign, so that it is taken
    memory = Memory([TrainEpisode("", "", GOAL, (("", SEEN), ("wait", "You wait.")), 0)])
    with serving(library.model, end_token=library._end, memory=memory) as client:
        path = f"/v1/worlds/{create(client, Context(GOAL, SEEN))}/step"
        *chunks, _ = events(client, path, {"actions": ["wait"], "max_tokens": 12})
    assert "".join(chunk["delta"].get("observation", "") for chunk in chunks) == "You wait."


def test_actions_since_the_last_real_step_are_recalled_by(serving, library):
    memory = Memory([])
    recalls: list[list[str]] = []
    memory.recall = lambda context, actions: recalls.append([*actions])  # type: ignore[assignment, method-assign]
    with serving(library.model, end_token=library._end, memory=memory) as client:
        world = f"/v1/worlds/{create(client, Context(GOAL, SEEN))}"
        client.post(f"{world}/step", json={"actions": ["wait"], "decode": "none"})
        client.post(f"{world}/step", json={"actions": ["look", "go"], "decode": "each", "max_tokens": 2})
        client.post(f"{world}/actions", json={"candidates": ["sing"], "max_tokens": 2})
        client.post(f"{world}/plan", json={"candidates": [["take pot", "drop pot"]], "max_tokens": 2})
    since = ["wait", "look", "go"]
    assert recalls == [since[:2], since, [*since, "sing"], [*since, "take pot", "drop pot"]]


def test_stream_sure_words_come_before_the_text_ends(client, asked, monkeypatch):
    """Nothing is held back for a second text up to the first place where one may begin."""
    received, in_time, delivery = threading.Event(), [], streams._delivery

    def late_end(*args):
        deliver = delivery(*args)

        def hold(event):
            if event.finish is not None:
                in_time.append(wait_until(received.is_set))
            deliver(event)

        return hold

    monkeypatch.setattr(streams, "_delivery", late_end)
    monkeypatch.setattr("serve.engine.batch.MOST_DRAFTED", 0)  # a text that was decoded before comes in one step
    context, action = asked[0]
    body = {"actions": [action], "stream": True}
    with client.stream("POST", f"/v1/worlds/{create(client, context)}/step", json=body) as response:
        for line in response.iter_lines():
            if '"observation"' in line:
                received.set()
    assert in_time[0]


@pytest.fixture
def unsure(monkeypatch) -> None:
    """Follow any second choice: random weights are sure of nothing."""
    for module in (decoding, streams):
        monkeypatch.setattr(module, "UNLIKELY", 1e-9)


def test_likelier_end_as_second_choice_ends_the_text(serving, library, unsure):
    prompt = render_prompt(Context(GOAL, SEEN), ["wait"], library.slots)
    with torch.inference_mode():
        logits = library.model(torch.tensor([library._ids(prompt)]), depth=library.model.config.default_depth).logits
    second = logits[0, -1].softmax(-1).topk(2)
    with serving(library.model, end_token=int(second.indices[1])) as client:
        name = create(client, Context(GOAL, SEEN))
        body = {"actions": ["wait"], "max_tokens": 9}
        (step,) = client.post(f"/v1/worlds/{name}/step", json=body).json()["steps"]
    assert (step["observation"], step["finish_reason"]) == ("", "stop")
    assert step["trust"] == pytest.approx(second.values[1].item(), rel=1e-3)


def test_likelier_second_text_ends_with_its_client(worlds_client, unsure, monkeypatch):
    submitted: list[Request] = []
    submit = Engine.submit

    def record(engine, requests):
        submitted.extend(requests)
        submit(engine, requests)

    monkeypatch.setattr(Engine, "submit", record)
    path = f"/v1/worlds/{create(worlds_client, Context(GOAL, SEEN))}/step"
    with post_without_reading(worlds_client, path, {"actions": ["wait"], "max_tokens": 400}):
        assert wait_until(lambda: len(submitted) == 2)
    assert wait_until(lambda: submitted[1].cancelled)


def test_sampling_and_completions_are_left_alone(client, shipped, asked, monkeypatch):
    """Nothing departs where the client asks for samples, or for the completion of a prompt."""
    monkeypatch.setattr(streams, "departure", lambda *_: pytest.fail("a second text was looked for"))
    context, action = asked[0]
    name = create(client, context)
    body = {"actions": [action], "temperature": 0.7, "seed": 3}
    assert client.post(f"/v1/worlds/{name}/step", json=body).json()["steps"][0]["finish_reason"] == "stop"
    completion = {"model": "tiny", "prompt": "open the door", "max_tokens": 5}
    assert client.post("/v1/completions", json=completion).json()["usage"]["completion_tokens"] > 0


def test_a_real_step_tells_what_was_imagined_for_it(client, asked):
    context, action = asked[0]
    name = create(client, context)
    (alone,) = client.post(f"/v1/worlds/{name}/actions", json={"candidates": [action]}).json()["data"]
    client.post(f"/v1/worlds/{name}/step", json={"actions": ["inventory", "look"]})  # dropped, and not imagined from
    body = {"action": action, "observation": "Nothing happens.\nYou wait.", "check": True}
    found = client.post(f"/v1/worlds/{name}/observe", json=body).json()
    assert found["imagined_steps"] == 0
    check = found["check"]
    assert (check["observation"], check["trust"]) == (alone["observation"], pytest.approx(alone["trust"], rel=1e-3))
    assert not check["exact"]
    assert check["missing"] == ["Nothing happens.", "You wait."]
    assert check["wrong"] == alone["observation"].splitlines()
    (again,) = client.post(f"/v1/worlds/{name}/actions", json={"candidates": ["look"]}).json()["data"]
    right = {"op": "observe", "world": name, "action": "look", "observation": again["observation"], "check": True}
    (answer,) = client.post("/v1/worlds:batch", json={"requests": [right]}).json()["data"]
    assert answer["body"]["check"] == {
        "observation": again["observation"],
        "exact": True,
        "missing": [],
        "wrong": [],
        "trust": pytest.approx(again["trust"], rel=1e-3),
    }
    plain = client.post(f"/v1/worlds/{name}/observe", json={"action": "wait", "observation": "x"})
    assert plain.json()["check"] is None
