"""Keys and values that are kept: which are found, which go, and how they are counted."""

from __future__ import annotations

import torch

from loopwm.core.kv_cache import SLACK, KVCache, allocated_bytes
from serve.engine.prefix_cache import BLOCK, PrefixCache
from tests.fixtures.engine import random_prompt


def state_of(length: int) -> KVCache:
    made = KVCache(1, torch.device("cpu"))
    made.extend(torch.ones(1, length, dtype=torch.bool))
    made.update(torch.zeros(1, 1, length, 256), torch.zeros(1, 1, length, 256), 0)
    return made


def test_the_cache_finds_the_longest_beginning_of_the_same_depth():
    cache = PrefixCache(1 << 40)
    prompt = random_prompt(2 * BLOCK + 5, 1)
    cache.put_prompt(prompt, 2, state_of(len(prompt)))
    cache.put_prompt(random_prompt(BLOCK - 1, 3), 2, state_of(BLOCK - 1))
    assert cache.get_prompt((*prompt, 1), 2).length == len(prompt)
    assert cache.get_prompt((*prompt[:-2], 1, 1, 1), 2).length == len(prompt) - 2
    assert cache.get_prompt(prompt[:20], 2).length == 20
    assert cache.get_prompt(prompt[: BLOCK - 1], 2) is None
    assert cache.get_prompt((*prompt, 1), 3) is None, "keys and values of another depth are other ones"
    assert len(cache) == 1, "what is too short is not worth it"


def test_the_cache_keeps_what_it_has_when_a_copy_grows():
    cache, prompt = PrefixCache(1 << 40), random_prompt(BLOCK, 1)
    cache.put_prompt(prompt, 2, state_of(BLOCK))
    copy = cache.get_prompt(prompt, 2)
    assert copy is not None
    copy.extend(torch.ones(1, 1, dtype=torch.bool))
    copy.update(torch.zeros(1, 1, 1, 256), torch.zeros(1, 1, 1, 256), 0)
    assert (copy.length, cache.get((2, prompt)).length) == (BLOCK + 1, BLOCK)


def test_an_evicted_prompt_does_not_hide_a_shorter_one():
    cache, prompt = PrefixCache(1 << 40), random_prompt(3 * BLOCK, 1)
    cache.put_prompt(prompt, 2, state_of(3 * BLOCK))
    cache.drop((2, prompt))
    cache.put_prompt(prompt[: 2 * BLOCK], 2, state_of(2 * BLOCK))
    assert cache.get_prompt(prompt, 2).length == 2 * BLOCK


def test_the_cache_lets_go_what_was_not_used_for_the_longest_time():
    prompts = [random_prompt(1024, seed) for seed in range(3)]
    held = state_of(64)  # not the cache's, so that the whole budget can never be free
    size = allocated_bytes()
    first = state_of(1024)
    size = allocated_bytes() - size
    assert size == 2 * 1024 * 256 * 4
    cache = PrefixCache(allocated_bytes() + size + size // 2)
    cache.put_prompt(prompts[0], 2, first)
    del first
    cache.put_prompt(prompts[1], 2, state_of(1024))
    assert cache.get_prompt(prompts[0], 2) is not None
    cache.put_prompt(prompts[2], 2, state_of(1024))
    assert cache.get_prompt(prompts[1], 2) is None
    assert cache.get_prompt(prompts[0], 2) is not None
    assert cache.get_prompt(prompts[2], 2) is not None
    assert not cache.make_room(cache.max_bytes + 1)
    assert len(cache) == 2, "what can never fit evicts nothing"
    assert not cache.make_room(cache.max_bytes)
    assert len(cache) == 0
    del held


def test_memory_that_forks_share_counts_once_and_goes_with_the_last_of_them():
    before = allocated_bytes()
    state = state_of(64)
    one = allocated_bytes() - before
    forks = [state.fork() for _ in range(5)]
    assert allocated_bytes() - before == one > 0
    for fork in forks[:2]:
        fork.extend(torch.ones(1, 1, dtype=torch.bool))
        fork.update(torch.zeros(1, 1, 1, 256), torch.zeros(1, 1, 1, 256), 0)
    assert allocated_bytes() - before == one + 2 * 2 * 4 * 256 * (65 + SLACK), "room for more is counted, too"
    del state, forks, fork
    assert allocated_bytes() == before
