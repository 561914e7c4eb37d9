"""Evaluation of vocabularies: tokens per text, and names spelled in two ways."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from lab.data.tokenizer_eval import Speller, measure, names_pattern
from loopwm.records.episodes import Episode, Step
from tests.lab.data.test_train_tokenizer import NAMES, built  # noqa: F401 - a fixture


def test_names_spelled_unlike_before_are_counted(built: Tokenizer) -> None:  # noqa: F811
    """Of five names seen before, one stands without a blank; a free BPE also hides names in phrases."""
    texts = (
        ("begin", "You see the fridge, a red wire and the pot."),
        ("move fridge to metal pot", "You move the fridge to the metal pot."),  # metal pot: seen in the action
        ("wait", "fridge is off. The red wire is off."),
        ("look", "You move the fridge."),
    )
    steps = [Step(None if i == 0 else action, seen, 0, False) for i, (action, seen) in enumerate(texts)]
    episode = Episode("scienceworld", "boil", 0, "dev", "gold", "boil water", tuple(steps))
    pattern = names_pattern([*NAMES, "pot", "wire"])
    totals = measure(Speller(built, pattern), [episode])
    assert totals.known == {False: 5, True: 4}
    assert totals.differing == {False: 2, True: 0}  # the fridge without a blank, and then the one with
    assert totals.transitions == 3
    assert totals.tokens["action"] == sum(len(built.encode(action).ids) for action, _ in texts[1:])

    free = Tokenizer(BPE())
    free.train_from_iterator([text for pair in texts for text in pair] * 3, BpeTrainer(show_progress=False))
    assert measure(Speller(free, pattern), [episode]).differing[True] > 0
