"""The registered environments: whatever takes the steps together, an episode is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest

import loopwm.worlds.gym  # noqa: F401 - registers them
from loopwm.records.template import Context, FormatError
from loopwm.worlds.gym import ImaginedTextEnv
from loopwm.worlds.local import LocalWorlds
from loopwm.worlds.protocol import Imagined
from loopwm.worlds.starts import ALFWORLD, SCIENCEWORLD, Start, Starts, read_starts
from loopwm.worlds.vector import ImaginedVectorEnv

NAME = "loopwm/ScienceWorld-v0"


@pytest.fixture(scope="module")
def url(serving, world_model) -> Iterator[str]:
    with serving(world_model.model, end_token=world_model._end) as client:
        yield str(client.base_url)


@pytest.fixture(params=["service", "this process"])
def envs(request, url, world_model) -> ImaginedVectorEnv:
    starts = read_starts(SCIENCEWORLD, "observed")
    if request.param == "service":
        return gymnasium.make_vec(NAME, num_envs=3, url=url, max_steps=2, max_new_tokens=12)
    return ImaginedVectorEnv(LocalWorlds(world_model, max_new_tokens=12), starts, num_envs=3, max_steps=2)


def test_environments_are_what_each_is_alone_and_begin_anew_by_themselves(envs, world_model):
    seen, infos = envs.reset(seed=0, options={"task": "boil"})
    assert list(infos["task"]) == ["boil"] * 3
    boil = [start for start in read_starts(SCIENCEWORLD, "observed") if start.task == "boil"]
    starts = {(start.observation, start.context.goal): start for start in boil}
    actions = [["wait", "look around", "open door"], ["go", "wait", "wait"]]
    taken = [envs.step(each) for each in actions]
    for row in range(3):
        env = ImaginedTextEnv(
            LocalWorlds(world_model, max_new_tokens=12), [starts[seen[row], infos["goal"][row]]], max_steps=2
        )
        env.reset()
        for step, (observations, rewards, terminated, truncated, _) in enumerate(taken):
            alone = env.step(actions[step][row])
            assert (observations[row], rewards[row], terminated[row], truncated[row]) == alone[:4]
    assert taken[1][3].all()
    observations, rewards, *ends, infos = envs.step(["ignored"] * 3)
    assert set(zip(observations, infos["goal"], strict=True)) <= set(starts)
    assert not np.any([rewards, *ends])
    assert list(infos["task"]) == ["boil"] * 3
    with pytest.raises(ValueError, match=r"actions\[1\]"):
        envs.step(["wait", " ", "wait"])
    with pytest.raises(ValueError, match=r"no start of 'nope'"):
        envs.reset(options={"task": "nope"})
    infos = [envs.step(["wait"] * 3)[-1] for _ in range(3)][-1]  # the third begins anew, with the options before
    assert list(infos["task"]) == ["boil"] * 3
    envs.close()


@pytest.mark.parametrize(("seed", "seeds"), [(5, [5, 6, 7]), ([9, 4, 9], [9, 4, 9])])
def test_environments_start_by_their_own_seeds(envs, world_model, seed, seeds):
    env = ImaginedTextEnv(
        LocalWorlds(world_model, max_new_tokens=12), read_starts(SCIENCEWORLD, "observed"), max_steps=2
    )
    assert list(envs.reset(seed=seed)[0]) == [env.reset(seed=one)[0] for one in seeds]
    assert list(envs.reset(seed=[None, 4, None])[0][1:2]) == [env.reset(seed=4)[0]]
    with pytest.raises(ValueError, match="seed: must be 3"):
        envs.reset(seed=[1, 2])
    envs.close()


def test_one_environment_is_registered_too(url):
    env = gymnasium.make(NAME, url=url, model="tiny", disable_env_checker=True)
    observation, info = env.reset(seed=1)
    assert observation
    assert {"goal", "task", "family"} <= info.keys()
    env.close()


def test_each_world_has_an_environment_of_its_own_starts(url):
    for name, file, tasks in (("ScienceWorld", SCIENCEWORLD, 30), ("ALFWorld", ALFWORLD, 6)):
        starts = read_starts(file, "observed")
        goals = {start.context.goal for start in starts}
        assert len({start.task for start in starts}) == tasks
        one, many = (
            gymnasium.make(f"loopwm/{name}-v0", url=url, disable_env_checker=True),
            gymnasium.make_vec(f"loopwm/{name}-v0", num_envs=2, url=url),
        )
        assert {one.reset(seed=0)[1]["goal"], *many.reset(seed=0)[1]["goal"]} <= goals
        one.close()
        many.close()


def test_rows_of_this_process_go_on_while_others_begin_anew(world_model):
    first, second = (start.context for start in read_starts(SCIENCEWORLD, "observed")[:2])
    rows, alone = LocalWorlds(world_model, max_new_tokens=12), LocalWorlds(world_model, max_new_tokens=12)
    rows.begin([first, first])
    alone.begin([first])
    taken = [rows.step(["wait", "look around"], rows=[0, 1])[1]]
    rows.restart([0], [second])
    taken += rows.step(["inventory"], rows=[1])
    assert [alone.step([action], rows=[0])[0].observation for action in ("look around", "inventory")] == [
        one.observation for one in taken
    ]
    alone.begin([second])
    assert rows.step(["wait"], rows=[0])[0].observation == alone.step(["wait"], rows=[0])[0].observation


def test_a_world_of_this_process_without_room_is_full(world_model):
    rows = LocalWorlds(world_model, max_new_tokens=world_model.model.config.max_position_embeddings)
    rows.begin([start.context for start in read_starts(SCIENCEWORLD, "observed")[:1]])
    assert rows.step(["wait"], rows=[0]) == [Imagined("", finish="full")]


def test_a_step_before_the_first_reset_and_episodes_of_no_step_are_refused(url):
    with pytest.raises(ValueError, match="max_steps: must be above 0, got 0"):
        gymnasium.make_vec(NAME, num_envs=2, url=url, max_steps=0)
    envs = gymnasium.make_vec(NAME, num_envs=2, url=url)
    with pytest.raises(ValueError, match="step: must follow reset"):
        envs.step(["wait", "wait"])


def test_a_task_that_no_start_has_is_told_with_those_there_are():
    starts = Starts([Start(Context("goal", "seen"), "boil", "Matter"), Context("goal", "other")])
    random = np.random.default_rng(0)
    assert {starts.draw(random, {"family": "Matter"}).task for _ in range(9)} == {"boil"}
    with pytest.raises(FormatError, match="options: must be one of context, task, family, got 'tsk'"):
        starts.draw(random, {"tsk": "boil"})
    with pytest.raises(FormatError, match="task: no start of 'melt'; there are None, boil"):
        starts.draw(random, {"task": "melt"})
