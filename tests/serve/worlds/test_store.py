"""Worlds are their text: it is kept, saved and given out; keys and values come and go unnoticed."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loopwm.core.exit_rules import Fixed, Gate
from loopwm.core.kv_cache import allocated_bytes
from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition
from serve.generation.rate_limits import KeyQuota, RateLimiter
from serve.limits import Limits
from serve.worlds.sqlite import Change, StorageError, WorldFile
from serve.worlds.store import (
    Answer,
    Session,
    TooManyWorldsError,
    TooMuchTextError,
    WorldBusyError,
    WorldGoneError,
    WorldLimits,
    WorldLog,
    WorldNotFoundError,
    WorldStore,
    read_log,
)
from tests.fixtures.models import random_model
from tests.serve.http.test_http import check_error, events
from tests.serve.worlds.test_worlds import GOAL, SEEN, create, step, texts

LOG = WorldLog(
    Context(GOAL, SEEN, (Transition("wait", "Zo\u00eb \u4e16"),), "look", "bag", "hid"), Gate(0.5, 3), ("go", "x"), 2
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def add(store: WorldStore, owner: str = "me", count: int = 1) -> list[str]:
    return [session.id for session in store.add(owner, LOG, 9, count)]


@pytest.mark.parametrize("depth", [Fixed(2), Gate(0.5, 3)])
def test_a_log_comes_back_from_json(depth):
    log = WorldLog(LOG.context, depth, LOG.actions, 2)
    assert read_log(json.loads(json.dumps(log.json()))) == log


def fill(store: WorldStore) -> None:
    """Allow the file no page more than it has: SQLite's own error for a full disk."""
    (pages,) = store._file._db.execute("PRAGMA page_count").fetchone()
    store._file._db.execute(f"PRAGMA max_page_count = {pages}")


def free(store: WorldStore) -> None:
    store._file._db.execute("PRAGMA max_page_count = 1000000")


def reopened(store: WorldStore, path: Path) -> dict[str, Session]:
    """The worlds of the file as a restarted service reads them."""
    store.close()
    again = WorldStore(WorldLimits(ttl=math.inf), file=WorldFile(path))
    saved = {session.id: session for session in again.of("me")}
    again.close()
    return saved


def test_store_full_disk_changes_neither_memory_nor_file(tmp_path):
    store = WorldStore(WorldLimits(), file=WorldFile(tmp_path / "w"))
    (name,) = add(store)
    fill(store)
    long = WorldLog(Context(GOAL, SEEN * 1000), Fixed(1))
    before = replace(store.get(name, "me"))
    for change in (lambda: store.change(store.get(name, "me"), long, 1), lambda: store.add("me", long, 1)):
        with pytest.raises(StorageError, match="full"):
            change()
    assert store.failing
    assert store.of("me") == [replace(before, used=store.of("me")[0].used)]
    free(store)
    store.write()
    assert not store.failing
    store.change(store.get(name, "me"), long, 1)
    assert reopened(store, tmp_path / "w")[name].log == long


def test_store_failed_delete_keeps_the_world(tmp_path, monkeypatch):
    store = WorldStore(WorldLimits(), file=WorldFile(tmp_path / "w"))
    (name,) = add(store)
    with monkeypatch.context() as patch:
        patch.setattr(WorldFile, "write", _no_space)
        with pytest.raises(StorageError):
            store.remove(name, "me")
    assert store.get(name, "me").log == LOG
    store.remove(name, "me")
    assert reopened(store, tmp_path / "w") == {}


def test_store_expired_worlds_leave_the_file_later(tmp_path):
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock, WorldFile(tmp_path / "w"))
    add(store)
    clock.now = 20
    (name,) = add(store)
    assert list(reopened(store, tmp_path / "w")) == [name]


def _no_space(*_: Any) -> None:
    raise StorageError("no space is left")


def test_file_step_appends_one_small_row(tmp_path):
    file = WorldFile(tmp_path / "w")
    store = WorldStore(WorldLimits(), file=file)
    (name,) = add(store)
    session, written = store.get(name, "me"), []
    for number in range(3):
        store.change(session, session.log.with_actions([f"go {number}"]), 9, Answer("id", "body", "x" * 500))
        written.append(sum(len(row) for row in file._db.execute("SELECT change FROM changes").fetchall()))
    rows = file._db.execute("SELECT length(change), answered IS NULL FROM changes ORDER BY number").fetchall()
    assert [answered for _, answered in rows] == [1, 1, 1, 0]  # only the last answer is kept
    assert max(length for length, _ in rows[1:]) < 80
    assert reopened(store, tmp_path / "w") == {name: session}


