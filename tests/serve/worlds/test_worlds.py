"""World sessions: imagined step by step over HTTP they are the library's, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from loopwm.core.exit_rules import Gate
from loopwm.core.kv_cache import SLACK, allocated_bytes
from loopwm.records.refusals import is_refused
from loopwm.records.template import Context, Transition, render_prompt, render_step
from loopwm.text.world import WorldModel
from serve.generation.service import Service
from serve.http.worlds import _lines_beyond
from serve.worlds.sessions import Sessions
from serve.worlds.steps import explore
from tests.fixtures.engine import run
from tests.fixtures.service import assert_alike, live_states, wait_until
from tests.serve.http.test_http import check_error, events

GOAL, SEEN = "Your task is to boil water.", "This room is called the kitchen. You see a stove and a pot."
TOKENS = 12
"""Most tokens decoded: random models seldom come to an end."""


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
    assert last["steps"][0]["reward"] == pytest.approx(predictions.reward.item(), rel=1e-4)
    assert last["steps"][0]["continuation"] == pytest.approx(predictions.continuation.item(), abs=1e-4)
    decoded = library.decode_traced(world, TOKENS)[0]
    assert last["usage"]["loops"]["decode"] == pytest.approx(sum(decoded.loops) / len(decoded.loops))
    assert last["world"]["imagined_steps"] == 3


def test_a_streamed_step_tells_bit_by_bit_what_a_plain_one_tells_at_once(client):
    name, actions = create(client), ["open the oven", "look around", "pick up pot"]
    (copy,) = (world["id"] for world in client.post(f"/v1/worlds/{name}/fork").json()["data"])
    parts: list[int] = []
    for decode, decoded in (("each", [0, 1, 2]), ("last", [2]), ("none", [])):
        body = {"actions": actions, "max_tokens": 3 * TOKENS, "decode": decode, "logprobs": True}
        plain = step(client, name, **body)
        *chunks, whole = events(client, f"/v1/worlds/{copy}/step", body)
        assert whole["object"] == "world.step"
        assert whole["usage"] == plain["usage"]
        assert_alike(whole["steps"], plain["steps"])
        assert whole["world"]["imagined_steps"] == plain["world"]["imagined_steps"]
        assert {chunk["object"] for chunk in chunks} == {"world.step.chunk"}
        for index, told in enumerate(whole["steps"]):
            first, *deltas = [chunk["delta"] for chunk in chunks if chunk["index"] == index]
            fields = "action", "reward", "expected_reward", "continuation", "acceptance", "loops", "summary"
            assert first == {field: told[field] for field in fields}
            if index not in decoded:
                assert deltas == []
                continue
            *pieces, last = deltas
            assert "".join(piece["observation"] for piece in pieces) == told["observation"]
            assert [token for piece in pieces for token in piece["tokens"]] == told["tokens"]
            assert last == {"finish_reason": told["finish_reason"]}
            parts.append(len(pieces))
    assert max(parts) > TOKENS


def test_tokens_of_an_observation_spell_it_with_the_scores_of_a_completion(client):
    told = step(client, create(client), "open the oven", "look around", logprobs=True)["steps"][1]
    prompt = render_prompt(Context(GOAL, SEEN), ["open the oven", "look around"])
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "logprobs": 0}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert "".join(token["token"] for token in told["tokens"]) == told["observation"] == choice["text"]
    assert [token["logprob"] for token in told["tokens"]] == pytest.approx(
        choice["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert told["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("NAME", {"actions": []}, 400),
        ("NAME", {"actions": ["carry the heavy pot to the other end of the room " * 30] * 20}, 400),
        ("world-unknown", {"actions": "wait"}, 404),
        ("GONE", {"actions": "wait"}, 410),
    ],
)
def test_what_is_wrong_with_a_streamed_step_is_told_before_any_event(client, name, fields, status):
    names = {"NAME": create(client), "GONE": create(client)}
    client.delete(f"/v1/worlds/{names['GONE']}")
    response = client.post(f"/v1/worlds/{names.get(name, name)}/step", json={**fields, "stream": True})
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]


def test_what_fails_in_a_streamed_step_is_one_event_and_leaves_the_world(client, model, monkeypatch):
    name, body = create(client), {"actions": "wait", "max_tokens": TOKENS}
    before, forward, calls = client.get(f"/v1/worlds/{name}").json(), type(model.model).forward, []

    def fails_later(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs) if len(calls) < 5 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "forward", fails_later)
        patch.setattr("serve.engine.batch.MOST_DRAFTED", 0)  # one token a pass
        *chunks, error = events(client, f"/v1/worlds/{name}/step", body)
    assert error["error"]["code"] == "internal_error"
    assert any(chunk["delta"].get("observation") for chunk in chunks)
    assert client.get(f"/v1/worlds/{name}").json() == before
    assert step(client, name, "wait")["world"]["imagined_steps"] == 1


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


def test_a_plans_passes_may_be_cut_anywhere(library):
    """Each level is one pass where there is room, and as many as it takes where there is less."""
    world = library.encode([Context(GOAL, SEEN)])
    firsts, seconds = ("wait", "open the oven", "pick up pot"), ("look around", "wait")
    paths = [(one,) for one in firsts] + [(one, two) for two in seconds for one in firsts]
    sizes = {action: library.count(render_step(action, library.slots)) for action in (*firsts, *seconds)}
    whole, in_parts = (run(explore(library, world, paths, sizes), most) for most in (1 << 20, 7))
    assert set(whole) == set(in_parts) == set(paths)
    for path in paths:
        alone = world
        for action in path:
            alone = library.advance(alone, [action])
        predictions = library.predictions(alone)
        expected = predictions.expected_reward.item(), predictions.continuation.item()
        assert whole[path] == pytest.approx(expected, rel=1e-4)
        assert in_parts[path] == pytest.approx(expected, rel=1e-4)


def test_explore_many_deep_paths_holds_one_part_of_a_level(library):
    world = library.encode([Context(GOAL, SEEN)])
    actions = [f"take {i}" for i in range(64)]
    sizes = {action: library.count(render_step(action, library.slots)) for action in actions}
    paths = [(action,) * end for action in actions for end in range(1, 7)]
    work, before, most = explore(library, world, paths, sizes), allocated_bytes(), 0
    forward = next(work)
    with contextlib.suppress(StopIteration):
        while True:
            part = forward.split(4 * max(sizes.values()))
            after = part.run([])[0]
            most = max(most, allocated_bytes() - before)
            forward = work.send(after)
            del after
    alone = allocated_bytes()
    one = world
    for _ in range(6):
        one = library.advance(one, ["take 0"])
    one_row = allocated_bytes() - alone
    assert most <= 2 * 6 * one_row


def test_plan_and_steps_are_admitted_by_their_memory(client, monkeypatch):
    held: dict[str, int] = {}
    work = Service.work

    def recorded(self: Service, ctx: Any, steps: Any, num_tokens: int = 0, loops: int = 1) -> Any:
        held[steps.__name__] = num_tokens
        return work(self, ctx, steps, num_tokens, loops)

    monkeypatch.setattr(Service, "work", recorded)
    name, actions = create(client), ["wait", "look around", "open the oven"]
    plan = {"candidates": [[action] * 3 for action in actions], "decode": False}
    assert client.post(f"/v1/worlds/{name}/plan", json=plan).status_code == 200
    assert held["explore"] >= 2 * 3 * SLACK  # rows of a part and of the part before it
    step(client, name, *actions, decode="none")
    assert held["advance"] >= 3 * SLACK  # a copy of the world after each action


@pytest.mark.parametrize("count", [1, 3])
def test_plans_of_one_world_at_a_time_do_not_fail(client, count):
    name = create(client)
    body = {"candidates": [["wait", "look around"]] * count, "decode": False}
    expected = client.post(f"/v1/worlds/{name}/plan", json=body).json()["candidates"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post(f"/v1/worlds/{name}/plan", json=body), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        assert_alike(answer.json()["candidates"], expected)


def test_actions_are_imagined_as_alone_in_forks_and_leave_the_world(client, library):
    name = create(client)
    step(client, name, "wait", decode="none")
    candidates = ["open the oven", "look around", "pick up pot", "wait"]
    body = {"candidates": candidates, "max_tokens": TOKENS}
    found = client.post(f"/v1/worlds/{name}/actions", json=body).json()["data"]
    forks = [world["id"] for world in client.post(f"/v1/worlds/{name}/fork", json={"count": 4}).json()["data"]]
    alone = [step(client, fork, action)["steps"][0] for fork, action in zip(forks, candidates, strict=True)]
    same = ("action", "observation", "reward", "continuation", "acceptance", "trust")
    assert_alike([{key: one[key] for key in same} for one in found], [{key: one[key] for key in same} for one in alone])
    world = library.advance(library.encode([Context(GOAL, SEEN)]), ["wait"])
    for action, one in zip(candidates, found, strict=True):
        reward = library.predictions(library.advance(world, [action])).expected_reward.item()
        assert one["expected_reward"] == pytest.approx(reward, rel=1e-4)
        accepted = library.predictions(library.advance(world, [action])).acceptance.item()
        assert one["acceptance"] == pytest.approx(accepted, rel=1e-4)
        assert one["accepted"] is (not is_refused(one["observation"]) and accepted >= 0.5)
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 1


def test_an_action_is_accepted_if_neither_text_nor_head_refuse_it(client, library, monkeypatch):
    monkeypatch.setattr("loopwm.records.refusals.is_refused", lambda observation: observation == told["look"])
    name = create(client)
    fork = client.post(f"/v1/worlds/{name}/fork", json={"count": 2}).json()["data"]
    told = {
        action: step(client, world["id"], action)["steps"][0]["observation"]
        for world, action in zip(fork, ("look", "wait"), strict=True)
    }
    assert told["look"] != told["wait"]
    body = {"candidates": ["look", "wait"], "max_tokens": TOKENS}
    for bias, accepted in ((20.0, [False, True]), (-20.0, [False, False])):
        monkeypatch.setattr(library.model.model.heads.acceptance[2].bias, "data", torch.tensor([bias]))
        found = client.post(f"/v1/worlds/{name}/actions", json=body).json()["data"]
        assert [one["accepted"] for one in found] == accepted


def test_actions_are_judged_without_their_observations_on_request(client):
    name = create(client)
    body = {"candidates": ["look", "wait"], "max_tokens": TOKENS}
    whole, judged = (
        client.post(f"/v1/worlds/{name}/actions", json={**body, "decode": decode}).json()["data"]
        for decode in (True, False)
    )
    assert_alike([{**one, "observation": None, "trust": None} for one in whole], judged)


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
            assert reward == pytest.approx(predictions.expected_reward.item(), rel=1e-4)
            score += alive * predictions.expected_reward.item()
            alive *= predictions.continuation.item()
        assert found["score"] == pytest.approx(score, rel=1e-4)
    scores = [found["score"] for found in plan["candidates"]]
    assert plan["best"] == scores.index(max(scores))
    best = candidates[plan["best"]]
    assert plan["observation"] == texts(library, Context(GOAL, SEEN), ["wait", *best])[-1]
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 1


def test_who_reads_a_world_that_is_changed_meanwhile_brings_nothing_old_back(serving, library, monkeypatch):
    """A plan makes the world again whose keys and values had gone; an observation comes before it is done."""
    made: list[Sessions] = []
    begin, build = Sessions.__init__, Sessions._build
    reading, changed = threading.Event(), threading.Event()

    def noted(self: Sessions, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    async def slow(self: Sessions, ctx: Any, log: Any, charged: bool = False) -> Any:
        kept = await build(self, ctx, log, charged)
        if not charged:
            reading.set()
            assert await asyncio.to_thread(wait_until, changed.is_set)
        return kept

    monkeypatch.setattr(Sessions, "__init__", noted)
    monkeypatch.setattr(Sessions, "_build", slow)
    with serving(library.model, end_token=library._end) as client, ThreadPoolExecutor(1) as pool:
        name = create(client)
        step(client, name, "wait")
        made[0]._cache.drop(name)
        plan = pool.submit(client.post, f"/v1/worlds/{name}/plan", json={"candidates": [["wait"]], "decode": False})
        assert wait_until(reading.is_set)
        seen = {"action": "open pot", "observation": "It is open."}
        assert client.post(f"/v1/worlds/{name}/observe", json=seen).status_code == 200
        changed.set()
        assert plan.result().status_code == 200
        said = step(client, name, "go")["steps"][0]["observation"]
    assert [said] == texts(library, Context(GOAL, SEEN, (Transition("open pot", "It is open."),)), ["go"])


def test_a_line_of_a_stream_is_one_for_every_reader(client):
    (told, *_) = events(client, f"/v1/worlds/{create(client)}/step", {"actions": ["look\u2028up\x85"], "max_tokens": 2})
    assert "error" not in told


def test_a_summary_comes_on_request(client):
    name = create(client)
    summary = step(client, name, "wait", monitor=True)["steps"][0]["summary"]
    assert sum(x * x for x in summary) == pytest.approx(1, abs=1e-4)
    assert step(client, name, "wait")["steps"][0]["summary"] is None


def test_worlds_leave_memory_with_their_requests_not_with_the_next_garbage_collection(client):
    def use_a_world() -> None:
        name = create(client)
        step(client, name, "open cupboard")
        events(client, f"/v1/worlds/{name}/step", {"actions": ["wait"], "max_tokens": TOKENS})
        client.post(f"/v1/worlds/{name}/plan", json={"candidates": [["wait"], ["look"]], "max_tokens": TOKENS})
        client.delete(f"/v1/worlds/{name}")

    use_a_world()
    gc.collect()
    before = live_states()
    gc.disable()
    try:
        use_a_world()
        assert wait_until(lambda: live_states() == before)
    finally:
        gc.enable()


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
        ("", {"model": "tiny", "goal": GOAL, "observation": "x " * 3000}, 400, "context"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": 99}, 400, "depth"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": {"rule": "gate", "tau": 2, "limit": 2}}, 400,
         "depth"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": {"rule": "magic"}}, 400, "depth"),
        ("/NAME/step", {"actions": []}, 400, "actions"),
        ("/NAME/step", {"actions": ["wait", ""]}, 400, "actions[1]"),
        ("/NAME/step", {"actions": ["wait"] * 10_000}, 400, "actions"),
        ("/NAME/step", {"actions": "wait", "decode": "all"}, 400, "decode"),
        ("/NAME/step", {"actions": "wait", "decod": "each"}, 400, "decod"),
        ("/NAME/step", {"actions": "wait", "max-tokens": 3}, 400, "max-tokens"),
        ("/NAME/step", {"actions": "wait", "observe": True}, 400, "observe"),
        ("", {"model": "tiny", "goal": GOAL, "observation": SEEN, "depth": {"rule": "gate", "limit": 2}}, 400,
         "depth.tau"),
        ("/NAME/observe", {"action": "wait"}, 400, "observation"),
        ("/NAME/plan", {"candidates": []}, 400, "candidates"),
        ("/NAME/actions", {"candidates": []}, 400, "candidates"),
        ("/NAME/actions", {"candidates": ["wait", "look", "wait"]}, 400, "candidates"),
        ("/NAME/actions", {"candidates": ["wait", "\u200b"]}, 400, "candidates[1]"),
        ("/NAME/actions", {"candidates": [f"wait {i}" for i in range(257)]}, 400, "candidates"),
        ("/NAME/fork", {"count": 0}, 400, "count"),
        ("/world-unknown/step", {"actions": "wait"}, 404, None),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field_and_leave_the_world(client, path, body, status, param):
    name = create(client)
    response = client.post("/v1/worlds" + path.replace("NAME", name), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 0


def test_what_is_wrong_with_a_body_is_said_in_the_words_of_the_request(client):
    name, world = create(client), {"model": "tiny", "goal": GOAL, "observation": SEEN}
    messages = {
        "decod: unknown field": client.post(f"/v1/worlds/{name}/step", json={"actions": "wait", "decod": "each"}),
        "depth: 'rule' must be one of": client.post("/v1/worlds", json={**world, "depth": {"rule": "gat"}}),
        "actions[0]: must have a visible character": client.post(f"/v1/worlds/{name}/step", json={"actions": [" "]}),
        "candidates: candidate 1 repeats candidate 0: 'wait'": client.post(
            f"/v1/worlds/{name}/actions", json={"candidates": ["wait", "wait"]}
        ),
        "requests: must have at most 256 items, got": client.post(
            "/v1/worlds:batch", json={"requests": [{"op": "delete", "world": "x"}] * 257}
        ),
        "body: must be a JSON object, sent with Content-Type: application/json": client.post(
            "/v1/worlds", content=json.dumps(world), headers={"Content-Type": "application/x-www-form-urlencoded"}
        ),
    }
    for message, response in messages.items():
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)


def test_a_world_that_grows_too_long_stays_as_it_was(client):
    name, long = create(client), "carry the heavy pot to the other end of the room " * 30
    before = step(client, name, long, decode="none")["world"]
    response = client.post(f"/v1/worlds/{name}/step", json={"actions": [long] * 20})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "actions")
    assert client.get(f"/v1/worlds/{name}").json() == before


def test_a_checkpoint_without_heads_refuses_plans_and_summaries_and_steps_without_rewards(serving, tiny_model):
    with serving(tiny_model) as client:
        name = create(client)
        plan = client.post(f"/v1/worlds/{name}/plan", json={"candidates": [["wait"]]})
        monitor = client.post(f"/v1/worlds/{name}/step", json={"actions": "wait", "monitor": True})
        unread = client.post(f"/v1/worlds/{name}/actions", json={"candidates": ["wait"], "decode": False})
        assert {r.json()["error"]["code"] for r in (plan, monitor, unread)} == {"unsupported_by_model"}
        assert step(client, name, "wait", decode="none")["steps"][0]["reward"] is None


def test_worlds_are_listed_a_page_at_a_time_though_they_are_used_meanwhile(worlds_client):
    names = sorted(create(worlds_client) for _ in range(5))
    listed, after, more = [], "", True
    while more:
        page = worlds_client.get("/v1/worlds", params={"limit": 2, "after": after}).json()
        assert all(world["id"] > after for world in page["data"])
        assert len(page["data"]) <= 2
        listed += [world["id"] for world in page["data"]]
        after, more = listed[-1], page["has_more"]
        worlds_client.get(f"/v1/worlds/{listed[0]}")
    assert listed == sorted(set(listed))
    assert set(names) <= set(listed)
    limits = {"all": len(listed), "all but one": len(listed) - 1}
    pages = {name: worlds_client.get("/v1/worlds", params={"limit": limit}).json() for name, limit in limits.items()}
    assert {name: page["has_more"] for name, page in pages.items()} == {"all": False, "all but one": True}
    check_error(worlds_client.get("/v1/worlds", params={"limit": 0}), 400, "limit", "greater than or equal to 1")


def test_an_action_that_is_too_long_is_refused_before_it_holds_others_up(client):
    name, long = create(client), "q" * 2000
    for path, fields in (
        ("step", {"actions": long}),
        ("plan", {"candidates": [[long]]}),
        ("actions", {"candidates": [long]}),
        ("observe", {"action": long, "observation": "x", "check": True}),
    ):
        response = client.post(f"/v1/worlds/{name}/{path}", json=fields)
        assert response.status_code == 400
        assert "at most 1024 tokens" in response.json()["error"]["message"]
    body = {"model": "tiny", "goal": GOAL, "observation": SEEN, "actions": [long]}
    check_error(client.post("/v1/worlds", json=body), 400, "actions", "1024")


def test_a_step_that_fails_in_a_batch_leaves_its_world_to_the_next(client):
    request = {"op": "step", "world": create(client), "actions": "q" * 2000, "step_id": "twice"}
    body = {"requests": [request, request]}
    response = client.post("/v1/worlds:batch", json=body, headers={"X-Request-Timeout": "20"})
    assert [one["status"] for one in response.json()["data"]] == [400, 400]


def test_an_observation_that_does_not_fit_is_refused_and_the_history_stays(client):
    name = create(client)
    client.post(f"/v1/worlds/{name}/observe", json={"action": "look", "observation": "A stove."})
    before = client.get(f"/v1/worlds/{name}/export").json()
    response = client.post(f"/v1/worlds/{name}/observe", json={"action": "look", "observation": "a stove " * 3000})
    check_error(response, 400, "context", "newest step alone")
    assert client.get(f"/v1/worlds/{name}/export").json() == before


def test_space_around_a_text_is_not_kept(client):
    name = create(client, history=[{"action": "look", "observation": " \n A stove.\n"}], look=" here ", inventory=" ")
    client.post(f"/v1/worlds/{name}/observe", json={"action": "wait", "observation": " " * 9999 + "Nothing.\n"})
    export = client.get(f"/v1/worlds/{name}/export").json()
    assert [step["observation"] for step in export["history"]] == ["A stove.", "Nothing."]
    assert (export["look"], export["inventory"]) == ("here", "")


def test_checked_lines_are_compared_however_often_and_wherever_they_stand():
    assert _lines_beyond("a\nb\na\nc", "c\na\nd") == ["b", "a"]
    assert _lines_beyond("", "a") == []


def test_checked_lines_differ_by_more_than_white_space():
    assert _lines_beyond("a  pot\n\n\ta stove\nb", "a pot\na stove \nc") == ["b"]


def test_list_tokenizes_texts_beside_the_event_loop(client, monkeypatch):
    def blocks(*_: Any) -> bool:
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop().is_running()
        return False

    name = create(client)
    monkeypatch.setattr(Sessions, "is_foreign", blocks)
    assert client.get(f"/v1/worlds/{name}").json()["warnings"]
    assert [world["warnings"] for world in client.get("/v1/worlds").json()["data"] if world["warnings"]] == []
