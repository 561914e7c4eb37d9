"""Reply to `echo` with `logprobs`: prompts with the log-probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from serve.generation.prompts import Prompt
from serve.generation.service import Service, TokenScores
from serve.generation.streams import Finish
from serve.http.replies import Json, envelope, top_texts, usage


def echo_reply(
    service: Service,
    prompts: Sequence[Prompt],
    scores: Sequence[TokenScores],
    *,
    generated: int,
    top: int | None,
    loops: int,
) -> Json:
    """Create the reply. As with OpenAI, the first token has no log-probability.

    generated: 0, or 1 for the most probable token after each prompt.
    top: alternatives per token; None for no scores.
    loops: of the generated token.
    """
    rows = list(zip(prompts, scores, strict=True))
    num_prompt, num_generated = sum(len(prompt.ids) for prompt in prompts), generated * len(rows)
    return {
        **envelope("cmpl", "text_completion", service.card.name),
        "choices": [_choice(service, index, *row, generated, top) for index, row in enumerate(rows)],
        "usage": usage(num_prompt, num_generated, [loops] * num_generated),
    }


def _choice(service: Service, index: int, prompt: Prompt, scores: TokenScores, generated: int, top: int | None) -> Json:
    token, score = scores.next
    texts = service.token_texts([*prompt.ids, *[token][:generated]])
    chosen = [*scores.chosen, *[score][:generated]]
    logprobs = None if top is None else _logprobs(service, texts, chosen, [best[:top] for best in scores.tops])
    ended = generated == 1 and token == service.engine.end_token
    visible = texts[:-1] if ended else texts
    finish = Finish.STOP if ended else Finish.LENGTH
    return {"index": index, "text": "".join(visible), "logprobs": logprobs, "finish_reason": finish}


def _logprobs(
    service: Service, texts: Sequence[str], chosen: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]
) -> Json:
    alternatives = top_texts(service, tops[: len(chosen)])
    return {
        "tokens": texts,
        "token_logprobs": [None, *chosen],
        "top_logprobs": alternatives and [None, *alternatives],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
    }