def test_file_observation_replaces_the_rows_of_steps(tmp_path):
    file = WorldFile(tmp_path / "w")
    store = WorldStore(WorldLimits(), file=file)
    (name,) = add(store)
    session = store.get(name, "me")
    for _ in range(3):
        store.change(session, session.log.with_actions(["go"]), 9)
    store.change(session, session.log.with_observation("go", "You go."), 12)
    assert file._db.execute("SELECT count(*) FROM changes").fetchone() == (1,)
    assert reopened(store, tmp_path / "w") == {name: session}


def test_file_shrinks_when_worlds_are_deleted(tmp_path):
    file = WorldFile(tmp_path / "w")
    store = WorldStore(WorldLimits(), file=file)
    names = [session.id for session in store.add("me", WorldLog(Context(GOAL, SEEN * 100), Fixed(1)), 9, 100)]
    (pages,) = file._db.execute("PRAGMA page_count").fetchone()
    for name in names:
        store.remove(name, "me")
    assert file._db.execute("PRAGMA page_count").fetchone()[0] < pages / 10
    store.close()


def test_file_of_format_2_is_converted(tmp_path):
    world = {"owner": "me", "log": LOG.json(), "tokens": 9, "created": 5, "answered": ["id", "{}"]}
    with closing(sqlite3.connect(tmp_path / "w")) as db:
        db.execute("CREATE TABLE worlds (id TEXT PRIMARY KEY, used REAL NOT NULL, world TEXT NOT NULL) WITHOUT ROWID")
        db.execute("INSERT INTO worlds VALUES ('world-1', 7.5, ?)", [json.dumps(world)])
        db.execute("PRAGMA user_version = 2")
        db.commit()
    store = WorldStore(WorldLimits(ttl=math.inf), file=WorldFile(tmp_path / "w"))
    assert reopened(store, tmp_path / "w") == {"world-1": Session("world-1", "me", LOG, 9, 5, 7.5)}
    assert list(reopened(WorldStore(WorldLimits(), file=WorldFile(tmp_path / "w")), tmp_path / "w")) == ["world-1"]


def test_store_answer_over_the_quota_changes_nothing():
    quotas = RateLimiter({"me": KeyQuota(bytes=LOG.size + 110)})
    store = WorldStore(WorldLimits(), rate_limiter=quotas)
    session = store.get(*add(store), "me")
    store.change(session, LOG, 9, Answer("first", "body", "x" * 100))
    with pytest.raises(TooMuchTextError):
        store.check_room("me", size=2)
    with pytest.raises(TooMuchTextError):
        store.change(session, LOG, 9, Answer("second", "body", "x" * 110))
    assert session.answer == Answer("first", "body", "x" * 100)
    store.change(session, LOG, 9)
    store.check_room("me", size=1)


def test_unused_worlds_expire():
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock)
    one, two = add(store, count=2)
    clock.now = 8
    store.get(one, "me")
    clock.now = 15
    assert [session.id for session in store.of("me")] == [one]
    with pytest.raises(WorldGoneError, match="10 seconds"):
        store.get(two, "me")


def test_a_world_does_not_expire_while_it_is_changed():
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock)
    (name,) = add(store)
    with store.changing(name, "me"):
        clock.now = 15
        assert len(store.of("me")) == 1
    assert store.get(name, "me").id == name


def test_worlds_expire_by_a_clock_that_nobody_sets(monkeypatch):
    store, now, start = WorldStore(WorldLimits(ttl=100)), time.time(), time.monotonic()
    (name,) = add(store)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 1000)
        assert store.get(name, "me").used == pytest.approx(now, abs=50)
        patch.setattr(time, "monotonic", lambda: start + 1000)
        with pytest.raises(WorldGoneError, match="100 seconds"):
            store.get(name, "me")


def test_worlds_expire_by_their_last_use_after_a_restart(tmp_path):
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock, WorldFile(tmp_path / "w"))
    names = [add(store)[0]]
    clock.now = 8
    names += add(store)
    store.close()
    clock.now = 12
    store = WorldStore(WorldLimits(ttl=10), clock, WorldFile(tmp_path / "w"))
    assert [session.id for session in store.of("me")] == names[1:]
    store.close()


