"""Decoders of transformers as looped models: equal to the decoder of the same layers at one loop."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import loopwm
from data_prep.__main__ import main as prepare
from loopwm.core.exit_rules import Fixed
from loopwm.core.kv_cache import KVCache
from loopwm.records.episodes import write_episodes
from loopwm.records.template import SPECIAL_TOKENS, Context, Transition, clean, render_prompt
from loopwm.text.adopt import adopt, chosen_layers
from loopwm.text.adopt_command import main
from loopwm.text.export_command import main as export
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.world import WorldModel
from loopwm.training.__main__ import main as train
from loopwm.worlds.http import Client, HttpWorlds
from tests.fixtures.decoders import LLAMA3, TEXTS, YARN, save_decoder
from tests.fixtures.shards import toy_episode

SIZES = ["--prelude", "1", "--block", "2", "--coda", "1"]
LAYERS = [0, 2, 3, 5]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
}


@pytest.fixture(scope="module", params=KINDS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a decoder and of its looped model."""
    kind, changes = KINDS[request.param]
    folder = tmp_path_factory.mktemp("adopt")
    source = save_decoder(folder / "decoder", kind, **changes)
    assert main([str(source), "--out", str(folder / "runs" / "adopted"), *SIZES]) == 0
    return source, folder / "runs" / "adopted"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"), "qwen3", tie_word_embeddings=True)


def cut(source: Path, layers: list[int]) -> Any:
    """Return the decoder of some layers of a decoder."""
    decoder: Any = AutoModelForCausalLM.from_pretrained(source).eval()
    decoder.model.layers = torch.nn.ModuleList(decoder.model.layers[layer] for layer in layers)
    decoder.config.num_hidden_layers, decoder.config.use_cache = len(layers), False
    return decoder


def test_one_loop_equals_the_decoder_of_the_same_layers(folders):
    source, out = folders
    model, tokenizer = load_checkpoint(out)
    theirs = AutoTokenizer.from_pretrained(source)
    decoder = cut(source, LAYERS)
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        assert ids[0].tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            expected = decoder(ids).logits[..., : len(theirs)]
            logits = model(ids).logits[..., : len(theirs)]
            deeper = model(ids, depth=3).logits[..., : len(theirs)]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert not torch.allclose(deeper, expected, atol=1e-2)


@pytest.mark.parametrize("depth", [1, 3])
def test_cached_decoding_equals_uncached_forward(folders, depth):
    world_model = WorldModel(*load_checkpoint(folders[1]))
    context = Context("boil water", TEXTS[1], (Transition("open door", "the door is now open."),))
    world = world_model.advance(world_model.encode([context], depth), ["wait"])
    (decoded,) = world_model.decode_traced(world, 12)
    ids = world_model._ids(render_prompt(context, ["wait"], world_model.slots))
    generated = world_model.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, depth=depth)
    for _ in range(12):
        with torch.no_grad():
            logits = world_model.model(torch.tensor([ids]), depth=depth).logits[0, -1]
        if (token := int(logits.argmax())) == world_model._end:
            break
        ids.append(token)
    assert generated[0, : len(ids)].tolist() == ids
    start = len(world_model._ids(render_prompt(context, ["wait"], world_model.slots)))
    assert decoded.text == world_model.tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_cached_chunks_equal_one_pass_in_logits(folders):
    model, tokenizer = load_checkpoint(folders[1])
    ids = torch.tensor([tokenizer(TEXTS[1])["input_ids"]])
    cache, hidden = KVCache(1, ids.device), []
    with torch.no_grad():
        for part in ids.split([5, 1, ids.shape[1] - 6], dim=1):
            positions, mask = cache.extend(torch.ones_like(part).bool())
            out = model.model(part, mask, positions, cache, use_cache=True, depth=Fixed(2))
            hidden.append(out.last_hidden_state)
        logits = model.lm_head(torch.cat(hidden, 1))
        torch.testing.assert_close(logits, model(ids, depth=2).logits, atol=1e-4, rtol=0)


def test_adopted_folder_loads_as_our_checkpoints_do(folders):
    source, out = folders
    worlds = loopwm.load(out, "cpu")
    worlds.begin([Context("boil water", TEXTS[1])])
    assert len(worlds.step(["wait"])) == 1
    config = AutoConfig.from_pretrained(out)
    assert (config.model_type, config.default_depth, config.copy_attention) == ("loopwm", 1, False)
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == "LoopWMForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template
    assert tokenizer("".join(SPECIAL_TOKENS))["input_ids"] == [tokenizer.get_vocab()[mark] for mark in SPECIAL_TOKENS]
    assert len(AutoTokenizer.from_pretrained(source)) + len(SPECIAL_TOKENS) == len(tokenizer) == config.vocab_size


