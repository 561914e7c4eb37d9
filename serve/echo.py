"""The reply to `echo` with `logprobs`: prompts, and how probable the model finds their tokens."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from serve.prompts import Prompt
from serve.requests import Finish
from serve.scores import TokenScores
from serve.service import Service

Json = dict[str, Any]


def echo_reply(
    service: Service, prompts: Sequence[Prompt], scores: Sequence[TokenScores], generated: int, top: int
) -> Json:
    """generated: 0, or 1 for the most probable next token behind each prompt. top: 1 for the best token at each place.

    As everywhere with OpenAI, the first token of a prompt has no score.
    """
    rows = list(zip(prompts, scores, strict=True))
    read, made = sum(len(prompt.ids) for prompt in prompts), generated * len(rows)
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.card.name,
        "choices": [_choice(service, index, *row, generated, top) for index, row in enumerate(rows)],
        "usage": {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made},
    }


def _choice(service: Service, index: int, prompt: Prompt, scores: TokenScores, generated: int, top: int) -> Json:
    ids = [*prompt.ids, *scores.best[-1:][:generated]]
    texts = service.token_texts(ids)
    best = service.single_texts(scores.best)
    ended = generated == 1 and service.ends(ids[-1])
    tops = [None, *({text: score} for text, score in zip(best, scores.best_scores, strict=True))]
    logprobs = {
        "tokens": texts,
        "token_logprobs": [None, *scores.chosen, *scores.best_scores[-1:][:generated]],
        "top_logprobs": tops[: len(ids)] if top else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
    }
    shown = texts[:-1] if ended else texts
    finish = Finish.STOP if ended else Finish.LENGTH
    return {"index": index, "text": "".join(shown), "logprobs": logprobs, "finish_reason": finish}
