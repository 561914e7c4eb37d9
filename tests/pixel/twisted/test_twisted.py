"""TWISTED's model: slots, positions, imagination, checkpoint; and its training through the front door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.program import PixelProgram
from loopwm.pixel.system import make_system
from loopwm.pixel.training_config import training_config
from loopwm.pixel.twisted.decoding import Centre, DecoderConfig
from loopwm.pixel.twisted.model import TokenBatch, Twisted, TwistedConfig
from loopwm.pixel.twisted.system import TwistedCoefficients, TwistedSampling, TwistedWorld
from loopwm.records.config import read_sections
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace
from loopwm.trainer.config import OptimizerConfig
from loopwm.trainer.optimizer import build_optimizers
from loopwm.training.__main__ import main as train
from tests.fixtures.blocks import COLUMNS, ROWS, SPACE, played

SMALL = TwistedConfig(codes=8, dim=32, heads=2, mlp_dim=64, default_depth=2, max_loops=4, window=4)


def argmax(p, previous, generator):
    return p.argmax(-1)


@pytest.fixture(scope="session")
def run(twisted_config, tmp_path_factory):
    """The folder of a finished training run."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert train(["--config", str(twisted_config), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def checkpoint(run):
    return load_checkpoint(run / "model")


def test_positions_are_the_papers():
    model = Twisted(SMALL, (2, 3), 4)
    found = model.positions(torch.tensor([5]), 2)[0]
    states = [(x, y) for y in range(2) for x in range(3)]
    for t, frame in enumerate(found.tolist(), start=5):
        assert frame[:-1] == [[x + t, y + t, 2 * t] for x, y in states]
        assert frame[-1] == [t, t, 2 * t + 1]


def test_rewards_are_told_apart_by_the_nearest_value():
    model = Twisted(SMALL, (2, 3), 4)
    assert model.reward_class(torch.tensor([-0.1, 0.1, 0.6, 1.0])).tolist() == [0, 0, 1, 1]


@torch.no_grad()
def test_equal_tokens_are_told_apart_by_a_learned_place():
    model = Twisted(SMALL, (2, 3), 4)
    slots = model.embed(torch.full((1, 6), 5), torch.tensor([2]))[0]
    for place, slot in enumerate(slots[:6]):
        assert torch.equal(slot, model.token_embedding.weight[5] + model.place_embedding.weight[place])
    assert torch.equal(slots[6], model.action_embedding.weight[2])


@torch.no_grad()
def test_the_loss_is_the_sum_of_three_cross_entropies():
    space = FrameSpace("six", "1", (2 * SMALL.patch[0], 3 * SMALL.patch[1], 3), 4)
    system = make_system("twisted", SMALL, TwistedCoefficients(reward_coef=3.0, done_coef=5.0), space)
    model, generator = system.network, torch.Generator().manual_seed(0)
    tokens, following = torch.randint(8, (2, 2, 3, 6), generator=generator)
    action, reward = torch.randint(4, (2, 3), generator=generator), torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    done, first = torch.tensor([[False, False, True], [False, True, False]]), torch.zeros(2, 3, dtype=torch.bool)
    batch = TokenBatch(tokens, following, action, reward, done, first)
    loss, _ = system.token_loss(batch, 2)
    logits, _ = model(tokens, action, first, 2)
    expected = 0.0
    for b, t in np.ndindex(2, 3):
        chances = logits.tokens[b, t].softmax(-1)
        expected -= sum(chances[i, following[b, t, i]].log().item() for i in range(6)) / 36
        expected -= 3 * logits.reward[b, t].softmax(-1)[int(reward[b, t])].log().item() / 6
        chance = logits.done[b, t].sigmoid()
        expected -= 5 * (chance if done[b, t] else 1 - chance).log().item() / 6
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_imagining_after_real_frames_equals_the_whole(checkpoint):
    """The logits of the step after T - 1 observed transitions are those of a pass over all T frames."""
    episode = played(1000)
    steps = 3
    obs = torch.from_numpy(episode.obs[:steps])[None]
    action = torch.from_numpy(episode.action[:steps])[None]
    first = torch.tensor([[True, False, False]])
    model, tokens = checkpoint.network, checkpoint.tokenizer.encode(obs)
    whole, _ = model(tokens, action, first, 2)
    logits, _ = model.step(model.observe(tokens, action[:, :-1], first, 2), action[:, -1], 2)
    assert torch.allclose(logits.tokens, whole.tokens[:, -1], atol=1e-4)
    assert torch.allclose(logits.reward, whole.reward[:, -1], atol=1e-4)
    assert torch.allclose(logits.done, whole.done[:, -1], atol=1e-4)


