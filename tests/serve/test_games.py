"""Games of packaged pixel worlds over HTTP."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from loopwm.pixel.checkpoint import load_checkpoint
from loopwm.pixel.gym import CATCH, real_environment
from loopwm.records.errors import InputError
from serve.generation.rate_limits import KeyQuota, RateLimiter
from serve.http.auth import KeyRing
from serve.pixels import game as pixel_game
from serve.pixels import games
from serve.pixels.game import FOLLOWED, Game
from serve.pixels.games import MODELS, Games
from serve.playground import FOLDER
from serve.worlds.store import TooManyWorldsError, WorldNotFoundError
from tests.fixtures.service import wait_until
from tests.serve.http.test_http import check_error


@pytest.fixture(autouse=True)
def fresh(client: Any) -> None:
    """The service of all tests begins each with no game."""
    client.server.config.app.state.games._sessions.clear()


def frames(client: Any, keys: str = "", **fields: Any) -> list[dict[str, Any]]:
    """The frames of a request, which have to end with [DONE]."""
    headers = fields.pop("headers", {})
    response = client.post("/v1/games", json={"model": "catch", "keys": keys, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(item) for item in data]


def paddle(frame: dict[str, Any], side: str) -> int:
    rgb = base64.b64decode(frame["sides"][side]["rgb"])
    rows = [rgb[i : i + 15 : 3] for i in range(0, len(rgb), 15)]
    assert len(rows) == frame["height"] == 10
    return rows[-1].index(255)


def test_keys_move_both_sides(client):
    (first,) = frames(client)
    assert (first["step"], first["actions"], first["arrows"]) == (0, "012", "LDR")
    played = frames(client, "0 01", id=first["id"])
    assert [frame["step"] for frame in played] == [1, 2, 3]
    for side in ("real", "imagined"):
        assert [paddle(frame, side) for frame in played] == [1, 0, 0]
    (back,) = frames(client, "B", id=first["id"])
    assert (back["step"], back["steps"], back["episode"]) == (2, 3, 1)


def test_seed_decides_the_game(client):
    same, again, other = ([f["sides"]["real"] for f in frames(client, "11", seed=seed)] for seed in (1, 1, 3))
    assert same == again != other


def test_every_packaged_world_is_on_the_page(client):
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    select = re.search(r'<select id="game">(.*)</select>', page)
    assert select is not None
    assert {*re.findall(r'value="(\w+)"', select[1])} == {*MODELS}
    for model in MODELS:
        assert frames(client, "1", model=model)[0]["model"] == model


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "pong"}, 404, "model", "'pong' does not exist; this service has 'breakout', 'catch', 'memory'"),
        ({"model": "../catch"}, 404, "model", "does not exist"),
        ({"model": "catch", "keys": "0x"}, 400, "keys", "must be of 0 to 2, A, B, F, N, ., got 'x'"),
        ({"model": "catch", "keys": "0" * 1001}, 400, "keys", "at most 1000"),
        ({"model": "catch", "fps": 0}, 400, "fps", "greater than or equal to 1"),
        ({"model": "catch", "seed": -1}, 400, "seed", "greater than or equal to 0"),
        ({"model": "catch", "colour": 1}, 400, "colour", "unknown field"),
        ({"model": "catch", "id": "game-none"}, 404, None, "There is no game 'game-none'"),
    ],
)
def test_bad_input_has_the_envelope(client, fields, status, param, words):
    check_error(client.post("/v1/games", json=fields), status, param, words)


def test_unknown_key_plays_nothing(client):
    (first,) = frames(client)
    assert client.post("/v1/games", json={"model": "catch", "id": first["id"], "keys": "00x"}).status_code == 400
    assert frames(client, id=first["id"])[0]["step"] == 0


def test_missing_simulator_is_refused(client, monkeypatch):
    def missing(name: str) -> None:
        raise InputError(f"environment: {name} needs the package minatar: pip install 'loopwm[minatar]'")

    monkeypatch.setattr("serve.pixels.play.real_environment", missing)
    response = client.post("/v1/games", json={"model": "breakout"})
    check_error(response, 400, "model", "pip install 'loopwm[minatar]'")
    assert response.json()["error"]["code"] == "unsupported_by_model"


def test_missing_extra_is_refused(client, monkeypatch):
    for name in ("loopwm.pixel.gym", "serve.pixels.play"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    check_error(
        client.post("/v1/games", json={"model": "catch"}), 400, "model", "gymnasium: pip install 'loopwm[pixel]'"
    )


def test_a_game_too_many_ends_the_longest_unused_one(client, monkeypatch):
    monkeypatch.setattr(games, "MAX_PER_KEY", 2)
    ids = [frames(client)[0]["id"] for _ in range(2)]
    assert frames(client, "1", id=ids[0])[0]["step"] == 1
    newest = frames(client)[0]["id"]
    check_error(client.post("/v1/games", json={"model": "catch", "id": ids[1]}), 404, None, "There is no game")
    assert [frames(client, id=name)[0]["step"] for name in (ids[0], newest)] == [1, 0]


def test_keys_have_their_own_games_and_limits(serving, tiny_model):
    secrets = {name: name * 32 for name in ("a", "b")}
    hashes = {name: hashlib.sha256(secret.encode()).hexdigest() for name, secret in secrets.items()}
    ring = KeyRing(hashes, {"a": KeyQuota(worlds=1), "b": KeyQuota(requests=2)})
    with serving(tiny_model, keys=ring) as client:
        headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        assert client.post("/v1/games", json={"model": "catch"}).status_code == 401
        (game,) = frames(client, headers=headers["a"])
        stolen = client.post("/v1/games", json={"model": "catch", "id": game["id"]}, headers=headers["b"])
        check_error(stolen, 404, None, "There is no game")
        assert frames(client, headers=headers["b"])
        assert client.post("/v1/games", json={"model": "catch"}, headers=headers["b"]).status_code == 429
        (again,) = frames(client, headers=headers["a"])
        ended = client.post("/v1/games", json={"model": "catch", "id": game["id"]}, headers=headers["a"])
        check_error(ended, 404, None, "There is no game")
        assert frames(client, headers=headers["a"], id=again["id"])


def test_unused_games_expire_and_their_number_is_bounded(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(games, "TTL", 50)
    service: Any = SimpleNamespace(rate_limiter=RateLimiter())
    store = Games(service, clock=lambda: now[0])

    async def check() -> None:
        session = await store.create("", "catch", 0)
        now[0] = 49
        assert store.get(session.id, "") is session
        now[0] = 99
        assert store.get(session.id, "") is session
        monkeypatch.setattr(games, "MAX_GAMES", 1)
        with monkeypatch.context() as patched:
            patched.setattr(games, "_open", None)  # nothing is loaded for a game that is refused
            with pytest.raises(TooManyWorldsError, match="1 of all 1 games"):
                await store.create("other", "catch", 0)
        now[0] = 150
        with pytest.raises(WorldNotFoundError, match="expired"):
            store.get(session.id, "")
        await store.create("other", "catch", 0)

    asyncio.run(check())


def test_later_request_takes_over(client):
    (first,) = frames(client)
    seen: list[dict[str, Any]] = []
    agent = threading.Thread(target=lambda: seen.extend(frames(client, "A" * 900, id=first["id"], fps=20)))
    agent.start()
    session = client.server.config.app.state.games._sessions[first["id"]]
    assert wait_until(lambda: session.game.steps > 3)
    frames(client, "1", id=first["id"])
    agent.join(20)
    assert not agent.is_alive()
    assert len(seen) < 900


def test_deadline_ends_a_stream(client):
    played = frames(client, "1" * 50, fps=10, headers={"X-Request-Timeout": "0.5"})
    assert len(played) < 20
    assert played[-1]["error"]["code"] == "deadline_exceeded"


def test_shutdown_ends_a_stream(serving, tiny_model):
    with serving(tiny_model, grace=0.5) as client:
        seen: list[dict[str, Any]] = []
        stream = threading.Thread(target=lambda: seen.extend(frames(client, "1" * 900, fps=5)))
        stream.start()
        store = client.server.config.app.state.games
        assert wait_until(lambda: any(session.game.steps > 1 for session in store._sessions.values()))
        client.server.should_exit = True
        stream.join(30)
    assert seen[-1]["error"]["code"] == "unavailable"


def test_frames_come_at_their_rate(client):
    (first,) = frames(client)
    response = client.post("/v1/games", json={"model": "catch", "id": first["id"], "keys": "111", "fps": 1})
    assert response.elapsed.total_seconds() >= 1.9


@pytest.fixture
def catch() -> Game:
    return Game(load_checkpoint(CATCH).world(), real_environment("catch"), [], 0)


def test_agent_catches_the_ball(catch):
    scores = []
    while len(scores) < 3:
        catch.act_by_plan()
        scores += [catch.now.real.score] if catch.now.real.over else []
    assert scores == [1, 1, 1]


def test_agent_imagines_again_after_a_few_steps_or_another_hand(catch, monkeypatch):
    imagined = []
    best = catch._best_future
    monkeypatch.setattr(catch, "_best_future", lambda: imagined.append(catch.age) or best())
    for _ in range(FOLLOWED + 1):
        catch.act_by_plan()
    assert imagined == [0, FOLLOWED]
    catch.act(1)
    catch.act_by_plan()
    catch.back()
    catch.act_by_plan()
    assert imagined == [0, FOLLOWED, FOLLOWED + 2, FOLLOWED + 2]


@pytest.mark.parametrize(("fatal", "best"), [(0, {(2, 2)}), (2, {(0, 2), (1, 2)})])
def test_agent_takes_rewards_before_an_imagined_end(fatal, best, catch, monkeypatch):
    """A world that pays for action 2, and ends after one."""
    step = catch._world.step

    def changed(state: Any, action: Any, generator: Any) -> Any:
        outcome = step(state, action, generator)
        return replace(outcome, reward=(action == 2).float(), terminated=action == fatal)

    monkeypatch.setattr(catch._world, "step", changed)
    monkeypatch.setattr(pixel_game, "HORIZON", 2)
    assert tuple(catch._best_future()) in best


def test_a_game_whose_keys_are_refused_is_not_kept(client):
    (first,) = frames(client)
    for _ in range(20):
        check_error(client.post("/v1/games", json={"model": "catch", "keys": "Z"}), 400, "keys", "'Z'")
    check_error(client.post("/v1/games", json={"model": "catch", "keys": "Z", "id": first["id"]}), 400, "keys", "'Z'")
    assert len(frames(client, "01", id=first["id"])) == 2, "a game that has begun stays"
    assert len(client.server.config.app.state.games._sessions) == 1