def test_text_of_worlds_counts_after_a_restart(tmp_path):
    limiter = RateLimiter({"me": KeyQuota(bytes=2 * LOG.size)})
    for _ in range(2):
        store = WorldStore(WorldLimits(), file=WorldFile(tmp_path / "w"), rate_limiter=limiter)
        add(store)
        store.close()
    store = WorldStore(WorldLimits(), file=WorldFile(tmp_path / "w"), rate_limiter=limiter)
    with pytest.raises(TooMuchTextError, match=f"{2 * LOG.size} "):
        add(store)
    store.close()


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path):
    file = WorldFile(tmp_path / "w")
    good = Change("one", {"log": {}})
    with pytest.raises(sqlite3.Error):
        file.write([good, Change(None, {"log": {}})])
    assert list(file.read()) == []
    file.write([good])
    with pytest.raises(sqlite3.Error):
        file.write([Change("three", {"log": {}})], ["one", {}])
    assert list(file.read()) == [good]
    file.close()


def test_the_file_is_synced_at_every_checkpoint_of_its_log(tmp_path):
    """The names of SQLite's levels: 1 is NORMAL, which cannot corrupt a file in WAL mode; 0 is OFF, which can."""
    file = WorldFile(tmp_path / "w")
    assert file._db.execute("PRAGMA synchronous").fetchone() == (1,)
    assert file._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    file.close()


def test_one_key_has_so_many_worlds_and_takes_none_from_another():
    store = WorldStore(WorldLimits(max_worlds=3))
    (theirs,) = add(store, "you")
    mine = add(store, count=3)
    with pytest.raises(TooManyWorldsError, match="3"):
        add(store)
    store.remove(mine[0], "me")
    with pytest.raises(TooManyWorldsError):
        add(store, count=2)
    add(store)
    assert store.get(theirs, "you").id == theirs


def test_a_world_that_is_being_changed_is_busy():
    store = WorldStore(WorldLimits())
    (name,) = add(store)
    with store.changing(name, "me"), pytest.raises(WorldBusyError), store.changing(name, "me"):
        pass
    with store.changing(name, "me"):
        pass


@pytest.mark.parametrize("owner", ["me", "zo\u00eb"])
def test_a_world_is_invisible_to_another_key(owner):
    store = WorldStore(WorldLimits())
    (mine,) = add(store, owner)
    assert store.get(mine, owner).id == mine
    for attempt in (store.get, lambda name, key: store.remove(name, key)):
        with pytest.raises(WorldNotFoundError):
            attempt(mine, "you")
    store.remove(mine, owner)
    with pytest.raises(WorldNotFoundError):
        store.get(mine, "you")
    assert store.of("you") == []


def test_a_file_gives_back_what_was_in_the_store(tmp_path):
    path, clock = tmp_path / "worlds.sqlite", Clock()
    store = WorldStore(WorldLimits(ttl=100), clock, WorldFile(path))
    one, two, three = add(store, count=3)
    clock.now = 50
    session = store.get(one, "me")
    store.change(session, WorldLog(LOG.context, Fixed(1), ("a",)), 12, Answer("id", "body", "\u00eb"))
    store.remove(two, "me")
    before = store.of("me")
    with pytest.raises(InputError, match="locked"):
        WorldFile(path)
    store.close()
    store = WorldStore(WorldLimits(ttl=100), clock, WorldFile(path))
    assert sorted(store.of("me"), key=lambda one: one.id) == sorted(before, key=lambda one: one.id)
    assert store.get(three, "me").log == LOG
    clock.now = 120
    assert [session.id for session in store.of("me")] == sorted([one, three])
    store.close()


def test_what_is_no_file_of_worlds_is_one_line(tmp_path):
    (tmp_path / "x").write_bytes(b"no database, " * 100)
    for path in (tmp_path / "x", tmp_path / "nowhere" / "y"):
        with pytest.raises(InputError, match=str(path)):
            WorldFile(path)


def test_a_client_never_notices_that_keys_and_values_had_to_go(serving, model, library):
    """A budget that holds next to nothing: every request computes what it needs again, and says the same."""
    with serving(model, Limits(cache_bytes=allocated_bytes() + 20_000), end_token=library._end) as client:
        names = {create(client, observation=f"{SEEN} It is room {i}."): i for i in range(5)}
        for action in ("open the oven", "look around"):
            for name in names:
                step(client, name, action, decode="none")
        for name, i in names.items():
            context = Context(GOAL, f"{SEEN} It is room {i}.")
            expected = texts(library, context, ["open the oven", "look around", "wait"])[-1]
            assert step(client, name, "wait")["steps"][0]["observation"] == expected
            plan = client.post(f"/v1/worlds/{name}/plan", json={"candidates": [["wait"]], "max_tokens": 12})
            assert plan.status_code == 200