@torch.inference_mode()
def test_imagined_frames_are_placed_as_real_ones(checkpoint):
    """Two imagined frames, seen again as real ones, lead to the same prediction."""
    world, episode, chance = TwistedWorld(checkpoint, argmax), played(1000), torch.Generator()
    obs, action = torch.from_numpy(episode.obs[:2])[None], torch.from_numpy(episode.action[:4])[None]
    state = world.start(obs, action[:, :1], torch.tensor([[True, False]]), chance)
    for t in (1, 2):
        state = world.step(state, action[:, t], chance).state
        obs = torch.cat((obs, world.show(state)[:, None]), 1)
    again = world.start(obs, action[:, :3], torch.tensor([[True, False, False, False]]), chance)
    ours, theirs = (checkpoint.network.step(each, action[:, 3], 2)[0].tokens for each in (state, again))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_training_learns_the_blocks(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(r for r in order if r["kind"] == "train") for order in (records, records[::-1]))
    assert last["loss"] < first["loss"] / 3
    assert next(r for r in records if r["kind"] == "dev")["token_accuracy"] > 0.9


def test_an_interrupted_run_ends_as_the_whole_one(run, twisted_config, tmp_path):
    parts = tmp_path / "parts"
    shutil.copytree(run, parts)
    shutil.rmtree(parts / "model")
    shutil.rmtree(parts / "checkpoints" / "step-00000060")
    assert [path.name for path in (parts / "checkpoints").iterdir()] == ["step-00000040"]
    assert train(["--config", str(twisted_config), "--out", str(parts)]) == 0
    ours, theirs = (load_checkpoint(folder / "model").state_dict() for folder in (run, parts))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_world_imagines_frames_of_its_space(checkpoint):
    world, episode = TwistedWorld(checkpoint, argmax), played(1001)
    obs = torch.from_numpy(np.stack([episode.obs[:2]] * 3))
    generator = torch.Generator().manual_seed(0)
    state = world.start(
        obs, torch.from_numpy(episode.action[:1]).expand(3, 1), torch.tensor([[True, False]] * 3), generator
    )
    for _ in range(6):  # beyond the window of 4 frames
        imagined = world.step(state, torch.tensor([0, 1, 2]), generator)
        state = imagined.state
    assert world.show(state).shape == (3, *SPACE.frame_shape)
    assert world.show(state).dtype == torch.uint8
    assert set(imagined.reward.tolist()) <= {0.0, 1.0}


@torch.no_grad()
def test_rows_begun_anew_go_on_as_if_alone(checkpoint):
    """Whether what is begun anew has more frames behind it than the rest, or fewer."""
    world, generator = TwistedWorld(checkpoint, argmax), torch.Generator()

    def begun(seeds, steps):
        episodes = [played(seed, 40) for seed in seeds]
        obs = torch.from_numpy(np.stack([e.obs[:steps] for e in episodes]))
        action = torch.from_numpy(np.stack([e.action[: steps - 1] for e in episodes]))
        first = torch.zeros(len(seeds), steps, dtype=torch.bool)
        first[:, 0] = True
        return world.start(obs, action, first, generator)

    long_ones = [seed for seed in range(2000, 2200) if len(played(seed, 40)) >= 3][:4]
    for ours, theirs in ((2, 3), (3, 2), (1, 3), (3, 1)):
        state, fresh = begun(long_ones[:3], ours), begun(long_ones[3:], theirs)
        mixed = world.replace(state, torch.tensor([1]), fresh)
        action = torch.tensor([0, 2, 3])
        logits, _ = checkpoint.network.step(mixed, action, 2)
        alone, _ = checkpoint.network.step(fresh, action[1:2], 2)
        rest, _ = checkpoint.network.step(state, action, 2)
        assert torch.allclose(logits.tokens[1], alone.tokens[0], atol=1e-4)
        assert torch.allclose(logits.tokens[[0, 2]], rest.tokens[[0, 2]], atol=1e-4)


