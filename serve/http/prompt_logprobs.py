"""The reply to `echo` with `logprobs`: prompts, and how probable the model finds their tokens."""

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
    """generated: 0, or 1 for the most probable next token behind each prompt, which took `loops`. top: how many of the
    best tokens to tell at each place, None for no scores. As everywhere with OpenAI, the first token has no score.
    """
    rows = list(zip(prompts, scores, strict=True))
    read, made = sum(len(prompt.ids) for prompt in prompts), generated * len(rows)
    return {
        **envelope("cmpl", "text_completion", service.card.name),
        "choices": [_choice(service, index, *row, generated, top) for index, row in enumerate(rows)],
        "usage": usage(read, made, [loops] * made),
    }


def _choice(service: Service, index: int, prompt: Prompt, scores: TokenScores, generated: int, top: int | None) -> Json:
    token, score = scores.next
    texts = service.token_texts([*prompt.ids, *[token][:generated]])
    chosen = [*scores.chosen, *[score][:generated]]
    logprobs = None if top is None else _logprobs(service, texts, chosen, [some[:top] for some in scores.tops])
    ended = generated == 1 and service.ends(token)
    shown = texts[:-1] if ended else texts
    finish = Finish.STOP if ended else Finish.LENGTH
    return {"index": index, "text": "".join(shown), "logprobs": logprobs, "finish_reason": finish}


def _logprobs(
    service: Service, texts: Sequence[str], chosen: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]]
) -> Json:
    told = top_texts(service, tops[: len(chosen)])
    return {
        "tokens": texts,
        "token_logprobs": [None, *chosen],
        "top_logprobs": told and [None, *told],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
    }
