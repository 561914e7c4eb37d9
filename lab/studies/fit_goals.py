"""Fit the coda and the reward heads of a finished model so that rewards follow the goal; its core stays frozen.

Last steps of relabelled episodes (`python -m lab relabel-goals`) say what pays under which goal. From whole histories a
model that never had to read its goal does not find out; from goal and action alone it does within minutes. So the fit
is a curriculum (Bengio et al., 2009): the rows of each of `STAGES` show more of what was seen. All else is distilled
from the model as it was: texts, acceptance, rewards before the last step and those of other episodes (knowledge
distillation, Hinton et al., 2015).

Shape suffixes: B rows, L positions, D width, P chosen positions, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lab.agents.searcher import NAME, parse_goal
from loopwm.core.block import AttentionInputs, causal_attention, rotary_angles
from loopwm.records.command import above_zero, positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.template import Context, Transition, render_context, render_step
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import MOST_POINTS
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.program import export_model
from loopwm.text.world import WorldModel

EXAMPLE = (
    "python -m lab fit-goals --model loopwm/pretrained --goals data/episodes/goals "
    "--kept data/episodes/scienceworld-gold --out runs/goals"
)


@dataclass(frozen=True)
class Stage:
    """Part of an episode that rows show.

    places: of the first observation, None for all, 0 for no observation. steps: the last ones. updates: of the fit.
    """

    places: int | None
    steps: int
    updates: int


STAGES = (
    Stage(0, 1, 3000),
    *(Stage(places, 1, 300) for places in (1, 2, 4, 8)),
    *(Stage(None, steps, 300) for steps in (1, 2, 3, 4, 6, 8, 99)),
)
ALL_GOALS_FROM = 6
"""Steps that a row must show before its goal may ask for two things, a changed one or one under a lamp."""
EARLIER_SHARE = 0.35
"""Share of batches of the stages before."""
ROOM = "You are in the middle of a room."
LONGEST = 700
ROWS = 12
TEXT_POSITIONS, SLOTS = 160, 64
"""Positions and slots of a batch at which the model is held to what it was."""
TEXT_WEIGHT, ACCEPT_WEIGHT, EARLIER_WEIGHT = 2.0, 0.5, 0.3


@dataclass(frozen=True)
class Row:
    """An episode up to its last action. ids: (L,); state: (L, D) h^(T); points and ends: of the last step."""

    ids: Tensor
    state: Tensor
    points: int
    ends: bool


@dataclass(frozen=True)
class Batch:
    """ids: (B, L), padded at the end; state: (B, L, D); last: (B,) position of the last slot; points and ends: (B,)."""

    ids: Tensor
    state: Tensor
    last: Tensor
    points: Tensor
    ends: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Batch:
        return cls(
            pad_sequence([row.ids for row in rows], batch_first=True),
            pad_sequence([row.state.float() for row in rows], batch_first=True),
            torch.tensor([len(row.ids) - 1 for row in rows]),
            torch.tensor([row.points for row in rows]).clamp(-MOST_POINTS, MOST_POINTS) + MOST_POINTS,
            torch.tensor([float(row.ends) for row in rows]),
        )


def decided_by_the_action(episode: Episode) -> bool:
    """Return True if the goal is one thing in one place: then the last action alone says whether it is reached."""
    goal = parse_goal(episode.goal)
    return goal.verb is None and goal.lamp is None and goal.count == 1


def shown_text(model: WorldModel, stage: Stage, rng: Random, episode: Episode) -> str:
    """Render what a stage shows of an episode, the last step without its observation."""
    first, *steps = episode.steps
    history = tuple(Transition(step.action or "", step.observation) for step in steps[-stage.steps : -1])
    observation = first.observation if stage.places is None else fewer_places(episode, stage.places, rng)
    context, _ = model.fit(Context(episode.goal, observation, history))
    return render_context(context, model.slots) + render_step(steps[-1].action or "", model.slots)


def fewer_places(episode: Episode, count: int, rng: Random) -> str:
    """Return the first observation with `count` places, that of the last action among them; for 0 without goal, too."""
    if count == 0:
        return ROOM
    head, seen, after = episode.steps[0].observation.partition("you see")
    listing, task, goal = after.partition("Your task")
    places, last = NAME.findall(listing), NAME.findall(episode.steps[-1].action or "")
    others = [place for place in places if place not in last]
    names = {*last, *rng.sample(others, min(len(others), count - 1))}
    return f"{head}{seen} " + ", ".join(f"a {place}" for place in places if place in names) + f".\n\n{task}{goal}"


@torch.inference_mode()
def read_rows(model: WorldModel, episodes: Sequence[Episode], text: Callable[[Episode], str]) -> list[Row]:
    """Run the frozen core at the model's default depth. Rows over LONGEST tokens are left out; sorted by length."""
    ids = [torch.tensor(model.tokenizer(text(episode), add_special_tokens=False)["input_ids"]) for episode in episodes]
    order = sorted((i for i in range(len(ids)) if len(ids[i]) <= LONGEST), key=lambda i: len(ids[i]))
    rows = []
    for start in tqdm(range(0, len(order), ROWS), unit="batch"):
        places = order[start : start + ROWS]
        state_BLD = model.model.model(pad_sequence([ids[i] for i in places], batch_first=True), use_cache=False).state
        for i, state_LD in zip(places, state_BLD, strict=True):
            *_, before, last = episodes[i].steps
            state = state_LD[: len(ids[i])].half().clone()
            rows.append(Row(ids[i], state, round(last.score - before.score), last.done))
    return rows