def test_a_world_that_is_exported_is_the_same_wherever_it_is_created_again(client):
    name = create(client, depth={"rule": "gate", "tau": 0.5, "limit": 3}, look="a", inventory="b", hidden_state="c")
    client.post(f"/v1/worlds/{name}/observe", json={"action": "wait", "observation": "Nothing."})
    step(client, name, "open the oven", "look around")
    exported = client.get(f"/v1/worlds/{name}/export").json()
    again = client.post("/v1/worlds", json=exported).json()["id"]
    assert client.get(f"/v1/worlds/{again}/export").json() == exported
    assert step(client, again, "take it")["steps"] == step(client, name, "take it")["steps"]


def test_observations_cut_the_oldest_steps_as_a_new_world_would(client, library):
    name, long = create(client), "The room is as it was and nothing has changed. " * 30
    history = []
    for number in range(8):
        history.append({"action": f"wait {number}", "observation": f"{number} {long}"})
        response = client.post(f"/v1/worlds/{name}/observe", json=history[-1])
        assert response.status_code == 200, response.text
    told = response.json()
    assert told["steps_cut"] > 0
    assert told["tokens"] <= 2048
    again = client.post("/v1/worlds", json={"model": "tiny", "goal": GOAL, "observation": SEEN, "history": history})
    assert {**again.json(), "id": 0, "created": 0, "check": None} == {**told, "id": 0, "created": 0}
    steps = tuple(Transition(**one) for one in history)
    assert step(client, name, "go")["steps"][0]["observation"] == texts(library, Context(GOAL, SEEN, steps), ["go"])[0]


def test_a_step_with_an_id_is_taken_once_however_often_it_is_asked_for(client):
    name, body = create(client), {"step_id": "7f", "temperature": 1.0}
    first = step(client, name, "wait", **body)
    assert step(client, name, "wait", **body) == first
    *_, whole = events(client, f"/v1/worlds/{name}/step", {"actions": "wait", "max_tokens": 12, **body})
    assert whole == first
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 1
    second = step(client, name, "wait", step_id="80")
    assert second["world"]["imagined_steps"] == 2


def test_step_id_with_another_action_is_409(client):
    name = create(client)
    first = step(client, name, "wait", step_id="7f")
    for other in ({"actions": "go"}, {"actions": "wait", "decode": "none"}):
        response = client.post(f"/v1/worlds/{name}/step", json={"max_tokens": 12, "step_id": "7f", **other})
        check_error(response, 409, "step_id", "7f")
        assert response.json()["error"]["code"] == "step_id_reused"
    assert step(client, name, "wait", step_id="7f") == first


def test_step_id_of_a_running_step_joins_it(client, monkeypatch):
    name, body = create(client), {"actions": "wait", "step_id": "7f", "max_tokens": 60}
    url = f"/v1/worlds/{name}/step"
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.post(url, json=body), range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert client.get(f"/v1/worlds/{name}").json()["imagined_steps"] == 1


def test_service_with_a_full_disk_answers_503_and_recovers(serving, tiny_model, tmp_path, monkeypatch):
    with serving(tiny_model, file=WorldFile(tmp_path / "w")) as client:
        name = create(client)
        before = client.get(f"/v1/worlds/{name}").json()
        with monkeypatch.context() as patch:
            patch.setattr(WorldFile, "write", _no_space)
            for method, path in (("POST", "/step"), ("POST", "/fork"), ("DELETE", "")):
                body = {"actions": "wait", "decode": "none"} if path == "/step" else None
                refused = client.request(method, f"/v1/worlds/{name}{path}", json=body)
                check_error(refused, 503, None, "no space")
                assert (refused.json()["error"]["code"], "Retry-After" in refused.headers) == (
                    "storage_unavailable", True,
                )  # fmt: skip
            check_error(client.get("/ready"), 503, None, "no space")
            assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        assert client.get(f"/v1/worlds/{name}").json() == before
        assert step(client, name, "wait", decode="none")["world"]["imagined_steps"] == 1


