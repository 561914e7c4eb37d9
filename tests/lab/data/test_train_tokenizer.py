from __future__ import annotations

import random
import re
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_prep.environments.alfworld.games import load_package
from data_prep.environments.scienceworld.names import ENTITIES
from lab.__main__ import main
from lab.data.alfworld_texts import train_texts
from lab.data.train_tokenizer import TrainText, read_names
from lab.data.vocabulary import (
    integer_merges,
    name_words,
    phrase_merges,
    template_runs,
    whole_tokenizer,
    word_tokenizer,
)  # fmt: skip
from loopwm.records.episodes import Episode, Step, write_episodes
from loopwm.records.template import ACT, END, OBS, SPECIAL_TOKENS, clean
from loopwm.text.model.tokenizer import load_tokenizer, tokenizer_hash
from tests.fixtures.episodes import make_episode

NAMES = ("metal pot", "red wire", "unknown substance B", "fridge", "thermometer", "Thing")
SENTENCES = (
    "The {} is now connected to the {}.",
    "In it, you see: \n\ta {}\n\ta {} (containing {}, {})",
    "You move the {}  to the {}, which is turned off.",
    "The {} is {}% down the {}. The {} is off.",
)
TEMPLATE_WORDS = frozenset(re.findall("[A-Za-z]+", " ".join(SENTENCES)))


def sentences(rng: random.Random, count: int) -> list[str]:
    """Sentences of the template about names and numbers."""

    def thing(_: re.Match[str]) -> str:
        return rng.choice((*NAMES, str(rng.randrange(120))))

    return [re.sub(r"\{\}", thing, rng.choice(SENTENCES)) for _ in range(count)]


@pytest.fixture(scope="module")
def built() -> Tokenizer:
    """A vocabulary of all three parts, learnt from the sentences."""
    text = Counter(sentences(random.Random(1), 400))
    words = word_tokenizer(text.elements(), 500)
    merges = phrase_merges(template_runs(text.items(), words, name_words(NAMES)), 60)
    assert len(merges) > 20
    return whole_tokenizer(words, merges)


def random_text(rng: random.Random) -> str:
    ranges = ((32, 127), (9, 14), (0x80, 0xD800), (0xE000, 0x110000))
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))


def mixed_text(rng: random.Random) -> str:
    """Template words, names, words that begin like them, numbers, marks and white space, in any order."""
    words = [*sorted(TEMPLATE_WORDS), *" ".join(NAMES).split(), "thefridge", "isotope", "nowhere", "an", "pots", "é"]
    glue = (" ", " ", " ", " ", "", ", ", "  ", "\n\t", " \n", " (", "). ", "-", "% ", " is now ", "7", " 12 ", "2048")
    return "".join(rng.choice((rng.choice(words), rng.choice(glue))) for _ in range(30)).strip()


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """Token strings of a text between bars, in the letters of a byte-level vocabulary."""
    return "|".join(tokenizer.encode(text).tokens)


def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast, built: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(1000):
        text = clean(random_text(rng) + mixed_text(rng))
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert built.decode(built.encode(text).ids) == text


def test_special_tokens_come_first_and_text_cannot_spell_one(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer(ACT).input_ids == [SPECIAL_TOKENS.index(ACT)]
    for token in SPECIAL_TOKENS:
        ids = tokenizer(clean(f"open {token} now{token}")).input_ids
        assert min(ids) >= len(SPECIAL_TOKENS)


def test_names_of_the_train_text_are_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in (" thermometer", " kitchen", " celsius", " countertop", " inclined"):
        assert len(tokenizer(word).input_ids) == 1


def test_what_stands_around_a_word_that_is_not_the_templates_never_changes_its_tokens(built: Tokenizer) -> None:
    rng, found = random.Random(2), 0
    for _ in range(500):
        text = mixed_text(rng)
        encoding = built.encode(text)
        for word in re.finditer(r" ?[^\W\d_]+", text):
            if word[0].strip() in TEMPLATE_WORDS:
                continue
            found += 1
            inside = [
                token
                for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True)
                if start < word.end() and word.start() < end
            ]
            assert inside == built.encode(word[0]).tokens, (text, word[0])
    assert found > 1000


def test_template_words_and_marks_are_merged_with_each_other(built: Tokenizer) -> None:
    assert (
        spelled(built, "The fridge is now connected to the fridge.") == "The|Ġfridge|ĠisĠnowĠconnectedĠtoĠthe|Ġfridge|."
    )
    assert "%ĠdownĠthe" in built.encode("The thermometer is 12% down the red wire").tokens