class Reader(nn.Module):
    """All of a model behind the core: coda, heads, and the logits of texts."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        super().__init__()
        heads = model.model.heads
        if heads is None:
            raise InputError("--model: has no prediction heads")
        self.model, self.heads = model, heads

    def latent(self, batch: Batch) -> Tensor:
        """Return h (B, L, D)."""
        shared = self._shared(batch)
        return self.model.model.core.read_out(batch.state, shared, causal_attention, batch.state.dtype)

    def log_probabilities(self, batch: Batch, latent_BLD: Tensor, chosen_PL: Tensor) -> Tensor:
        """Return those of the next tokens at the chosen (row, position) pairs, (P, V)."""
        inner = self.model.model
        final = inner.norm(latent_BLD)
        if inner.copy is not None:
            slot, embeds = inner.config.core.copy_slot, inner.embed_tokens(batch.ids)
            final = final + inner.copy(final, embeds, self._shared(batch), causal_attention, slot)
        return self.model.lm_head(final[chosen_PL[:, 0], chosen_PL[:, 1]]).log_softmax(-1)

    def fitted(self) -> list[nn.Parameter]:
        """Return what is fitted: the coda and the heads of rewards and ends."""
        parts = (self.model.model.core.coda, self.heads.points, self.heads.continuation)
        return [parameter for part in parts for parameter in part.parameters()]

    def _shared(self, batch: Batch) -> AttentionInputs:
        config, positions = self.model.config, torch.arange(batch.ids.shape[1])[None]
        return AttentionInputs(
            *rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_frequencies), None
        )


def batch_loss(reader: Reader, teacher: Reader, batch: Batch, slot_id: int, keep: bool) -> Tensor:
    """Return the loss of a batch. keep: of rows whose reward stays as it was."""
    latent_BLD = reader.latent(batch)
    with torch.no_grad():
        was_BLD = teacher.latent(batch)
    rows, columns = torch.arange(len(batch.last)), torch.arange(batch.ids.shape[1])
    before_last = columns < batch.last[:, None]
    text_PL = _some(before_last.nonzero(), TEXT_POSITIONS)
    with torch.no_grad():
        text_was = teacher.log_probabilities(batch, was_BLD, text_PL)
    text = _divergence(reader.log_probabilities(batch, latent_BLD, text_PL), text_was)
    final, final_was = latent_BLD[rows, batch.last][:, None], was_BLD[rows, batch.last][:, None]
    points, continuation, acceptance = reader.heads(final)
    accept = F.binary_cross_entropy_with_logits(acceptance, teacher.heads(final_was)[2].sigmoid())
    if keep:
        reward = _reward_distance(reader, teacher, final, final_was)
    else:
        reward = F.cross_entropy(points, batch.points)
        reward = reward + F.binary_cross_entropy_with_logits(continuation, 1 - batch.ends)
    loss = reward + TEXT_WEIGHT * text + ACCEPT_WEIGHT * accept
    earlier = _some((before_last & (batch.ids == slot_id)).nonzero(), SLOTS)
    if len(earlier):
        chosen = earlier[:, 0], earlier[:, 1]
        distance = _reward_distance(reader, teacher, latent_BLD[chosen][:, None], was_BLD[chosen][:, None])
        loss = loss + EARLIER_WEIGHT * distance
    return loss


def _some(places: Tensor, count: int) -> Tensor:
    return places[torch.randperm(len(places))[:count]]


def _divergence(log_p: Tensor, log_was: Tensor) -> Tensor:
    """Return KL(was || p) in nats, the mean over rows."""
    return F.kl_div(log_p, log_was, log_target=True, reduction="batchmean")


def _reward_distance(reader: Reader, teacher: Reader, latent: Tensor, was: Tensor) -> Tensor:
    points, continuation, _ = reader.heads(latent)
    with torch.no_grad():
        points_were, continuation_was, _ = teacher.heads(was)
    ends = F.binary_cross_entropy_with_logits(continuation, continuation_was.sigmoid())
    return _divergence(points.log_softmax(-1), points_were.log_softmax(-1)) + ends


def fit(
    reader: Reader,
    teacher: Reader,
    stages: Sequence[Sequence[Row]],
    same: Sequence[Row],
    updates: int,
    rate: float,
    rng: Random,
) -> None:
    """Fit by AdamW to the last of the stages and some of those before; every eighth batch is of `same`."""
    slot_id = int(stages[0][0].ids[-1])  # a row ends with its slot
    parameters = reader.fitted()
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95))
    for update in tqdm(range(updates), unit="step"):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (update + 1) / 50)
        keep = bool(same) and update % 8 == 7
        goals = rng.choice(stages) if rng.random() < EARLIER_SHARE else stages[-1]
        batch = Batch.of(_neighbours(same if keep else goals, rng))
        gradients = torch.autograd.grad(batch_loss(reader, teacher, batch, slot_id, keep), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def _neighbours(rows: Sequence[Row], rng: Random) -> list[Row]:
    """Draw rows of similar lengths, to pad little."""
    start = rng.randrange(max(1, len(rows) - ROWS**2))
    near = rows[start : start + ROWS**2]
    return rng.sample(near, min(ROWS, len(near)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--goals", type=Path, nargs="+", required=True, help="episodes of ALFWorld, also relabelled")
    parser.add_argument("--kept", type=Path, nargs="+", default=[], help="episodes whose rewards stay as they are")
    parser.add_argument("--rows", type=positive, default=2400, help="episodes of a stage (default: %(default)s)")
    parser.add_argument("--rate", type=above_zero, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")


def run(args: argparse.Namespace) -> None:
    """Fit and write the checkpoint. Raises InputError."""
    if args.out.exists():
        raise InputError(f"--out: {args.out} exists already")
    model, tokenizer = load_checkpoint(args.model)
    world_model, rng = WorldModel(model, tokenizer), Random(args.seed)
    torch.manual_seed(args.seed)
    episodes, others = recorded_episodes(args.goals), recorded_episodes(args.kept)
    same = [cut(one, rng) for one in _sample(others, args.rows // 4, rng)]
    same_rows = read_rows(world_model, same, partial(shown_text, world_model, Stage(None, 4, 0), rng))
    reader, teacher, stages = Reader(model), Reader(deepcopy(model)), list[list[Row]]()
    for stage in STAGES:
        fitting = [one for one in episodes if stage.steps >= ALL_GOALS_FROM or decided_by_the_action(one)]
        chosen = balanced(fitting, args.rows, rng)
        stages.append(read_rows(world_model, chosen, partial(shown_text, world_model, stage, rng)))
        fit(reader, teacher, stages, same_rows, stage.updates, args.rate, rng)
    export_model(model, tokenizer, args.out, TrainingEpisodes.load(args.model))


def balanced(episodes: Iterable[Episode], count: int, rng: Random) -> list[Episode]:
    """Draw up to `count` episodes, as many that were won as not."""
    sides: dict[bool, list[Episode]] = {True: [], False: []}
    for episode in episodes:
        sides[episode.steps[-1].done].append(episode)
    size = min(count // 2, *map(len, sides.values()))
    if size == 0:
        raise InputError("--goals: must hold episodes that were won and others")
    return [episode for side in sides.values() for episode in _sample(side, size, rng)]


def cut(episode: Episode, rng: Random) -> Episode:
    """Cut an episode behind one of its steps."""
    return replace(episode, steps=episode.steps[: rng.randint(2, max(2, len(episode.steps)))])


def _sample(episodes: Sequence[Episode], count: int, rng: Random) -> list[Episode]:
    return rng.sample(episodes, min(count, len(episodes)))