def test_marks_start_as_the_mean_of_their_words_tokens(qwen, tmp_path):
    adopt(qwen, tmp_path / "out", 1, 2, 1)
    model, tokenizer = load_checkpoint(tmp_path / "out")
    rows = model.lm_head.weight
    words = tokenizer("inv")["input_ids"]
    torch.testing.assert_close(rows[tokenizer.get_vocab()["<|inv|>"]], rows[words].mean(0))


def test_a_training_step_lowers_the_loss_on_its_batch(folders):
    model, tokenizer = load_checkpoint(folders[1])
    ids = torch.tensor([tokenizer(clean(TEXTS[1]))["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids, depth=2).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    assert model.model.core.injection.a.grad.abs().sum() > 0


def test_an_adopted_model_is_trained_and_exported(qwen, tmp_path, capsys):
    adopt(qwen, tmp_path / "adopted", 1, 2, 1)
    write_episodes(tmp_path / "episodes.jsonl", map(toy_episode, range(8)))
    tokenizer_file, shards = tmp_path / "adopted" / "tokenizer.json", tmp_path / "shards"
    command = ["tokenize", "--episodes", str(tmp_path / "episodes.jsonl"), "--tokenizer", str(tokenizer_file)]
    assert prepare([*command, "--out", str(shards)]) == 0
    weights, run = f"model.weights={tmp_path / 'adopted'}", tmp_path / "run"
    sizes = ["batch.rows=2", "batch.tokens=64", "batch.micro_batches=1", "data.trunk_tokens_min=64", "run.steps=2"]
    data = [f"data.train=[{shards}]", "data.dev=[]", "run.mixed_precision='no'"]
    assert train(["--config", "configs/text-from-pretrained.yaml", "--out", str(run), weights, *sizes, *data]) == 0
    assert export(["--checkpoint", str(run / "checkpoints" / "step-00000002"), "--out", str(tmp_path / "again")]) == 0
    model, tokenizer = load_checkpoint(run / "model")
    again, _ = load_checkpoint(tmp_path / "again")
    assert (model.config.default_depth, model.config.max_loops, again.config.default_depth) == (4, 8, 4)
    assert tokenizer.get_vocab() == load_tokenizer(tokenizer_file).get_vocab()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    start, _ = load_checkpoint(tmp_path / "adopted")
    assert not torch.equal(start.model.norm.weight, model.model.norm.weight)
    capsys.readouterr()
    frozen = ["model.preset=tiny", "model.overrides={prediction_heads: true}", *data]
    other = ["--config", "configs/text-from-pretrained.yaml", "--out", str(tmp_path / "other")]
    assert train([*other, weights, *frozen]) == 2
    assert "run's tokenizer" in capsys.readouterr().err


PAGE = Path("docs/pretrained.md")


@pytest.mark.slow
def test_commands_of_the_page_lead_to_a_served_model(tmp_path: Path) -> None:
    """From a folder of Qwen3's form to an evaluated and served world model, each command as the page prints it."""
    save_decoder(tmp_path / "Qwen3-0.6B", "qwen3", max_position_embeddings=4096)
    write_episodes(tmp_path / "train.jsonl", map(toy_episode, range(8)))
    write_episodes(tmp_path / "dev.jsonl", map(toy_episode, range(40, 44)))
    results = run_page(tmp_path, {"--prelude": "1", "--block": "2", "--coda": "1"})
    assert results["status"] == "ok"
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["rows"]
    model, _ = load_checkpoint(tmp_path / "run" / "model")
    assert (model.config.prelude_layers, model.config.block_layers, model.config.coda_layers) == (1, 2, 1)
    start, _ = load_checkpoint(tmp_path / "adopted")
    assert not torch.equal(start.model.norm.weight, model.model.norm.weight)


def run_page(folder: Path, layers: dict[str, str]) -> dict[str, Any]:
    """Run the page's commands with the files of a folder, few steps and windows; return the service's health."""
    lines = PAGE.read_text().split("```bash\n")[1].split("```")[0].splitlines()
    commands = [shlex.split(line) for line in lines]
    assert [command[1] for command in commands] == ["adopt", "tokenize", "tokenize", "train", "eval", "serve"]
    ours = {
        "Qwen3-0.6B": folder / "Qwen3-0.6B", "runs/adopted": folder / "adopted",
        "runs/adopted/tokenizer.json": folder / "adopted/tokenizer.json", "runs/pretrained": folder / "run",
        "data/episodes/train": folder / "train.jsonl", "data/episodes/dev": folder / "dev.jsonl",
        "data/shards/pretrained-train": folder / "shards-train", "data/shards/pretrained-dev": folder / "shards-dev",
        "runs/pretrained/model": folder / "run/model", "runs/eval/pretrained": folder / "eval",
    }  # fmt: skip
    small = ["batch.rows=2", "batch.tokens=64", "batch.micro_batches=1", "run.steps=2", "run.eval_batches=1"]
    small += ["data.trunk_tokens_min=64", f"data.train=[{folder / 'shards-train'}]"]
    small += [f"data.dev=[{folder / 'shards-dev'}]", f"model.weights={folder / 'adopted'}"]
    more = {"train": small, "eval": ["--limit", "1", "--horizons", "1"], "serve": ["--port", "0"]}
    for command in commands:
        words = [str(ours.get(word, word)) for word in command[1:]]
        for option, value in layers.items() if words[0] == "adopt" else ():
            words[words.index(option) + 1] = value
        program = [sys.executable, "-m", "loopwm", *words, *more.get(words[0], [])]
        if words[0] != "serve":
            subprocess.run(program, check=True)
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            client = Client(server.stdout.readline().split()[-1])
            worlds = HttpWorlds(client, client.model(), max_new_tokens=8)
            worlds.begin([Context("boil water", "This is the kitchen.")])
            (step,) = worlds.step(["go to hall"])
            assert step.observation is not None
            health: dict[str, Any] = httpx.get(f"{client.base}/health").json()
        finally:
            server.terminate()
    return health


def test_bfloat16_weights_stay_bfloat16(qwen, tmp_path):
    decoder = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    decoder.save_pretrained(tmp_path / "half")
    (tmp_path / "half" / "tokenizer.json").write_bytes((qwen / "tokenizer.json").read_bytes())
    adopt(tmp_path / "half", tmp_path / "out", 1, 2, 1)
    model, tokenizer = load_checkpoint(tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    decoder = cut(tmp_path / "half", LAYERS).float()
    with torch.no_grad():
        expected = decoder(ids).logits
        torch.testing.assert_close(model(ids).logits[..., :100], expected[..., :100], atol=5e-3, rtol=0)


def test_middle_layers_are_centred_between_the_ends():
    assert chosen_layers(6, 1, 2, 1) == LAYERS
    assert chosen_layers(7, 2, 2, 2) == [0, 1, 2, 3, 5, 6]
    assert chosen_layers(4, 0, 4, 0) == [0, 1, 2, 3]


def changed(folder: Path, file: str, **fields: Any) -> None:
    """Change fields of a JSON file."""
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "config.json: model_type: must be qwen3 or llama, got 'gpt2'"),
        ({"attention_bias": True}, "config.json: attention_bias: must be False, got True"),
        ({"mlp_bias": True}, "config.json: mlp_bias: must be False, got True"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act: must be silu, got 'gelu'"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window: must be False, got True"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type: must be one of"),
        ({"num_hidden_layers": 7, "layer_types": None}, "missing keys: model.layers.6"),
        ({"num_hidden_layers": 5, "layer_types": None}, "unexpected keys: model.layers.5"),
        ({"vocab_size": 100}, "mismatched keys"),
    ],
)
def test_a_decoder_that_our_layers_lack_is_refused(qwen, tmp_path, capsys, fields, message):
    for file in qwen.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    changed(tmp_path, "config.json", **fields)
    check_refused(tmp_path, tmp_path / "out" / "new", SIZES, message, capsys)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_file_is_refused_by_its_name(qwen, tmp_path, capsys, file):
    for one in qwen.iterdir():
        if one.name != file:
            (tmp_path / one.name).write_bytes(one.read_bytes())
    check_refused(tmp_path, tmp_path / "out" / "new", SIZES, file, capsys)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("3", "3", "1"), "--prelude, --block, --coda: must be 6 layers at most, got 3 + 3 + 1"),
        (("1", "0", "1"), "--prelude, --block, --coda: must be at least 0, 1, 0, got 1, 0, 1"),
        (("-1", "2", "1"), "must be at least 0, 1, 0, got -1, 2, 1"),
    ],
)
def test_numbers_of_layers_that_do_not_fit_are_refused(qwen, tmp_path, capsys, sizes, message):
    options = [f"--{part}={size}" for part, size in zip(("prelude", "block", "coda"), sizes, strict=True)]
    check_refused(qwen, tmp_path / "out" / "new", options, message, capsys)


def test_a_folder_that_exists_is_kept(qwen, tmp_path, capsys):
    (tmp_path / "note").write_text("mine")
    assert main([str(qwen), "--out", str(tmp_path), *SIZES]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "note").read_text() == "mine"


def check_refused(source: Path, out: Path, sizes: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([str(source), "--out", str(out), *sizes]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not out.parent.exists()