def test_codes_that_do_not_exist_are_never_imagined(checkpoint):
    p = checkpoint.probabilities(torch.zeros(1, 1, 8))
    assert checkpoint.tokenizer.size < 8
    assert torch.allclose(p.sum(-1), torch.ones(1, 1))
    assert p[..., checkpoint.tokenizer.size :].sum() == 0


def test_a_checkpoint_comes_back_as_it_was(checkpoint, tmp_path):
    save_checkpoint(checkpoint, tmp_path / "copy")
    again = load_checkpoint(tmp_path / "copy")
    assert again.space == SPACE
    assert again.config == checkpoint.config
    assert again.tokenizer.grid == (ROWS, COLUMNS)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), checkpoint.parameters(), strict=True))


@pytest.mark.parametrize("damage", ["missing", "foreign", "torn"])
def test_a_checkpoint_that_cannot_be_used_is_refused_in_one_line(checkpoint, tmp_path, damage):
    folder = tmp_path / "model"
    save_checkpoint(checkpoint, folder)
    if damage == "missing":
        (folder / "model.safetensors").unlink()
    elif damage == "foreign":
        (folder / "config.json").write_text('{"system": "storm"}')
    else:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(InputError, match=str(folder)) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.patch=[5, 2]", "model.patch: "),
        ("model.heads=3", "model.dim: must be divisible by heads (3), got 32"),
        ("model.heads=32", "model.dim: must give each of 32 heads an even width, got 32"),
        ("model.mu_rec=0", "model.mu_rec: must be at least 1, got 0"),
        ("model.block_layers=0", "model.block_layers: must be at least 1, got 0"),
        ("model.prelude_layers=-1", "model.prelude_layers: must be at least 0, got -1"),
        ("model.colour=3", "model.colour: unknown key"),
        ("data.train=/nowhere", "data.train: "),
        ("system=dreamer", "system: 'dreamer' is not one of"),
    ],
)
def test_bad_configuration_is_one_line_and_status_2(twisted_config, tmp_path, capsys, override, message):
    assert train(["--config", str(twisted_config), "--out", str(tmp_path / "run"), override]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: {message}")
    assert "\n" not in error
    assert not (tmp_path / "run").exists()


def test_a_run_that_starts_from_a_checkpoint_keeps_its_codes_in_their_order(twisted_config):
    program = PixelProgram(training_config(read_sections(twisted_config)))
    codes = program.state_dict()["codes"][::-1][:3]
    program.load_state_dict({"codes": codes})
    after = program.objective.prepared()["codes"].tolist()
    assert after[:3] == codes
    assert sorted(after) == sorted(PixelProgram(training_config(read_sections(twisted_config))).state_dict()["codes"])


def test_a_decoder_that_does_not_fit_the_grid_is_named(checkpoint):
    sampling = TwistedSampling(decoder=DecoderConfig("noised-transport"), centre=Centre(edge=3))
    with pytest.raises(InputError, match=r"sampling\.region: must leave part of"):
        checkpoint.world(sampling)


def test_muon_gets_the_matrices_of_the_layers_alone():
    model = Twisted(SMALL, (2, 3), 4)
    muon, adamw = build_optimizers(model, OptimizerConfig(name="muon"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert of_muon
    assert all(any(part in name for part in ("prelude", "block", "coda")) for name in of_muon)
    assert len(of_muon) + sum(len(group["params"]) for group in adamw.param_groups) == len(names)


def test_a_tiny_run_has_the_losses_and_imagines_the_frames_it_did(run, checkpoint):
    """Processors may differ in the last digits of losses."""
    stored = json.loads(Path(__file__).with_name("golden_twisted.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [record["loss"] for record in records if record["kind"] == "train"]
    assert found[::10] == pytest.approx(stored["loss"], rel=1e-3)
    world, generator, rng = TwistedWorld(checkpoint, argmax), torch.Generator(), np.random.default_rng(0)
    episode = next(e for e in (played(seed, 40) for seed in range(3000, 3100)) if len(e) >= 3)
    first = torch.tensor([[True, False, False]])
    seen = torch.from_numpy(episode.obs[:3])[None], torch.from_numpy(episode.action[:2])[None], first
    state, tokens = world.start(*seen, generator), []
    for _ in range(100):
        state = world.step(state, torch.from_numpy(rng.integers(4, size=1)), generator).state
        tokens.append("".join(map(str, state.tokens[0].tolist())))
    assert tokens == stored["tokens"]
