"""What is recalled from recorded episodes, and when it replaces what was decoded."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier, BrokenBarrierError

import pytest

from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition
from loopwm.text.decoding import DOUBTFUL, MemoryText
from loopwm.text.drafts import Lookup, SharedText
from loopwm.text.memory import MOST_ACTIONS, Index, Memory, Question, describe, retell
from loopwm.text.world import tokens_per_byte
from loopwm.worlds.local import LocalWorlds
from tests.fixtures.windows import episode
from tests.text.test_decoding import EMPTY_OR_FULL, Toy

KITCHEN = Context("", "Start.", (Transition("go to kitchen", "A stove."),))


@pytest.fixture
def memory(tmp_path) -> Memory:
    path = tmp_path / "train.jsonl"
    path.write_text(
        episode(("go to kitchen", "A stove."), ("take red pan", "You take the red pan."), ("wait", "Time passes."))
        + episode(("go to bathroom", "A bath."), ("take soap", "It is slippery."), ("open door", "It opens."))
    )
    return Memory.load([path])


def test_the_most_similar_step_of_the_verb_answers_in_the_words_of_the_action(memory):
    assert memory.recall(KITCHEN, ["take blue pan"]) == "You take the blue pan."
    assert memory.recall(Context("", "A bath."), ["take soap"]) == "It is slippery."
    assert memory.recall(KITCHEN, ["take red pan", "wait"]) == "Time passes."
    assert memory.recall(KITCHEN, ["sing"]) is None
    assert memory.recall(KITCHEN, []) is None
    assert memory.recall(KITCHEN, ["wait"] * (MOST_ACTIONS + 1)) is None


def test_questions_at_once_build_one_index(memory, monkeypatch):
    both, built = Barrier(2), []

    def build(*arguments):
        built.append(arguments)
        with contextlib.suppress(BrokenBarrierError):
            both.wait(0.2)  # another one that builds
        return Index(*arguments)

    monkeypatch.setattr("loopwm.text.memory.Index", build)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: memory.recall(KITCHEN, ["take blue pan"]), range(2)))
    assert answers == ["You take the blue pan."] * 2
    assert len(built) == 1


def after(*steps: tuple[str, str]) -> Context:
    return Context("", "Start.", tuple(Transition(*step) for step in steps))


def test_what_the_action_brought_after_the_same_observation_comes_first(memory):
    again = after(("go to kitchen", "A stove."), ("take red pan", "It is hot."), ("wait", "A stove."))
    assert memory.recall(again, ["take red pan"]) == "It is hot."
    assert memory.recall(again, ["take red pan", "wait"]) == "Time passes."
    later = after(("wait", "A stove."), ("take red pan", "It is hot."), ("wait", "A stove."), ("take red pan", "Cold."))
    last = Context("", "Start.", (*later.history, Transition("wait", "A stove.")))
    assert memory.recall(last, ["take red pan"]) == "Cold."
    elsewhere = after(("wait", "A stove."), ("take red pan", "It is hot."), ("go to hall", "A hall."))
    assert memory.recall(elsewhere, ["take red pan"]) == "You take the red pan."


def test_what_the_action_brought_twice_alike_comes_first(memory):
    twice = after(("take red pan", "It is hot."), ("wait", "Ok."), ("take red pan", "It is hot."), ("go", "A hall."))
    assert memory.recall(twice, ["wait", "take red pan"]) == "It is hot."
    changed = after(("take red pan", "Warm."), ("wait", "Ok."), ("take red pan", "It is hot."), ("go", "A hall."))
    assert memory.recall(changed, ["wait", "take red pan"]) == "You take the red pan."


def test_verbs_that_mostly_bring_the_same_do_so_here(tmp_path):
    """`read` repeats its answer in 2 of 3 cases, `look` in 1 of 2."""
    path = tmp_path / "train.jsonl"
    reads = [("read map", text) for text in ("old", "old", "old", "new")]
    path.write_text(episode(*reads, ("look", "a"), ("look", "a"), ("look", "b")))
    memory = Memory.load([path])
    seen = after(("read map", "mine"), ("look", "here"), ("wait", "Ok."))
    assert memory.recall(seen, ["read map"]) == "mine"
    assert memory.recall(seen, ["look"]) in ("a", "b")


@pytest.fixture
def maze(tmp_path) -> Memory:
    """Episodes that go east and back west four times, up and down, which mostly leads elsewhere, and read."""
    path = tmp_path / "maze.jsonl"
    there_and_back = [("east", "Hall\nA door."), ("west", "Start.\nNothing.")] * 4
    stairs = [("up", "Loft"), ("down", "Cellar")] * 4
    stairs += [(action, f"{action} {number}") for number in range(6) for action in ("up", "down")]
    reading = [("wait", "Cellar"), ("read", "Once upon a time."), ("look", "Cellar")] * 4
    path.write_text(episode(*there_and_back, *stairs, *reading))
    return Memory.load([path])


def test_action_that_leads_back_brings_what_the_place_showed_last(maze):
    context = after(("east", "Barn\nA cow."), ("wait", "Moo."), ("look", "Barn\nAn ox."), ("east", "Field\nHay."))
    assert maze.recall(context, ["west"]) == "Barn\nAn ox."
    assert maze.recall(context, ["wait", "west", "wait", "west"]) == "Start."
    assert maze.recall(context, ["west", "west", "east", "east"]) == "Field\nHay."
    assert maze.recall(context, ["west", "west", "west"]) == "Start.\nNothing."  # unknown here: as recorded
    assert maze.recall(after(("up", "Roof")), ["down"]) != "Start."
    read = after(("read", "A poem."), ("east", "Hall\nA dog."), ("read", "A poem."))
    assert maze.recall(read, ["west"]) == "Start."  # reading leads nowhere
    refused = after(("east", "Start."), ("wait", "Ok."))
    assert maze.recall(refused, ["west"]) == "Start.\nNothing."


def test_ways_and_places_of_a_context_are_those_of_a_plain_map(maze):
    """Against a map kept by coordinates, on random walks over a line of rooms."""
    for seed in range(30):
        random = Random(seed)
        at, seen, steps = 0, {0: "Start."}, []
        for _ in range(random.randint(1, 8)):
            action = random.choice(["east", "west", "wait"])
            at += {"east": 1, "west": -1, "wait": 0}[action]
            place = f"Room {at}" if at else "Start."
            text = "Ok." if action == "wait" else f"{place}\n{random.random()}"
            if action != "wait":
                seen[at] = text
            steps.append((action, text))
        for action, step in (("east", 1), ("west", -1)):
            if at + step in seen:
                assert maze.recall(after(*steps), ["wait", action]) == seen[at + step]


@pytest.mark.parametrize(
    ("answer", "action", "asked", "told"),
    [
        (
            "You put the red pan in the box.",
            "put red pan in box",
            "put blue cup in box",
            "You put the blue cup in the box.",
        ),
        ("A pan, pans, a stew-pan.", "take pan", "take cup", "A cup, pans, a stew-pan."),
        ("Taken: pan.", "take pan", "take pan from stove", "Taken: pan."),  # nothing stands in the place of the rest
        ("red blue", "mix red blue", "mix blue red", "red blue"),
    ],
)
def test_words_in_the_place_of_the_actions_are_replaced(answer, action, asked, told):
    assert retell(answer, action, asked) == told


def test_similarity_is_bm25_written_out(memory):
    index = Index(memory._episodes, 1)
    documents = [describe(place.episode.goal, place.history, place.actions) for place in index.places]
    question = Question.of(KITCHEN, ["take pan"])
    expected = [0.0] * len(documents)
    for term in describe(question.goal, question.history, question.actions):
        holding = sum(term in document for document in documents)
        idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
        for number, document in enumerate(documents):
            expected[number] += idf * document.count(term) / (document.count(term) + 1.5)
    assert index.scores(question).tolist() == pytest.approx(expected, rel=1e-4)


def test_episodes_of_other_splits_and_none_are_one_line(tmp_path):
    (tmp_path / "test.jsonl").write_text(episode(("wait", "Ok."), split="test"))
    with pytest.raises(InputError, match=r"--memory: .*test\.jsonl: line 1: split: must be train, got 'test'"):
        Memory.load([tmp_path / "test.jsonl"])
    (tmp_path / "logs.jsonl").write_text('{"goal": "g", "steps": []}\n')
    with pytest.raises(InputError, match=r"logs\.jsonl: line 1: env: missing \(loopwm import makes episodes of logs\)"):
        Memory.load([tmp_path / "logs.jsonl"])
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(InputError, match="--memory: must hold an episode, got none"):
        Memory.load([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("below", "recalled", "tokens"), [(0.31, (1, 5), (1, 5)), (0.29, (1, 5), (2,)), (0, (3,), (3,))]
)
def test_a_recalled_text_replaces_a_doubtful_or_less_probable_one(below, recalled, tokens):
    """The decoded text has a probability of 0.3 and the recalled one 0.175; the last has 0.25 against 0.21."""
    three = {(): {1: 0.4, 2: 0.35, 3: 0.25}, (1,): {5: 0.5, 6: 0.5}, (2,): {7: 0.6, 8: 0.4}}
    probabilities = three if recalled == (3,) else EMPTY_OR_FULL
    assert decoded(MemoryText(recalled, math.log(below) if below else -math.inf), probabilities).tokens == tokens


def decoded(recalled: MemoryText, probabilities=EMPTY_OR_FULL, **limits: int):
    toy = Toy(probabilities)
    decoder = toy.decoder(**limits)
    (text,) = decoder.likelier(toy.fresh, [Lookup(SharedText(), "")], [recalled])
    return text


def test_a_recalled_text_has_its_scores_and_loops():
    text = decoded(MemoryText((1, 5), math.inf))
    assert text.ended
    assert text.loops == (1, 1, 1)
    assert text.scores == pytest.approx((math.log(0.7), math.log(0.25), 0.0))


def test_a_recalled_text_beyond_the_limit_is_not_taken():
    assert decoded(MemoryText((1, 5), math.inf), max_new_tokens=1).tokens != (1, 5)


def test_a_recalled_text_replaces_one_that_was_cut():
    endless = {(1,) * n: {1: 1.0} for n in range(9)} | {(1, 1): {1: 0.999, 3: 0.001}}
    toy = Toy(endless)
    (text,) = toy.decoder(max_new_tokens=4).likelier(
        toy.fresh, [Lookup(SharedText(), "")], [MemoryText((1, 1, 3), -math.inf)]
    )
    assert text.tokens == (1, 1, 3)


def test_what_a_foreign_memory_tells_is_taken_and_others_are_weighed(library, memory, monkeypatch):
    monkeypatch.setattr(library.model.config, "tokens_per_byte", 1e9)
    assert library.doubt(memory) == math.log(DOUBTFUL)
    monkeypatch.setattr(library.model.config, "tokens_per_byte", 0.0)
    assert library.doubt(memory) == math.inf
    assert library.memory_text("Ok.", math.inf) == (tuple(library._ids("Ok.")), math.inf)
    worlds = LocalWorlds(library, max_new_tokens=12, memory=memory)
    worlds.begin([KITCHEN])
    for each in (worlds, worlds.fork([0]), worlds.fresh()):
        each.begin([KITCHEN])
        assert each.step(["take blue pan"])[0].observation == "You take the blue pan."


def test_memory_of_which_less_than_half_is_foreign_is_weighed(library, tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(episode(("wait", "Ok."), goal=goal) for goal in ("boil water", "boil water", "Æ" * 40)))
    ratio = tokens_per_byte(library.tokenizer, "boil water", "Start.")
    monkeypatch.setattr(library.model.config, "tokens_per_byte", ratio)
    assert [library.is_foreign(*start) for start in Memory.load([path]).starts] == [False, False, True]
    assert library.doubt(Memory.load([path])) == math.log(DOUBTFUL)


def test_actions_since_the_last_real_step_are_what_is_recalled_by(library, memory, monkeypatch):
    monkeypatch.setattr(library.model.config, "tokens_per_byte", 0.0)
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(memory, "recall", lambda context, actions: asked.append((context, [*actions])))
    worlds = LocalWorlds(library, max_new_tokens=4, memory=memory)
    worlds.begin([KITCHEN])
    worlds.step(["wait"], decode=False)
    worlds.fork([0]).step(["look"])
    worlds.observe(["open door"], ["It opens."])
    worlds.step(["wait"])
    worlds.restart([0], [KITCHEN])
    worlds.step(["look"])
    assert [actions for _, actions in asked] == [["wait", "look"], ["wait"], ["look"]]
    assert asked[1][0].history[-1] == Transition("open door", "It opens.")
