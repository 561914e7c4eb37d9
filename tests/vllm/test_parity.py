"""Decoding through vLLM equals Hugging Face decoding: the same weights, the same modelling file, another engine.

vLLM needs a virtual environment of its own; `make test-vllm` makes one and runs this file in it.

Decoding is what must be compared. Loops that share one set of keys and values still give right log-probabilities of
a prompt, where each loop attends to what it has just computed, and go wrong from the first cached token on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from openai.types import Completion

from loopwm.records.template import chat_to_prompt, render_prompt
from loopwm.text.model.chat_template import chat_template
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
from tests.vllm.servers import MODEL, vllm_server

pytestmark = pytest.mark.vllm

DEPTH = 3
NEW_TOKENS = 32
CONTEXT = 512
PROMPT_LENGTHS = (33, 40, 64, 97, 150)
"""All above 32 tokens; the last is longer than vLLM's cache block of 128."""


@dataclass(frozen=True)
class Decoded:
    """Greedy tokens of a prompt, and the log-probabilities of its tokens after the first."""

    tokens: list[int]
    prompt_logprobs: torch.Tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose loops all matter, and the frozen tokenizer."""
    path = tmp_path_factory.mktemp("vllm") / MODEL
    tokenizer = load_tokenizer()
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "default_depth": DEPTH, "max_loops": DEPTH + 2}
    settings: dict[str, Any] = PRESETS["tiny"] | sizes
    model = LoopWMForCausalLM(LoopWMConfig(**settings))
    _randomise(model)
    tokenizer.chat_template = chat_template(model.config.slots)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@torch.no_grad()
def _randomise(model: LoopWMForCausalLM) -> None:
    """Moves every parameter off its initial value, where a layer is the identity and the copy gate is neutral.

    Larger query and key norms make attention pick single positions: the continuation then follows the context
    instead of circling through a few tokens.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.mul_(3.0)
        spread = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.2
        parameter.add_(torch.randn_like(parameter) * spread)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Random tokens. With this seed the two best logits differ by 2e-3 or more at every step, so that rounding, about
    1e-5 between engines, decides nothing.
    """
    generator = torch.Generator().manual_seed(10)
    vocabulary = len(load_tokenizer())
    return [torch.randint(9, vocabulary, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> dict[int, list[Decoded]]:
    """What Hugging Face gives, by depth."""
    return {depth: _decode_hugging_face(checkpoint, prompts, depth) for depth in (1, DEPTH)}


@torch.no_grad()
def _decode_hugging_face(checkpoint: Path, prompts: list[list[int]], depth: int) -> list[Decoded]:
    model = LoopWMForCausalLM.from_pretrained(checkpoint, default_depth=depth).eval()
    model.generation_config.eos_token_id = None  # as `ignore_eos` below
    decoded = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        decoded.append(Decoded(new[0, len(prompt) :].tolist(), logprobs.gather(1, ids[0, 1:, None])[:, 0]))
    return decoded


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def client(checkpoint: Path, log: Path) -> Iterator[OpenAI]:
    """vLLM's server at the depth in the checkpoint."""
    with _server(checkpoint, log) as client:
        yield client


@contextmanager
def _server(checkpoint: Path, log: Path, **overrides: int) -> Iterator[OpenAI]:
    with vllm_server(checkpoint, log, CONTEXT, **overrides) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _decode_vllm(client: OpenAI, prompts: list[list[int]]) -> list[Decoded]:
    """All prompts in one request, which vLLM decodes as one batch."""
    completion: Completion = client.completions.create(
        model=MODEL,
        prompt=prompts,
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 0},
    )
    return [Decoded(choice.token_ids, _logprobs(choice.prompt_logprobs)) for choice in completion.choices]  # type: ignore[attr-defined]


def _logprobs(positions: list[dict[str, dict[str, float]] | None]) -> torch.Tensor:
    """One candidate a position, the prompt's own token; none at the first position."""
    return torch.tensor([next(iter(candidates.values()))["logprob"] for candidates in positions[1:] if candidates])


def _tokens(decoded: list[Decoded]) -> list[list[int]]:
    return [row.tokens for row in decoded]


def test_random_model_decodes_something_that_depends_on_depth(expected: dict[int, list[Decoded]]) -> None:
    for shallow, deep in zip(expected[1], expected[DEPTH], strict=True):
        assert shallow.tokens != deep.tokens
        assert len(set(deep.tokens)) > NEW_TOKENS // 8


def test_batched_greedy_tokens_and_prompt_logprobs_equal_hugging_face(
    client: OpenAI, prompts: list[list[int]], expected: dict[int, list[Decoded]]
) -> None:
    decoded = _decode_vllm(client, prompts)
    assert _tokens(decoded) == _tokens(expected[DEPTH])
    for ours, reference in zip(decoded, expected[DEPTH], strict=True):
        torch.testing.assert_close(ours.prompt_logprobs, reference.prompt_logprobs, atol=1e-4, rtol=0)


def test_single_greedy_tokens_equal_hugging_face(
    client: OpenAI, prompts: list[list[int]], expected: dict[int, list[Decoded]]
) -> None:
    decoded = [_decode_vllm(client, [prompt])[0] for prompt in prompts]
    assert _tokens(decoded) == _tokens(expected[DEPTH])


def test_chat_equals_completion_of_the_services_prompt(client: OpenAI) -> None:
    chat = [("system", "boil water"), ("assistant", "A kitchen."), ("user", "open oven"), ("user", "wait")]
    messages: Any = [{"role": role, "content": text} for role, text in chat]
    settings: Any = {"model": MODEL, "max_tokens": NEW_TOKENS, "temperature": 0}
    prompt = render_prompt(*chat_to_prompt(chat))
    text = client.completions.create(prompt=prompt, **settings).choices[0].text
    assert client.chat.completions.create(messages=messages, **settings).choices[0].message.content == text


def test_depth_given_at_start_up_is_that_of_decoding_and_cache(
    checkpoint: Path, log: Path, client: OpenAI, tmp_path: Path, prompts: list[list[int]],
    expected: dict[int, list[Decoded]],
) -> None:  # fmt: skip
    client.models.list()  # the other server has started
    with _server(checkpoint, tmp_path / "server.log", default_depth=1) as shallow:
        assert _tokens(_decode_vllm(shallow, prompts)) == _tokens(expected[1])
    # A layer before and after the loop, copy attention, and a layer in each loop.
    slots = {loops: 3 + loops for loops in (1, DEPTH)}
    more = _cached_tokens(tmp_path / "server.log") / _cached_tokens(log)
    assert more == pytest.approx(slots[DEPTH] / slots[1], rel=0.01)


def _cached_tokens(log: Path) -> int:
    """Return the tokens that the memory of a server's keys and values has room for."""
    found = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
    assert found is not None
    return int(found[1].replace(",", ""))