def check_no_phrase_holds_a_name(vocabulary: Tokenizer, names: frozenset[str]) -> int:
    """Looks at each token that is more than a word with the blank before it; returns how many there are."""
    tokens = [vocabulary.decode([i]) for i in range(vocabulary.get_vocab_size())]
    phrases = [text for text in tokens if re.search("[A-Za-z]", text) and not re.fullmatch(r" ?[^\W\d_]+", text)]
    for phrase in phrases:
        for word in re.findall(r"[^\W\d_]+", phrase):
            assert word.lower() not in names, phrase
            assert len(word) > 1 or word in "aA", phrase
    return len(phrases)


def test_no_phrase_holds_a_word_of_a_name(tokenizer: PreTrainedTokenizerFast, built: Tokenizer) -> None:
    assert check_no_phrase_holds_a_name(built, name_words(NAMES)) > 20
    listed = read_names([ENTITIES])
    check_no_phrase_holds_a_name(tokenizer.backend_tokenizer, name_words(listed))


@pytest.mark.skipif(find_spec("alfworld") is None, reason="the extra 'alfworld' is not installed")
def test_no_phrase_holds_a_kind_of_thing_of_alfworld(tokenizer: PreTrainedTokenizerFast) -> None:
    kinds = {kind.lower() for holder, held in load_package().holds.items() for kind in (holder, *held)}
    check_no_phrase_holds_a_name(tokenizer.backend_tokenizer, name_words(kinds))


def test_the_integers_to_100_are_one_token_and_other_numbers_are_digits(built: Tokenizer) -> None:
    for n, blank in product(range(101), ("", " ")):
        assert len(built.encode(f"{blank}{n}").ids) == 1
        assert built.encode(f"x{blank}{n}.").tokens[-2] == f"{blank}{n}".replace(" ", "Ġ")
    for n in (101, 110, 1000, 1024, 10100, 12345):
        assert built.encode(str(n)).tokens == list(str(n))
        assert built.encode(f"a {n}").tokens == ["a", "Ġ", *str(n)]
    assert spelled(built, "007") == "0|0|7"
    assert spelled(built, "-12") == "-|12"
    assert spelled(built, "12.50") == "12|.|50"
    assert spelled(built, "0.05 100.5") == "0|.|0|5|Ġ100|.|5"
    assert spelled(built, "a12a3%") == "a|12|a|3|%"


