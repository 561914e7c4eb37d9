"""Decoding with drafts chooses what greedy decoding chooses, whatever the drafts are."""

from __future__ import annotations

import pytest
import torch

from loopwm.core.exit_rules import Fixed
from loopwm.text.drafts import Lookup, SharedText, as_text
from tests.text.test_decoding import DEPTH, LENGTH, ending, imagined  # noqa: F401 - a fixture


class Drafting(Lookup):
    """Drafts the given texts, one a pass."""

    def __init__(self, *texts: list[int]) -> None:
        super().__init__(SharedText(), "")
        self.texts, self.passes = list(texts), 0

    def draft(self, most: int) -> list[int]:
        self.passes += 1
        return self.texts.pop(0)[:most] if self.texts else []


def alone(ending, row):  # noqa: F811
    world = imagined(ending, [row])
    return ending.decode_traced(world, LENGTH, greedy=True)[0], [
        *ending._ids(ending.decode(world, LENGTH, greedy=True)[0])
    ]


@pytest.mark.parametrize("wrong", [None, 0, 1, 2], ids=lambda wrong: f"wrong at {wrong}")
def test_drafts_change_passes_and_not_texts(ending, wrong):  # noqa: F811
    known = [alone(ending, row) for row in (0, 1)]
    drafts = [[*tokens, ending._end, 1, 2] for _, tokens in known]
    if wrong is not None:
        for draft in drafts:
            draft[min(wrong, len(draft) - 1)] += 1
    lookups = [Drafting(draft) for draft in drafts]
    decoded = ending.decode_each([imagined(ending, [row]) for row in (0, 1)], lookups, LENGTH, greedy=True)
    assert decoded == [one for one, _ in known]
    for one, (greedy, _) in zip(decoded, known, strict=True):
        assert one.log_probability == pytest.approx(greedy.log_probability, abs=1e-4)
    assert {len(one.loops) for one in decoded} == {1, LENGTH}
    assert max(lookup.passes for lookup in lookups) == (1 if wrong is None else LENGTH - wrong)


def test_own_text_comes_first_and_the_longest_match():
    shared = SharedText()
    other = Lookup(shared, as_text([9, 8, 7, 1, 2, 3, 4, 5]))
    own = Lookup(shared, as_text([1, 2, 3, 6, 1, 2, 3]))
    assert own.draft(9) == [6, 1, 2, 3]
    assert own.draft(1) == [6]
    assert own.draft(0) == []
    other.share(8)
    assert own.draft(9) == [6, 1, 2, 3]
    own.extend([6, 9, 8, 7, 1, 2, 3])
    assert own.draft(9) == [4, 5]
    assert Lookup(shared, as_text([30])).draft(9) == []


def test_what_is_decoded_is_shared_with_what_it_is_found_by(ending):  # noqa: F811
    shared, start = SharedText(), list(range(40, 80))
    lookups = [Lookup(shared, as_text(start)) for _ in range(2)]
    ending.decode_each([imagined(ending, [1])], lookups[:1], LENGTH, greedy=True)
    tokens = alone(ending, 1)[1]
    assert shared.text == as_text([*start[-16:], *tokens])
    assert lookups[0]._own == as_text([*start, *tokens])
    assert lookups[1].draft(99) == tokens


def test_columns_of_wrong_drafts_leave_no_trace(world_model):
    states = [world_model.before_decoding(imagined(world_model, [0])) for _ in (0, 1)]
    rule = Fixed(DEPTH)
    with torch.inference_mode():
        once, _ = world_model._next_tokens(rule, states[:1], [[5]], 0, [0])
        kept = states[0].keep_newest([1], 1)
        both = states[1].whole()
        both = both.join(both.fork())
        twice, _ = world_model._next_tokens(rule, [both], [[5, 6, 7], [5, 8, 9]], 0, [0, 1])
        both = both.keep_newest([1, 3], 3)
        after_one, _ = world_model._next_tokens(rule, [kept], [[4]], 0, [0])
        after_both, _ = world_model._next_tokens(rule, [both], [[4], [4]], 0, [0, 1])
        plain = world_model.before_decoding(imagined(world_model, [0]))
        straight, _ = world_model._next_tokens(rule, [plain], [[5, 8, 9, 4]], 0, [0])
    assert torch.allclose(twice[0, 0], once[0, 0], atol=1e-4)
    assert torch.allclose(after_both[0, 0], after_one[0, 0], atol=1e-4)
    assert torch.allclose(after_both[1, 0], straight[0, 3], atol=1e-4)
    assert both.valid.sum(1).tolist()[1] - both.valid.sum(1).tolist()[0] == 2
