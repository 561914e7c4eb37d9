"""World sessions: imagined step by step over HTTP they are the library's, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loopwm.core import Fixed, Gate
from loopwm.text.format import Context, Transition
from loopwm.text.world import WorldModel
from serve.worlds import WorldBusyError, WorldGoneError, WorldLimits, WorldNotFoundError, WorldStore
from tests.text.conftest import random_model

GOAL, SEEN = "Your task is to boil water.", "This room is called the kitchen. You see a stove and a pot."
TOKENS = 12
"""Most tokens decoded: random models seldom come to an end."""


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(prediction_heads=True, monitor_head=True, exit_gate=True)


@pytest.fixture(scope="module")
def library(model, tokenizer) -> WorldModel:
    return WorldModel(model, tokenizer)


@pytest.fixture(scope="module")
def client(serving, model, library) -> Iterator[httpx.Client]:
    with serving(model, end_token=library._end) as client:
        yield client


def create(client: httpx.Client, **fields: Any) -> str:
    response = client.post("/v1/worlds", json={"model": "tiny", "goal": GOAL, "observation": SEEN, **fields})
    assert response.status_code == 201, response.text
    name: str = response.json()["id"]
    return name


def step(client: httpx.Client, name: str, *actions: str, **fields: Any) -> dict[str, Any]:
    body = {"actions": list(actions), "max_tokens": TOKENS, **fields}
    response = client.post(f"/v1/worlds/{name}/step", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts(library: WorldModel, context: Context, actions: list[str], depth: Any = None) -> list[str]:
    """What the library decodes after each action."""
    world, found = library.encode([context], depth), []
    for action in actions:
        world = library.advance(world, [action])
        found += library.decode(world, TOKENS)
    return found


@pytest.mark.parametrize("depth", [None, 1, {"rule": "gate", "tau": 0.5, "limit": 3}])
def test_steps_decode_what_the_library_decodes(client, library, depth):
    rule = Gate(0.5, 3) if isinstance(depth, dict) else depth
    actions = ["open the oven", "look around", "pick up pot"]
    expected = texts(library, Context(GOAL, SEEN), actions, rule)
    name = create(client, depth=depth)
    each = step(client, name, *actions, decode="each")
    assert [taken["observation"] for taken in each["steps"]] == expected
    name = create(client, depth=depth)
    step(client, name, *actions[:2], decode="none")
    last = step(client, name, actions[2])
    assert [taken["observation"] for taken in last["steps"]] == expected[2:]
    world = library.encode([Context(GOAL, SEEN)], rule)
    for action in actions:
        world = library.advance(world, [action])
    assert [taken["loops"] for taken in each["steps"]] == list(world.loops[0])
    predictions = library.predictions(world)
    assert last["steps"][0]["reward"] == pytest.approx(predictions.reward.item(), abs=1e-3)
    assert last["steps"][0]["continuation"] == pytest.approx(predictions.continuation.item(), abs=1e-4)
    decoded = library.decode_traced(world, TOKENS)[0]
    assert last["usage"]["loops"]["decode"] == pytest.approx(sum(decoded.loops) / len(decoded.loops))
    assert last["world"]["imagined_steps"] == 3


def test_a_real_observation_drops_what_was_imagined_since_the_last_one(client, library):
    name = create(client, history=[{"action": "wait", "observation": "Nothing."}])
    step(client, name, "open the oven", "look around")
    response = client.post(f"/v1/worlds/{name}/observe", json={"action": "open the oven", "observation": "It is open."})
    assert response.json()["imagined_steps"] == 0
    history = (Transition("wait", "Nothing."), Transition("open the oven", "It is open."))
    expected = texts(library, Context(GOAL, SEEN, history), ["take it"])
    assert step(client, name, "take it")["steps"][0]["observation"] == expected[0]


def test_forks_go_their_own_ways(client, library):
    name = create(client)
    step(client, name, "open the oven", decode="none")
    forks = client.post(f"/v1/worlds/{name}/fork", json={"count": 2}).json()["data"]
    ways = {name: "wait", forks[0]["id"]: "look around", forks[1]["id"]: "pick up pot"}
    for world, action in ways.items():
        expected = texts(library, Context(GOAL, SEEN), ["open the oven", action])[-1]
        assert step(client, world, action)["steps"][0]["observation"] == expected


def test_a_plan_scores_candidates_as_single_rollouts_do_and_leaves_the_world(client, library):
    name = create(client)
    step(client, name, "wait", decode="none")
    candidates = [["open the oven", "look around", "pick up pot"], ["look around"], ["pick up pot", "wait"]]
    plan = client.post(f"/v1/worlds/{name}/plan", json={"candidates": candidates, "max_tokens": TOKENS}).json()
    world = library.advance(library.encode([Context(GOAL, SEEN)]), ["wait"])
    for actions, found in zip(candidates, plan["candidates"], strict=True):
        row, score, alive = world, 0.0, 1.0
        for action, reward in zip(actions, found["rewards"], strict=True):
            row = library.advance(row, [action])
            predictions = library.predictions(row)
            assert reward == pytest.approx(predictions.reward.item(), abs=1e-3)
            score += alive * predictions.reward.item()
            alive *= predictions.continuation.item()
        assert found["score"] == pytest.approx(score, abs=1e-3)
    scores = [found["score"] for found in plan["candidates"]]
    assert plan["best"] == scores.index(max(scores))
    best = candidates[plan["best"]]
    assert plan["observation"] == texts(library, Context(GOAL, SEEN), ["wait", *best])[-1]
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 1


def test_a_summary_comes_on_request(client):
    name = create(client)
    summary = step(client, name, "wait", monitor=True)["steps"][0]["summary"]
    assert sum(x * x for x in summary) == pytest.approx(1, abs=1e-4)
    assert step(client, name, "wait")["steps"][0]["summary"] is None


def test_a_deleted_world_is_gone_and_says_so(client):
    name = create(client)
    assert client.delete(f"/v1/worlds/{name}").json()["deleted"]
    response = client.post(f"/v1/worlds/{name}/step", json={"actions": "wait"})
    assert response.status_code == 410
    assert "create it again" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {"model": "tiny", "goal": GOAL}, 400, "observation"),
        ("", {"model": "other", "goal": GOAL, "observation": SEEN}, 404, "model"),
        ("", {"model": "tiny", "goal": GOAL, "observation": "x " * 3000}, 400, "context"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": 99}, 400, "depth"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": {"rule": "gate", "tau": 2, "limit": 2}}, 400,
         "depth"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": {"rule": "magic"}}, 400, "depth"),
        ("/NAME/step", {"actions": []}, 400, "actions"),
        ("/NAME/step", {"actions": ["wait", ""]}, 400, "actions[1]"),
        ("/NAME/step", {"actions": ["wait"] * 10_000}, 400, "actions"),
        ("/NAME/step", {"actions": "wait", "decode": "all"}, 400, "decode"),
        ("/NAME/observe", {"action": "wait"}, 400, "observation"),
        ("/NAME/plan", {"candidates": []}, 400, "candidates"),
        ("/NAME/fork", {"count": 0}, 400, "count"),
        ("/world-unknown/step", {"actions": "wait"}, 404, None),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field_and_leave_the_world(client, path, body, status, param):
    name = create(client)
    response = client.post("/v1/worlds" + path.replace("NAME", name), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 0


def test_a_world_that_grows_too_long_stays_as_it_was(client):
    name, long = create(client), "carry the heavy pot to the other end of the room " * 30
    before = step(client, name, long, decode="none")["world"]
    response = client.post(f"/v1/worlds/{name}/step", json={"actions": [long] * 20})
    assert (response.status_code, response.json()["error"]["param"][:8]) == (400, "actions[")
    assert client.get(f"/v1/worlds/{name}").json() == before


def test_a_checkpoint_without_heads_refuses_plans_and_summaries_and_steps_without_rewards(serving, tiny_model):
    with serving(tiny_model) as client:
        name = create(client)
        plan = client.post(f"/v1/worlds/{name}/plan", json={"candidates": [["wait"]]})
        monitor = client.post(f"/v1/worlds/{name}/step", json={"actions": "wait", "monitor": True})
        assert {r.json()["error"]["code"] for r in (plan, monitor)} == {"unsupported_by_model"}
        assert step(client, name, "wait", decode="none")["steps"][0]["reward"] is None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def worlds(library) -> list[Any]:
    return [library.encode([Context(GOAL, f"room {i}")], Fixed(2)) for i in range(3)]


def test_unused_worlds_expire(worlds):
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock)
    one, two = (store.add("me", world, world).id for world in worlds[:2])
    clock.now = 8
    store.get(one, "me")
    clock.now = 15
    assert [session.id for session in store.of("me")] == [one]
    with pytest.raises(WorldGoneError, match="10 seconds"):
        store.get(two, "me")


def test_short_memory_drops_the_least_recently_used_that_nobody_is_changing(worlds):
    size = worlds[0].state.nbytes()
    store = WorldStore(WorldLimits(most_bytes=2 * size + size // 2))
    one, two = (store.add("me", world, world).id for world in worlds[:2])
    store.add("me", worlds[0], worlds[0])
    assert len(store) == 3, "a fork shares what it has in common"
    with store.changing(one, "me"):
        with pytest.raises(WorldBusyError), store.changing(one, "me"):
            pass
        three = store.add("me", worlds[2], worlds[2]).id
        assert store.get(one, "me").world is worlds[0]
    with pytest.raises(WorldGoneError, match="memory"):
        store.get(two, "me")
    assert store.get(three, "me").world is worlds[2]
    assert store.nbytes() <= store.limits.most_bytes


def test_a_world_is_invisible_to_another_key(worlds):
    store = WorldStore(WorldLimits())
    mine = store.add("me", worlds[0], worlds[0]).id
    for attempt in (store.get, store.remove):
        with pytest.raises(WorldNotFoundError):
            attempt(mine, "you")
    store.remove(mine, "me")
    with pytest.raises(WorldNotFoundError):
        store.get(mine, "you")
    assert store.of("you") == []
