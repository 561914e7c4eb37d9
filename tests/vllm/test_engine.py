"""Worlds of a service over a real vLLM server keep the protocol's promises (`loopwm serve --engine`)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from loopwm.text.world import WorldModel
from loopwm.worlds.http import Client, HttpWorlds
from loopwm.worlds.local import LocalWorlds
from tests.fixtures.models import save_checkpoint
from tests.fixtures.service import Serving
from tests.vllm.servers import vllm_server
from tests.worlds.contract import (  # noqa: F401
    HALL,
    KITCHEN,
    TOKENS,
    MakeWorlds,
    close_to,
    test_a_fork_goes_its_own_way,
    test_a_fork_observes_from_the_last_real_step,
    test_a_text_that_is_cut_and_a_world_that_is_full_are_told,
    test_an_observation_over_the_limit_drops_the_oldest_steps,
    test_lists_of_another_length_and_rows_that_are_not_there_are_named,
    test_what_was_observed_takes_the_place_of_what_was_imagined,
    test_worlds_text_in_place_of_a_list_is_named,
    told,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def service(library: WorldModel, serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service over vLLM's server of the model with every head."""
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = save_checkpoint(folder / "tiny", library.model)
    length = library.model.config.max_position_embeddings
    with vllm_server(checkpoint, folder / "server.log", length) as url, serving(library.model, server=url) as client:
        yield client


@pytest.fixture
def make(service: httpx.Client) -> MakeWorlds:
    return lambda: HttpWorlds(Client(str(service.base_url)), "tiny", max_new_tokens=TOKENS)


def test_vllm_imagines_the_texts_and_trust_of_this_process(library: WorldModel, make: MakeWorlds) -> None:
    remote, local = make(), LocalWorlds(library, max_new_tokens=TOKENS)
    for worlds in (local, remote):
        worlds.begin([KITCHEN, HALL])
    for actions in (["wait", "look around"], ["open door", "go to hall"]):
        pairs = zip(remote.step(actions), local.step(actions), strict=True)
        for theirs, ours in pairs:
            assert (theirs.observation, theirs.finish) == (ours.observation, ours.finish)
            assert theirs.trust == (ours.trust and pytest.approx(ours.trust, rel=1e-2))


def test_vllm_service_streams_a_step_and_scores_a_prompt(service: httpx.Client) -> None:
    body = {"model": "tiny", "goal": KITCHEN.goal, "observation": KITCHEN.observation}
    world = service.post("/v1/worlds", json=body).json()["id"]
    step = {"actions": "wait", "stream": True, "max_tokens": TOKENS}
    lines = service.post(f"/v1/worlds/{world}/step", json=step).text.split("\n\n")
    assert len(lines) > TOKENS // 2
    prompt = {"model": "tiny", "prompt": "<|goal|>boil water", "echo": True, "max_tokens": 1, "logprobs": 3}
    (choice,) = service.post("/v1/completions", json=prompt).json()["choices"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(score < 0 for score in choice["logprobs"]["token_logprobs"][1:])


def test_vllm_cannot_plan_and_says_so(service: httpx.Client) -> None:
    body = {"model": "tiny", "goal": KITCHEN.goal, "observation": KITCHEN.observation}
    world = service.post("/v1/worlds", json=body).json()["id"]
    refused = service.post(f"/v1/worlds/{world}/plan", json={"candidates": [["wait"]]})
    assert refused.status_code == 501
    assert refused.json()["error"]["code"] == "engine_unsupported"
