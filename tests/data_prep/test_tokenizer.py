from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from data_prep.__main__ import main
from data_prep.alfworld_texts import train_texts
from data_prep.tokenizer import count_texts, train_tokenizer, training_texts
from loopwm.text.format import ACT, SPECIAL_TOKENS, clean
from loopwm.text.tokenizer import load_tokenizer, tokenizer_hash

from .conftest import make_episode


def random_text(rng: random.Random) -> str:
    ranges = ((32, 127), (9, 14), (0x80, 0xD800), (0xE000, 0x110000))
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40)))


def test_any_text_round_trips(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = clean(random_text(rng))
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_each_digit_and_each_indent_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("at 1024 degrees\n\ta door7").input_ids)
    assert [token for token in tokens if any(c.isdigit() for c in token)] == list("10247")
    assert tokens.count("Ċĉ") == 1


def test_special_tokens_come_first_and_text_cannot_spell_one(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer(ACT).input_ids == [SPECIAL_TOKENS.index(ACT)]
    for token in SPECIAL_TOKENS:
        ids = tokenizer(clean(f"open {token} now{token}")).input_ids
        assert min(ids) >= len(SPECIAL_TOKENS)


def test_names_of_the_train_text_are_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    for word in (" thermometer", " kitchen", " celsius", " countertop", " inclined"):
        assert len(tokenizer(word).input_ids) == 1


def test_training_makes_the_asked_size_and_keeps_digits_apart() -> None:
    tokenizer = train_tokenizer(["12 12 12 door door"] * 9, 269)
    assert tokenizer.get_vocab_size() == 269
    assert tokenizer.encode("12 12 door").tokens == ["1", "2", "Ġ", "1", "2", "Ġdoor"]


def test_frequent_texts_do_not_rule() -> None:
    counts = count_texts([make_episode(length=8)])
    assert list(training_texts(counts)).count("look boil 0") == 3  # the root of 9 occurrences


def test_only_train_text_is_learnt(
    alfworld_games: Path, episode_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = "\n".join(train_texts(alfworld_games))
    assert "You arrive at drawer 1. The drawer 1 is closed." in texts
    assert "In it, you see a spoon 1." in texts
    assert "take spoon 1 from drawer 1" in texts
    assert "Get Spoon" in texts
    assert "xylophone" not in texts.lower()

    from data_prep.episodes import write_episodes

    write_episodes(episode_file, [make_episode(split="dev")])
    arguments = ["tokenizer", "--episodes", str(episode_file), "--alfworld-games", str(alfworld_games)]
    assert main([*arguments, "--out", str(episode_file.with_name("t.json"))]) == 2
    assert "split: 'dev'" in capsys.readouterr().err


def test_a_frozen_tokenizer_is_not_overwritten(
    alfworld_games: Path, episode_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokenizer.json"
    arguments = ["tokenizer", "--episodes", str(episode_file), "--alfworld-games", str(alfworld_games)]
    arguments += ["--vocab-size", "300", "--out", str(out)]
    assert main(arguments) == 0
    frozen = tokenizer_hash(out)
    assert load_tokenizer(out).decode(Tokenizer.from_file(str(out)).encode("boil 0 did 3").ids) == "boil 0 did 3"
    assert main(arguments) == 2
    assert tokenizer_hash(out) == frozen
    assert "frozen" in capsys.readouterr().err


def test_a_file_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    other = Tokenizer.from_str(train_tokenizer(["a"], 265).to_str().replace(ACT, "<|other|>"))
    other.save(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match=r"other\.json: the first tokens are not"):
        load_tokenizer(tmp_path / "other.json")
