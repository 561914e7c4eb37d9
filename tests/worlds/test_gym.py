"""An imagined environment keeps Gymnasium's contract, and is the world model step by step, here and over HTTP."""

from __future__ import annotations

import gzip
import json
import runpy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

from loopwm.records.template import Context, FormatError, Transition
from loopwm.text.world import WorldModel
from loopwm.worlds.gym import ImaginedTextEnv, read_starts
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import Imagined, WorldError
from loopwm.worlds.starts import Start
from tests.fixtures.models import random_model

TOKENS = 12
KITCHEN = Context("boil water", "This is the kitchen.", (Transition("wait", "Nothing happens."),))
HALL = Context("find a tree", "This is the hall.")


@pytest.fixture
def worlds(library) -> LocalWorlds:
    return LocalWorlds(library, max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def url(worlds_client) -> str:
    return f"{worlds_client.base_url}/v1"


def play(env: ImaginedTextEnv, actions: list[str]) -> list[Any]:
    return [env.reset(seed=3), *(env.step(action) for action in actions)]


def test_gymnasiums_own_checker_finds_no_fault(worlds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(ImaginedTextEnv(worlds, [KITCHEN, HALL], render_mode="ansi"), skip_render_check=True)


class Echoes:
    """Worlds that answer every action with itself, without a model."""

    def begin(self, contexts: Sequence[Context]) -> None:
        pass

    def step(self, actions: Sequence[str]) -> list[Imagined]:
        return [Imagined(f"You said:\n\t{action} \u2603", 1.0, 0.9, "stop") for action in actions]

    def close(self) -> None:
        pass


def echoing() -> ImaginedTextEnv:
    return ImaginedTextEnv(Echoes(), [HALL])


def test_vector_environments_pass_any_text_on():
    envs = SyncVectorEnv([echoing] * 3)
    try:
        assert envs.reset(seed=0)[0] == (HALL.observation,) * 3
        observations, rewards, *_ = envs.step(["wait", "caf\u00e9", "look around"])
        assert observations == tuple(f"You said:\n\t{said} \u2603" for said in ("wait", "caf\u00e9", "look around"))
        assert rewards.tolist() == [1.0] * 3
    finally:
        envs.close()


def test_steps_are_those_of_the_world_model(library, worlds):
    env = ImaginedTextEnv(worlds, [KITCHEN])
    observation, info = env.reset(seed=0)
    assert (observation, info["goal"]) == ("Nothing happens.", "boil water")
    world = library.encode([KITCHEN])
    for action in ("open the oven", "look around"):
        world = library.advance(world, [action])
        observation, reward, terminated, _, info = env.step(action)
        found = library.predictions(world)
        assert observation == library.decode(world, TOKENS)[0]
        assert reward == pytest.approx(found.reward.item())
        assert terminated == (found.continuation.item() < 0.5)
        assert info["predicted"]
        assert info["continuation"] == pytest.approx(found.continuation.item())
        if terminated:
            with pytest.raises(ValueError, match="must follow reset"):
                env.step("wait")
            return


def test_the_same_seed_starts_in_the_same_place_and_options_name_another(worlds):
    env = ImaginedTextEnv(worlds, [KITCHEN, HALL])
    goals = {seed: env.reset(seed=seed)[1]["goal"] for seed in range(8)}
    assert set(goals.values()) == {"boil water", "find a tree"}
    assert goals == {seed: env.reset(seed=seed)[1]["goal"] for seed in range(8)}
    assert env.reset(seed=0, options={"context": HALL})[0] == "This is the hall."


def test_episodes_are_cut_after_max_steps_and_where_the_world_is_full(world_model):
    env = ImaginedTextEnv(LocalWorlds(world_model, max_new_tokens=TOKENS), [HALL], max_steps=2)
    env.reset()
    assert [env.step("wait")[2:4] for _ in range(2)] == [(False, False), (False, True)]
    small = WorldModel(random_model(max_position_embeddings=256), world_model.tokenizer)
    long, env = "carry it on " * 16, ImaginedTextEnv(LocalWorlds(small, max_new_tokens=4000), [HALL])
    env.reset()
    ends = [env.step(long)[3] for _ in range(1)]
    while not ends[-1] and len(ends) < 9:
        ends.append(env.step(long)[3])
    assert ends[-1]


def test_worlds_behind_the_service_are_the_same(url, library, worlds):
    kept = HttpWorlds(Client(url), "tiny", max_new_tokens=TOKENS)
    local, remote = ImaginedTextEnv(worlds, [HALL]), ImaginedTextEnv(kept, [HALL])
    ours, theirs = ([step[0] for step in play(env, ["wait"])] for env in (local, remote))
    assert ours == theirs
    remote.close()


def test_what_the_service_refuses_is_told_in_its_words(url):
    worlds = HttpWorlds(Client(url), "other")
    with pytest.raises(WorldError, match="'other' does not exist"):
        worlds.begin([HALL])


@pytest.mark.parametrize("action", ["", "  ", "x" * 201, 3])
def test_actions_outside_the_space_are_refused(worlds, action):
    env = ImaginedTextEnv(worlds, [HALL])
    env.reset()
    with pytest.raises(ValueError, match="action"):
        env.step(action)


def test_starts_are_read_from_windows_and_a_bad_line_is_named(tmp_path):
    window = {"goal": "g", "history": [{"action": None, "observation": "o"}], "look": None, "inventory": None}
    path = tmp_path / "windows.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(window) + "\n").encode() * 2))
    assert read_starts(path, "observed") == [Start(Context("g", "o"))] * 2
    with pytest.raises(FormatError, match="line 1"):
        read_starts(path, "snapshot")
    with pytest.raises(FormatError, match=r"context: must be one of observed.*got .seen."):
        read_starts(path, "seen")
    with pytest.raises(FormatError, match="must be at least one"):
        ImaginedTextEnv(None, [])


def test_the_example_does_what_its_world_does_not_refuse(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.argv", ["agent_with_world.py"])
    runpy.run_path(str(root / "examples" / "agent_with_world.py"))
    *tried, done = capsys.readouterr().out.splitlines()
    assert tried[::2] == ["> pick up dragon", "> open door to kitchen"]
    assert done == "the agent does: open door to kitchen"
