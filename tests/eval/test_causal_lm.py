"""A general language model of a folder, with tiny random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from eval.__main__ import main
from eval.models.causal_lm import CausalLMPredictor
from eval.models.fewshot import Shots, as_text, load_shots, read_continuation
from eval.scores.predictions import read_records
from loopwm.records.errors import InputError
from loopwm.records.template import window_context
from loopwm.records.windows import Window
from tests.fixtures.windows import MakeWindow, WriteSuite

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def save_model(folder: Path, chat_template: str | None = None, positions: int = 4096) -> Path:
    """A byte-level GPT-2 of two narrow layers."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=chat_template)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=positions, n_embd=16, n_layer=2, n_head=2, eos_token_id=256)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.models.causal_lm.MAX_NEW_TOKENS", 6)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture
def windows(make_window: MakeWindow) -> list[Window]:
    long = [(None, "Start."), *[("look around", f"a table and {n} chairs.") for n in range(9)]]
    return [make_window("short"), make_window("long", long), make_window("other", goal="Find a plant.")]


def no_shots(windows: list[Window]) -> Shots:
    return load_shots(windows, None, 0, "observed", [1])


def greedy(folder: Path, prompt: str) -> str:
    """One token at a time without a cache."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
    start = tokens.shape[1]
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return read_continuation(tokenizer.decode(tokens[0, start:], skip_special_tokens=True))


def test_a_batch_is_decoded_as_each_prompt_alone(folder: Path, windows: list[Window]) -> None:
    shots = no_shots(windows)
    predictions = CausalLMPredictor(folder, shots).predict(windows, "observed", [1, 3])
    for window, prediction in zip(windows, predictions, strict=True):
        context = window_context(window, "observed")
        for k in (1, 3):
            prompt = as_text(shots.messages(window, context, "observed", k))
            assert prediction.texts[k] == greedy(folder, prompt)


def test_a_chat_template_makes_the_prompt_where_there_is_one(windows: list[Window], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "chat", TEMPLATE)
    shots = load_shots(windows, None, 1, "observed", [1])
    texts = CausalLMPredictor(folder, shots).predict(windows[:1], "observed", [1])[0].texts
    messages = shots.messages(windows[0], window_context(windows[0], "observed"), "observed", 1)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    prompt = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
    assert texts[1] == greedy(folder, prompt)


def test_the_oldest_history_goes_first_and_is_counted(windows: list[Window], tmp_path: Path) -> None:
    shots = no_shots(windows)
    lengths = [len(as_text(shots.messages(w, window_context(w, "observed"), "observed", 1))) for w in windows]
    folder = save_model(tmp_path / "narrow", positions=lengths[1] - 60 + 6)
    predictions = CausalLMPredictor(folder, shots).predict(windows, "observed", [1])
    assert [prediction.steps_cut for prediction in predictions] == [0, 2, 0]  # a step is about 54 characters


def test_a_prompt_that_cannot_fit_names_the_window(windows: list[Window], tmp_path: Path) -> None:
    folder = save_model(tmp_path / "narrow", positions=200)
    with pytest.raises(InputError, match=r"window short: .*--shots"):
        CausalLMPredictor(folder, no_shots(windows)).predict(windows, "observed", [1])


def test_a_folder_is_run_from_the_command_line(
    folder: Path, windows: list[Window], write_suite: WriteSuite, tmp_path: Path
) -> None:
    options = ["run", "--model", str(folder), "--suite", str(write_suite(windows)), "--context", "snapshot"]
    assert main([*options, "--shots", "1", "--horizons", "1,2", "--out", str(tmp_path / "out")]) == 0
    assert len(read_records(tmp_path / "out" / "predictions.jsonl")) == 6


def test_a_folder_without_weights_is_one_line(
    folder: Path, windows: list[Window], write_suite: WriteSuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((folder / name).read_bytes())
    options = ["run", "--model", str(broken), "--suite", str(write_suite(windows)), "--context", "observed"]
    assert main([*options, "--out", str(tmp_path / "out")]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: --model: ")
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
