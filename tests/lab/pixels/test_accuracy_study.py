"""Accuracy of next frames: what is counted, and the study through the front door."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.__main__ import main as evaluate
from lab.pixels import accuracy_study
from lab.pixels.accuracy import Hits, accuracy, held_out, permuted_actions, score
from lab.pixels.accuracy_protocol import AccuracyProtocol
from lab.pixels.accuracy_study import HeldOutFacts, _differences
from lab.pixels.decoders import Argmax, Copy, StudyDecoderConfig
from lab.studies.study_protocol import Arm
from lab.studies.training_runs import make_run
from loopwm.pixel.checkpoint import load_checkpoint, save_checkpoint
from loopwm.pixel.replay import Replay
from loopwm.pixel.system import make_system
from loopwm.pixel.twisted.model import TwistedConfig
from loopwm.pixel.twisted.system import TwistedCoefficients
from loopwm.records.errors import InputError
from loopwm.records.frames import FrameSpace, episode_files, read_episode
from tests.fixtures.blocks import PATCH, SPACE

CONFIG = TwistedConfig(codes=8, dim=32, heads=2, mlp_dim=64, default_depth=2, max_loops=4, patch=(PATCH, PATCH))
EVERYWHERE = torch.ones(12, dtype=torch.bool)


@pytest.fixture(scope="module")
def checkpoint(frames):
    """A model that was not trained, with the codebook of the train frames."""
    torch.manual_seed(0)
    system = make_system("twisted", CONFIG, TwistedCoefficients(), SPACE)
    system.prepare(torch.from_numpy(episode.obs) for episode in Replay.from_folder(frames / "train").episodes())
    return system.eval()


def test_held_out_runs_are_the_play_in_order(frames, checkpoint):
    data = held_out(frames / "test", checkpoint, 5, 20)
    assert data.batch.tokens.shape == (4, 5, 12)
    episodes = [read_episode(path) for path in episode_files(frames / "test")]
    action = np.concatenate([episode.action for episode in episodes])[:20]
    creature = np.concatenate([episode.extras["creature"][:-1] for episode in episodes])[:20]
    assert data.batch.action.flatten().tolist() == action.tolist()
    assert data.creature.flatten().tolist() == creature.tolist()
    lengths = [len(episode) for episode in episodes]
    assert data.episode.tolist() == np.repeat(np.arange(len(lengths)) + 1, lengths)[:20].tolist()
    starts = np.cumsum([0, *lengths])
    assert data.batch.first.flatten().nonzero()[:, 0].tolist() == [start for start in starts if start < 20]
    shown = checkpoint.tokenizer.decode(data.batch.next_tokens.flatten(0, 1))
    truth = np.concatenate([episode.obs[1:] for episode in episodes])[:20]
    assert (shown.numpy() == truth).all()


def test_a_frame_is_right_where_every_token_is_and_its_centre_where_every_token_of_it_is(frames, checkpoint):
    data = held_out(frames / "test", checkpoint, 5, 20)
    centre = torch.zeros(12, dtype=torch.bool)
    centre[11] = True  # where the second block rests
    hits = score(checkpoint, data, {"copy": Copy(), "argmax": Argmax()}, centre, 0)
    same = data.batch.tokens == data.batch.next_tokens
    assert hits["copy"].frame.tolist() == same.all(-1).flatten().tolist()
    assert hits["copy"].centre.tolist() == same[..., 11].flatten().tolist()
    assert hits["copy"].centre.mean() > hits["copy"].frame.mean()


def test_accuracy_is_told_with_and_without_creatures():
    found = accuracy(np.array([True, False, True, True]), np.array([[True, True], [False, False]]))
    assert (found.n, found.all, found.with_creatures, found.without_creatures) == (4, 0.75, 0.5, 1.0)
    assert np.isnan(accuracy(np.array([True]), np.array([[True]])).without_creatures)


def test_bounds_of_a_difference_are_over_episodes_whose_transitions_are_alike():
    """Forty transitions of one outcome each, in four episodes: drawn one by one they would look like forty facts."""
    episode = np.repeat(np.arange(4), 10)
    ours, theirs = (np.isin(episode, better) for better in ((0, 1, 2), (3,)))
    asked = HeldOutFacts(creature=np.zeros(40, dtype=bool), episode=episode)
    sides = ([Hits(side, side)] for side in (ours, theirs))
    difference = _differences(("ours", "theirs"), *sides, asked)[0]
    assert (difference.difference, difference.creatures) == (0.5, "all")
    assert difference.low <= -0.5  # three of four draws may be of the episode where theirs is right
    assert not difference.counts


def test_permuted_actions_are_the_same_ones_elsewhere(frames, checkpoint):
    data = held_out(frames / "test", checkpoint, 5, 20)
    other = permuted_actions(data, 0)
    assert sorted(other.batch.action.flatten().tolist()) == sorted(data.batch.action.flatten().tolist())
    assert not torch.equal(other.batch.action, data.batch.action)
    assert torch.equal(other.batch.tokens, data.batch.tokens)


def test_too_little_play_and_play_of_another_environment_are_refused(frames, checkpoint):
    with pytest.raises(InputError, match="must have 5000 transitions in runs of 5"):
        held_out(frames / "test", checkpoint, 5, 5000)
    other = make_system("twisted", CONFIG, TwistedCoefficients(), FrameSpace("other", "1", SPACE.frame_shape, 4))
    with pytest.raises(InputError, match="env is 'blocks', expected 'other'"):
        held_out(frames / "test", other, 5, 20)
    with pytest.raises(InputError, match="/nowhere"):
        held_out(frames / "nowhere", checkpoint, 5, 20)


def test_a_run_is_scored_again_where_the_protocol_asks_something_else(
    frames, checkpoint, twisted_config, tmp_path, monkeypatch
):
    decoders = {"copy": StudyDecoderConfig("copy"), "argmax": StudyDecoderConfig("argmax")}
    protocol = AccuracyProtocol(
        question="which blocks move?", base=str(twisted_config), frames=str(frames / "test"), transitions=60,
        run_frames=6, arms={"twisted": Arm()}, reference="twisted", seeds=(0,), decoders=decoders,
        reference_decoder="argmax", compared_decoder="argmax",
    )  # fmt: skip
    run = make_run(protocol, tmp_path, "twisted", 0)
    save_checkpoint(checkpoint, run.model)
    monkeypatch.setattr(accuracy_study, "train", lambda run: None)

    def scored(**changes):
        accuracy_study.complete(replace(protocol, **changes), run)
        return accuracy_study.read_hits([run])

    hits, asked = scored()
    assert (list(hits["twisted"]), len(asked.creature)) == (["copy", "argmax", accuracy_study.PERMUTED], 60)
    assert len(scored(transitions=48)[1].creature) == 48
    assert list(scored(decoders={"argmax": StudyDecoderConfig("argmax")})[0]["twisted"]) == [
        "argmax",
        accuracy_study.PERMUTED,
    ]
    assert "sticky" in scored(decoders=decoders | {"sticky": StudyDecoderConfig("sticky", c_w=0.3)})[0]["twisted"]
    before = (run.folder / "accuracy.npz").stat().st_mtime_ns
    scored(decoders=decoders | {"sticky": StudyDecoderConfig("sticky", c_w=0.3)}, question="another one?")
    assert (run.folder / "accuracy.npz").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_study_trains_scores_and_compares(frames, twisted_config, tmp_path, capsys):
    protocol = tmp_path / "protocol.yaml"
    protocol.write_text(f"""