def test_a_batch_answers_as_single_requests_do_and_fails_one_by_one(client):
    contexts = [{"goal": GOAL, "observation": f"{SEEN} Room {i}."} for i in range(6)]
    single = [create(client, **context) for context in contexts]
    made = [{"op": "create", "model": "tiny", **context} for context in contexts]
    answers = client.post("/v1/worlds:batch", json={"requests": made}).json()["data"]
    assert {answer["status"] for answer in answers} == {201}
    names = [answer["body"]["id"] for answer in answers]
    steps = [{"op": "step", "world": name, "actions": "go", "max_tokens": 12} for name in names]
    wrong = [{"op": "step", "world": "none", "actions": "go"}, {"op": "create", "model": "other", **contexts[0]}]
    seen = {"op": "observe", "world": single[0], "action": "wait", "observation": "Nothing."}
    *answers, missing, other, observed = client.post(
        "/v1/worlds:batch", json={"requests": [*steps, *wrong, seen]}
    ).json()["data"]
    expected = [step(client, name, "go")["steps"][0]["observation"] for name in single[1:]]
    assert [answer["body"]["steps"][0]["observation"] for answer in answers[1:]] == expected
    assert [missing["status"], missing["body"]["error"]["code"]] == [404, "world_not_found"]
    assert [other["status"], other["body"]["error"]["code"]] == [404, "model_not_found"]
    assert [observed["status"], observed["body"]["imagined_steps"]] == [200, 0]
    gone = client.post("/v1/worlds:batch", json={"requests": [{"op": "delete", "world": name} for name in names]})
    assert {answer["status"] for answer in gone.json()["data"]} == {200}
    assert client.get(f"/v1/worlds/{names[0]}").status_code == 410
    for fields in ({"actions": []}, {"actions": "go", "stream": True}, {"actions": "go", "stream": 0}):
        bad = client.post("/v1/worlds:batch", json={"requests": [{"op": "step", "world": names[0], **fields}]})
        assert bad.status_code == 400


def test_a_fault_of_the_service_costs_a_batch_one_answer(client, monkeypatch, caplog):
    async def fault(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("serve.http.worlds.observe", fault)
    name = create(client)
    seen = {"op": "observe", "world": name, "action": "wait", "observation": "Nothing."}
    asked = [{"op": "step", "world": name, "actions": "go", "max_tokens": 4}, seen]
    taken, failed = client.post("/v1/worlds:batch", json={"requests": asked}).json()["data"]
    assert [taken["status"], failed["status"], failed["body"]["error"]["type"]] == [200, 500, "server_error"]
    assert "broken" in caplog.text
    assert "broken" not in json.dumps(failed)


def test_steps_sample_by_their_seed_and_return_their_trust(client):
    name = create(client)
    forks = [world["id"] for world in client.post(f"/v1/worlds/{name}/fork", json={"count": 4}).json()["data"]]
    warm = {"temperature": 1.5, "logprobs": True}
    steps = [step(client, fork, "wait", seed=i // 2, **warm)["steps"][0] for i, fork in enumerate(forks)]
    texts = [one["observation"] for one in steps]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    for one in steps:
        score = sum(token["logprob"] for token in one["tokens"])
        if one["finish_reason"] == "length":
            assert one["trust"] is None
        else:  # the end token has a probability below 1, too
            assert 0 < one["trust"] < math.exp(score)


def test_file_keeps_when_a_world_was_last_used_and_its_answer(tmp_path):
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock, WorldFile(tmp_path / "w"))
    (name,) = add(store)
    store.change(store.get(name, "me"), LOG, 9, Answer("id", "body", "{}"))
    for clock.now in (8, 16, 24):
        store.get(name, "me")
    store.close()
    clock.now = 30
    again = WorldStore(WorldLimits(ttl=10), clock, WorldFile(tmp_path / "w"))
    assert (again.get(name, "me").answer, again.get(name, "me").log) == (Answer("id", "body", "{}"), LOG)
    again.close()


def test_store_without_a_file_forgets_what_has_expired():
    clock = Clock()
    store = WorldStore(WorldLimits(ttl=10), clock)
    add(store, count=3)
    clock.now = 20
    assert (store.of("me"), store._expired) == ([], [])
    assert store._unwritten == set()


def test_step_id_with_other_fields_of_the_reply_is_409(client):
    name = create(client)
    step(client, name, "wait", step_id="tokens")
    body = {"actions": ["wait"], "max_tokens": 12, "step_id": "tokens", "logprobs": True}
    check_error(client.post(f"/v1/worlds/{name}/step", json=body), 409, "step_id", "tokens")


def test_worlds_of_another_checkpoint_go_on_at_a_depth_that_this_one_runs(serving, model, tmp_path, fake_vllm):
    with serving(model, file=WorldFile(tmp_path / "w")) as client:
        names = [create(client, depth=depth) for depth in ({"rule": "gate", "tau": 0.5, "limit": 3}, 4, 1)]

    def loops(model: Any, **settings: Any) -> list[int]:
        with serving(model, file=WorldFile(tmp_path / "w"), **settings) as client:
            worlds = [step(client, name, "wait", decode="none")["world"] for name in names]
            return [world["max_loops"] for world in worlds]

    assert loops(random_model(max_loops=3)) == [2, 2, 1]
    with fake_vllm(model) as fake:
        assert loops(model, server=fake.url) == [2, 2, 2]
    assert loops(model) == [3, 4, 1]