def slow_phrase_merges(runs: dict[tuple[str, ...], int], limit: int) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Counts all pairs anew for each merge; of equal counts the pair whose parts are older."""
    texts = [([(piece,) for piece in run], count) for run, count in runs.items()]
    ages = {(piece,): i for i, piece in enumerate(sorted({piece for run in runs for piece in run}))}
    merges = []
    while len(merges) < limit:
        counts = Counter[tuple[tuple[str, ...], tuple[str, ...]]]()
        for parts, count in texts:
            for pair in pairwise(parts):
                counts[pair] += count
        best = max(counts, key=lambda pair: (counts[pair], -ages[pair[0]], -ages[pair[1]]), default=None)
        if best is None or counts[best] < 2:
            break
        merges.append(best)
        ages.setdefault(best[0] + best[1], len(ages))
        for parts, _ in texts:
            merged, i = [], 0
            while i < len(parts):
                both = tuple(parts[i : i + 2]) == best
                merged.append(best[0] + best[1] if both else parts[i])
                i += 2 if both else 1
            parts[:] = merged
    return merges


@pytest.mark.parametrize("seed", range(5))
def test_phrases_are_the_most_frequent_pairs(seed: int) -> None:
    rng = random.Random(seed)
    pieces = ["The", " is", " now", ",", " a", ".", " The"]
    runs = {tuple(rng.choices(pieces, k=rng.randrange(2, 7))): rng.randrange(1, 50) for _ in range(40)}
    assert phrase_merges(runs, 25) == slow_phrase_merges(runs, 25)


def test_names_numbers_signs_and_line_breaks_end_a_run() -> None:
    line = "You see the fridge, which is off. The 12 is\n\tnow-off to the plane B A"
    words = word_tokenizer([line] * 2, 400)
    expected = [("You", " see", " the"), (",", " which", " is", " off", ".", " The"), ("off", " to", " the")]
    assert template_runs([(line, 3)], words, name_words(["fridge", "plane"])) == dict.fromkeys(expected, 3)


def test_the_parts_make_the_asked_size() -> None:
    assert len({"".join(merge) for merge in integer_merges()}) == 192
    words = word_tokenizer(["12 12 12 door door"] * 9, 269)
    assert words.get_vocab_size() == 269
    assert words.encode("12 12 door").tokens == ["1", "2", "Ġ", "1", "2", "Ġdoor"]
    assert whole_tokenizer(words, []).get_vocab_size() == 269 + 192
    twice = [((" door",), (" door",)), ((" door", " door"), (" door",)), ((" door",), (" door", " door"))]
    assert sorted(whole_tokenizer(words, twice).get_vocab().values()) == list(range(269 + 194))


def test_frequent_lines_do_not_rule_and_each_kind_of_text_counts() -> None:
    text = TrainText()
    text.add_episode(make_episode(length=8, hidden_state="kept"))
    assert dict(text.weighted(["look"])) == {"look boil 0": 3}  # the root of 9 occurrences
    assert dict(text.weighted(["hidden_state"])) == {"kept": 1}


def test_lines_are_cut_where_no_token_reaches_over(built: Tokenizer) -> None:
    text = TrainText()
    rng = random.Random(4)
    shown = [f"{mixed_text(rng)}\n{mixed_text(rng)}\n\n\t{mixed_text(rng)}" for _ in range(50)]
    for observation in shown:
        text.add("observation", observation)
    mean = sum(len(built.encode(clean(observation)).ids) for observation in shown) / len(shown)
    assert text.tokens_per_text(built) == {"observation": pytest.approx(mean)}


def test_alfworlds_names_are_what_it_numbers(alfworld_games: Path) -> None:
    text = TrainText()
    text.add_games(alfworld_games)
    assert text.things == {"drawer", "spoon"}
    steps = (Step(None, "On the shelf 2, you see a cd 1.", 0, False), Step("take cd 1", "Pick 1 up.", 0, False))
    text.add_episode(Episode("alfworld", "pick", "built/pick-1-1", "built", "expert", "put a cd", steps))
    text.add_episode(Episode("scienceworld", "boil", 0, "train", "gold", "boil", (Step(None, "wait 1", 0, False),)))
    assert text.things == {"drawer", "spoon", "shelf", "cd"}


def test_only_train_text_is_learnt(
    alfworld_games: Path, episode_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = "\n".join(text for _, text in train_texts(alfworld_games))
    assert "You arrive at drawer 1. The drawer 1 is closed." in texts
    assert "In it, you see a spoon 1." in texts
    assert "take spoon 1 from drawer 1" in texts
    assert "Get Spoon" in texts
    assert "xylophone" not in texts.lower()

    write_episodes(episode_file, [make_episode(split="dev")])
    arguments = ["train-tokenizer", "--episodes", str(episode_file), "--alfworld-games", str(alfworld_games)]
    assert main([*arguments, "--out", str(episode_file.with_name("t.json"))]) == 2
    assert "split: must be train, got 'dev'" in capsys.readouterr().err


def test_a_tokenizer_is_the_same_bytes_twice_and_then_frozen(
    alfworld_games: Path, episode_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokenizer.json"
    arguments = ["train-tokenizer", "--episodes", str(episode_file), "--alfworld-games", str(alfworld_games)]
    (tmp_path / "names.txt").write_text("boil\nmelt\n")
    arguments += ["--word-entries", "400", "--vocab-size", "640", "--names", str(tmp_path / "names.txt")]
    assert main([*arguments, "--out", str(out)]) == 0
    assert main([*arguments, "--out", str(tmp_path / "again.json")]) == 0
    frozen = tokenizer_hash(out)
    names = frozenset(("boil", "melt", "drawer", "spoon"))
    assert check_no_phrase_holds_a_name(Tokenizer.from_file(str(out)), names) >= 5
    assert tokenizer_hash(tmp_path / "again.json") == frozen
    assert main([*arguments, "--out", str(out)]) == 2
    assert tokenizer_hash(out) == frozen
    assert "--force replaces it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--word-entries", "264"], "--word-entries: must be at least 265"),
        (["--word-entries", "300", "--vocab-size", "491"], "--vocab-size: must be at least 492"),
        (["--names", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_size_that_does_not_fit_or_a_missing_list_is_refused(
    option: list[str], message: str, episode_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-tokenizer", "--episodes", str(episode_file), "--alfworld-games", str(tmp_path)]
    assert main([*arguments, "--out", str(tmp_path / "t.json"), *option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_the_file_loads_like_any_other_and_keeps_its_ids(built: Tokenizer, tmp_path: Path) -> None:
    built.save(str(tmp_path / "built.json"))
    load_tokenizer(tmp_path / "built.json").save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert len(loaded) == built.get_vocab_size()
    rng = random.Random(5)
    for _ in range(100):
        text = f"{ACT}{clean(mixed_text(rng))}{OBS}{clean(mixed_text(rng))}{END}"
        assert loaded(text).input_ids == built.encode(text).ids
        assert loaded.decode(loaded(text).input_ids) == text


def test_a_file_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    other = Tokenizer.from_str(word_tokenizer(["a"], 265).to_str().replace(ACT, "<|other|>"))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"other\.json: must have the tokens"):
        load_tokenizer(tmp_path / "other.json")