question: which blocks move?
base: {twisted_config}
shared: [run.steps=20, run.eval_every=20]
frames: {frames / "test"}
transitions: 60
run_frames: 6
seeds: [0]
arms: {{twisted: {{}}, unlooped: {{overrides: [model.mu_rec=1.0, model.default_depth=1, model.max_loops=1]}}}}
reference: twisted
decoders: {{argmax: {{kind: argmax}}, copy: {{kind: copy}}, transport: {{kind: transport, c_d: 0.05, c_w: 0.6}}}}
reference_decoder: argmax
compared_decoder: argmax
""")
    arguments = ["pixels", "accuracy", "--protocol", str(protocol), "--out", str(tmp_path / "study")]
    assert evaluate(arguments) == 0
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    share = {(r["arm"], r["decoder"]): r["accuracy"]["all"] for r in results["rows"] if r["part"] == "frame"}
    assert share.keys() == {
        *((arm, decoder) for arm in ("twisted", "unlooped") for decoder in ("argmax", "copy", "transport")),
        ("twisted", "permuted actions"),
    }
    for arm in ("twisted", "unlooped"):
        trained = load_checkpoint(tmp_path / "study" / arm / "seed-0" / "model")
        again = score(trained, held_out(frames / "test", trained, 6, 60), {"argmax": Argmax()}, EVERYWHERE, 0)
        assert share[arm, "argmax"] == again["argmax"].frame.mean()
    (compared,) = (
        d for d in results["differences"] if (d["ours"], d["part"], d["creatures"]) == ("copy", "frame", "all")
    )
    assert compared["difference"] == pytest.approx(share["twisted", "copy"] - share["twisted", "argmax"])
    scored = tmp_path / "study" / "twisted" / "seed-0" / "accuracy.npz"
    before = scored.stat().st_mtime_ns
    assert evaluate(arguments) == 0
    assert scored.stat().st_mtime_ns == before
    assert evaluate([*arguments, "reference=nobody"]) == 2
    assert "reference: must be one of twisted, unlooped, got 'nobody'" in capsys.readouterr().err
