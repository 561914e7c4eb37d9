from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.__main__ import main
from data_prep.environments import declared
from data_prep.tokenize import TOKENIZER_FILE, LineEncoder, encode_episode
from loopwm.records.episodes import Episode, Step, read_episodes, write_episodes
from loopwm.records.shards import PARTS, check_shards, read_shards
from loopwm.records.template import clean
from loopwm.records.token_episode import ACTION, ANSWER, GOAL, HIDDEN, INVENTORY, LOOK, OBSERVATION, QUERY
from loopwm.records.training_episodes import episode_hash
from loopwm.text.model.tokenizer import tokenizer_hash
from tests.fixtures.episodes import make_episode
from tests.fixtures.rows import texts_of
from tests.fixtures.shards import toy_episode

FIELDS = {LOOK: "look", INVENTORY: "inventory", OBSERVATION: "observation", ACTION: "action"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes in several shards, made on two processes; `episodes.jsonl` beside them."""
    folder = tmp_path_factory.mktemp("shards")
    steps = [Step(None, "o", 0, False)]
    steps += [Step("wait", f"o{i}", 0, False, hidden_state=f"hidden {i}" if i % 2 == 0 else None) for i in range(1, 6)]
    bare = Episode("alfworld", "pick", "game-1", "train", "expert", "goal <|act|>", tuple(steps), "it is hidden")
    write_episodes(folder / "episodes.jsonl", [*(make_episode(variation=v) for v in range(6)), bare])
    arguments = ["tokenize", "--episodes", str(folder / "episodes.jsonl"), "--out", str(folder / "out")]
    assert main([*arguments, "--workers", "2", "--shard-tokens", "300"]) == 0
    return folder / "out"


def _load(folder: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    arrays = {part: np.load(folder / f"{name}.{part}.npy", mmap_mode="r") for part in (*PARTS, "offsets")}
    return arrays, json.loads((folder / f"{name}.episodes.json").read_text())


def _bounds(arrays: dict[str, Any]) -> tuple[Any, Any]:
    """First span and step of each episode, and of the one after it."""
    return arrays["offsets"][:-1], arrays["offsets"][1:]


def _texts(episode: Episode) -> list[tuple[int, int, str]]:
    texts = [(GOAL, 0, episode.goal)]
    for i, step in enumerate(episode.steps):
        hidden = episode.hidden_state if i == 0 else step.hidden_state
        texts += [] if hidden is None else [(HIDDEN, i, hidden)]
        values = ((kind, i, getattr(step, field)) for kind, field in FIELDS.items())
        texts += [(kind, i, text) for kind, i, text in values if text is not None]
        if step.look is not None and step.inventory is not None:
            for action, answer in declared(episode.env).state_queries(step.look, step.inventory):
                texts += [(QUERY, i, action), (ANSWER, i, answer)]
    return texts


def test_spans_hold_every_text_in_order(shards: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    episodes = iter(read_episodes(shards.parent / "episodes.jsonl"))
    index = check_shards(shards, tokenizer_hash())
    assert len(index["shards"]) > 1
    for shard in index["shards"]:
        arrays, metas = _load(shards, shard["name"])
        assert arrays["tokens"].dtype == np.uint16
        for meta, (span, step, _), (next_span, next_step, _) in zip(metas, *_bounds(arrays), strict=True):
            episode = next(episodes)
            fields = {k: getattr(episode, k) for k in ("env", "task", "variation", "split", "policy")}
            assert meta == {**fields, "hash": episode_hash(episode)}
            found = [
                (s["kind"], s["step"], tokenizer.decode(arrays["tokens"][s["start"] :][: s["length"]]))
                for s in arrays["spans"][span:next_span]
            ]
            assert found == [(kind, i, clean(text)) for kind, i, text in _texts(episode)]
            rewards = [0.0, *(b.score - a.score for a, b in pairwise(episode.steps))]
            assert arrays["steps"]["reward"][step:next_step].tolist() == rewards
            assert arrays["steps"]["done"][step:next_step].tolist() == [s.done for s in episode.steps]
    assert next(episodes, None) is None


def test_training_reads_hidden_states_where_they_were_sampled(shards: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    *without, game = read_shards(shards, tokenizer_hash())
    texts = [None if hidden is None else tokenizer.decode(hidden) for hidden in texts_of(game, HIDDEN)]
    assert texts == ["it is hidden", None, "hidden 2", None, "hidden 4", None]
    assert all(texts_of(episode, HIDDEN) == [None] * 9 for episode in without)


def test_facts_of_texts_are_read_back_from_any_shard(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    steps = [Step(None, "A room.", 0, False)]
    steps += [Step(f"go to desk {i}", f"On the desk {i}, you see a pen {i}.", 0, False) for i in (1, 2, 1)]
    first = Episode("alfworld", "pick", "game-0", "train", "expert", "goal", tuple(steps))
    write_episodes(tmp_path / "e.jsonl", [replace(first, variation=f"game-{i}") for i in range(4)])
    arguments = ["tokenize", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--shard-tokens", "50"]) == 0
    assert len(check_shards(tmp_path / "out", tokenizer_hash())["shards"]) == 2
    for episode in read_shards(tmp_path / "out", tokenizer_hash()):
        facts = [episode.facts_of(OBSERVATION, i) for i in range(4)]
        assert [list(of_text.shown) for of_text in facts] == [[], [0], [1], [0]]
        for i, number in enumerate((1, 2, 1), start=1):
            (((start, length), (fact,)),) = facts[i].needs
            text = tokenizer.decode(episode.observations[i][start : start + length])
            assert (text, fact) == (f", you see a pen {number}.", number - 1)


def test_the_first_step_has_no_reward(tmp_path: Path) -> None:
    steps = tuple(Step(action, "A room.", score, False) for action, score in ((None, 30), ("wait", 30), ("go", 45)))
    write_episodes(tmp_path / "e.jsonl", [Episode("scienceworld", "boil", 0, "train", "gold", "goal", steps)])
    assert main(["tokenize", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(tmp_path / "out")]) == 0
    (episode,) = read_shards(tmp_path / "out", tokenizer_hash())
    assert episode.steps["reward"].tolist() == [0, 0, 15]


def test_an_action_is_accepted_unless_its_observation_refuses_it() -> None:
    steps = list(make_episode(length=3).steps)
    steps[2] = replace(steps[2], observation="No known action matches that input.")
    episode, encoder = (
        replace(make_episode(), steps=tuple(steps)),
        LineEncoder(Tokenizer.from_file(str(TOKENIZER_FILE))),
    )
    arrays = encode_episode(encoder, episode)
    assert arrays.steps["accepted"].tolist() == [True, True, False, True]


def test_state_queries_scienceworld_answers_squeezed(shards: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first = next(read_shards(shards, tokenizer_hash()))
    episode = next(iter(read_episodes(shards.parent / "episodes.jsonl")))
    pairs = [(tokenizer.decode(action), tokenizer.decode(answer)) for action, answer in first.queries_at(3)]
    step = episode.steps[3]
    assert pairs == [("look around", clean(step.look or "")), ("inventory", clean(step.inventory or ""))]
    assert declared("scienceworld").state_queries("a  b", "c   d") == (("look around", "a b"), ("inventory", "c d"))


def test_line_encoder_equals_whole_texts() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    texts = ["a table. \n\ta cup \n\tb\n\nYou also see:\n\tA door", "a\n\tb\nc", " 12\n 100 degrees", "", "\n"]
    expected = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    encoder = LineEncoder(tokenizer)
    assert encoder.encode(texts) == expected
    for text in texts:
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
        assert encoder.token_ends(text) == [end for _, end in encoding.offsets]
    assert encoder.encode(texts[::-1]) == expected[::-1]


def test_line_encoder_joined_breaks_equals_whole_texts() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "a table.\n\ta cup"
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    encoder = LineEncoder(tokenizer)
    assert encoder.encode([text, text]) == [encoding.ids] * 2
    assert encoder.token_ends(text) == [end for _, end in encoding.offsets]


def test_tokens_of_a_large_vocabulary_keep_their_ids() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.add_tokens([f"#{i}" for i in range(1 << 16)])
    episode = replace(toy_episode(0), goal="#65535")
    arrays = encode_episode(LineEncoder(tokenizer), episode)
    assert arrays.tokens.dtype == np.uint32
    assert arrays.tokens.max() == tokenizer.get_vocab_size() - 1
    assert encode_episode(LineEncoder(Tokenizer.from_file(str(TOKENIZER_FILE))), episode).tokens.dtype == np.uint16


def test_state_queries_alfworld_splits_place_and_views() -> None:
    look = "You are facing the shelf 1. Next to it, you see nothing.\nOn the shelf 1, you see a mug 2."
    assert declared("alfworld").state_queries(look, "You are not carrying anything.") == (
        ("look", "You are facing the shelf 1. Next to it, you see nothing."),
        ("inventory", "You are not carrying anything."),
        ("examine shelf 1", "On the shelf 1, you see a mug 2."),
    )
    start = "You are in the middle of a room. Looking quickly around you, you see a bed 1, and a desk 2."
    action, answer = declared("alfworld").state_queries(start, "")[0]
    assert (action, answer) == ("look", "You are in the middle of a room. Looking quickly around you, you see nothing.")


def test_a_repeated_text_is_stored_once(shards: Path) -> None:
    arrays, _ = _load(shards, "00000")
    end = arrays["offsets"][1][0]
    spans = arrays["spans"][:end]
    assert len({int(s["start"]) for s in spans if s["kind"] == LOOK}) == 1
    assert spans["length"].sum() > (spans["start"] + spans["length"]).max()


def test_index_counts_what_is_there(shards: Path) -> None:
    index = json.loads((shards / "index.json").read_text())
    assert index["counts"] == {"alfworld/train/expert": 1, "scienceworld/train/gold": 6}
    assert index["episodes"] == 7
    assert len(index["shards"]) > 1
    assert all(shard["tokens"] >= 300 for shard in index["shards"][:-1])
    assert index["tokens"] == sum(len(_load(shards, s["name"])[0]["tokens"]) for s in index["shards"])


def _flip_a_byte(folder: Path) -> None:
    path = folder / "00001.tokens.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _set(field: str, value: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").write_text(json.dumps({**index, field: value}))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_a_byte, "00001.tokens.npy: contents differ"),
        (lambda folder: (folder / "00000.spans.npy").unlink(), "00000.spans.npy: missing"),
        (lambda folder: (folder / "00000.steps.npy").write_bytes(b""), "00000.steps.npy: 0 bytes"),
        (lambda folder: (folder / "index.json").unlink(), "index.json: missing"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json: not an index"),
        (_set("tokenizer_hash", "0" * 64), "tokenizer_hash: made with another tokenizer"),
        (_set("format", "loopwm-shards-v4"), "format: 'loopwm-shards-v4', expected 'loopwm-shards-v5': tokenize"),
    ],
)
def test_damaged_shards_are_named_in_one_line(
    shards: Path, tmp_path: Path, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in shards.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert main(["tokenize", "--check", "--out", str(folder)]) == 0
    damage(folder)
    capsys.readouterr()
    assert main(["tokenize", "--check", "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_episodes_leave_no_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"env": "scienceworld"}\n')
    arguments = ["tokenize", "--episodes", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "bad.jsonl: line 1: task: missing" in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (1, "episodes.jsonl: line 1: steps[1].observation: must be valid Unicode, got a lone surrogate"),
        (0, "--episodes: must contain an episode, got none"),
    ],
)
def test_tokenize_surrogate_or_no_episode_is_one_line(tmp_path, capsys, lines, fault):
    steps = [{"action": None, "observation": "a", "score": 0, "done": False}]
    steps.append({**steps[0], "action": "x", "observation": "\ud800"})
    episode = {
        "env": "shop",
        "task": "t",
        "variation": 1,
        "split": "train",
        "policy": "logs",
        "goal": "g",
        "steps": steps,
    }
    file = tmp_path / "episodes.jsonl"
    file.write_text((json.dumps(episode) + "\n") * lines)
    assert main(["tokenize", "--episodes", str(file), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(fault)


def test_logs_of_one_seed_may_begin_in_any_way(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl", [make_episode(policy="logs"), make_episode(policy="logs", goal="Another.")])
    arguments = ["tokenize", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0


@pytest.mark.parametrize("field", ["goal", "steps[0].observation"])
def test_an_episode_of_another_world_is_named(tmp_path: Path, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    good, other = make_episode(), make_episode(variation=1)
    mixed = replace(good, goal=other.goal) if field == "goal" else replace(good, steps=other.steps)
    write_episodes(tmp_path / "e.jsonl", [good, other, mixed, make_episode(policy="noisy-expert")])
    arguments = ["tokenize", "--episodes", str(tmp_path / "e.jsonl"), "--out", str(tmp_path / "out")]
    problem = f"e.jsonl: line 3: {field}: boil, variation 0, began otherwise in an earlier episode"
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out" / "index.json").exists()
