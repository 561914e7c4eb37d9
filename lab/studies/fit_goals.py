"""Fit reward attention to a finished model, so that rewards follow the goal; nothing else of it changes.

Recorded episodes are won under their own goals, so a model that never reads the goal errs nowhere. In relabelled ones
(`python -m lab relabel-goals`) the same actions pay or not, by the goal. Every action of a row is taught, auxiliary
heads, dropped afterwards, name what decides (what the goal asks for, what was moved, what is held), and a missed goal
is like one that is won as often. Episodes of ScienceWorld that answer by a box do so rightly and wrongly as often.
Uses of `focus` pay, lose and name what is not there equally often. Rewards of other episodes are fitted to what they
paid. The model reads the rows once; only the attention and the heads
of rewards and ends are run again.

Shape suffixes: B rows, L positions, D width, S slots, N = B * S, C classes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lab.agents.searcher import Goal, parse_goal
from lab.episodes import train_only, training_record
from lab.studies.box_rows import BOX_FACTS, Boxes, box_taught
from lab.studies.focus_rows import FOCUS_FACTS, Focuses, focus_taught
from lab.studies.goal_rows import (
    FACTS,
    LONGEST,
    UNKNOWN,
    Batch,
    Extent,
    Kinds,
    Row,
    Shown,
    Taught,
    decided_by_the_action,
    goal_taught,
    nearly_reached,
    reward_taught,
    show,
)
from loopwm.core.block import AttentionInputs, rotary_angles
from loopwm.records.command import above_zero, positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.attention import RewardAttention
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import OutcomeLayer, PredictionHeads
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.program import export_model
from loopwm.text.world import WorldModel

EXAMPLE = (
    "python -m lab fit-goals --model loopwm/pretrained --goals data/episodes/goals data/episodes/alfworld-expert "
    "--others data/episodes/scienceworld-gold data/episodes/scienceworld-fatal --out runs/goals"
)

WHOLE = Extent(None, 99)
PARTS = (
    *(Extent(places, 1) for places in (0, 1, 2, 4, 8, None)),
    *(Extent(None, steps) for steps in (2, 3, 4, 6, 8, 12, 18, 28)),
)
WHOLE_SHARE = 0.65
"""Share of rows that show whole episodes; the others show parts, from which what decides is learnt sooner."""
ALL_GOALS_FROM = 4
"""Steps that a row must show before its goal may ask for two things, a changed one or one under a lamp."""
LIKE_SHARE = 0.85
"""Share of missed goals that are drawn to be like one that was won."""
ROWS, READ_TOGETHER = 24, 12
SHARES = (0.45, 0.35, 0.2, 0.0)
"""Shares of rows and batches of goals, other episodes, boxes and uses of `focus`."""
FACTS_WEIGHT, ENDS_WEIGHT = 1.0, 1.5
FALL = 0.35
"""Share of the updates over which the rate falls to zero."""


def with_reward_attention(model: LoopWMForCausalLM) -> LoopWMForCausalLM:
    """Return a copy of a model that has reward attention, new if it had none."""
    if not model.config.prediction_heads or model.config.state_slots != 1:
        raise InputError("--model: must have prediction heads and one state slot")
    if model.config.reward_attention:
        return deepcopy(model)
    config = deepcopy(model.config)
    config.update({"reward_attention": True})
    fitted = LoopWMForCausalLM(config)
    missing, unexpected = fitted.load_state_dict(model.state_dict(), strict=False)
    new = ("model.reward_attention.", "model.heads.outcome.")
    assert not unexpected
    assert all(name.startswith(new) for name in missing), missing
    return fitted


def reward_parts(model: LoopWMForCausalLM) -> tuple[RewardAttention, PredictionHeads, OutcomeLayer]:
    attention, heads = model.model.reward_attention, model.model.heads
    assert attention is not None
    assert heads is not None
    assert heads.outcome is not None
    return attention, heads, heads.outcome


@torch.inference_mode()
def read_rows(model: WorldModel, parts: Iterable[Shown]) -> list[Row]:
    """Run the model at its default depth. Rows over LONGEST tokens are left out; sorted by length."""
    slot_id = model.tokenizer(model.slots.after_action, add_special_tokens=False)["input_ids"][-1]
    texts = [(torch.tensor(model.tokenizer(part.text, add_special_tokens=False)["input_ids"]), part) for part in parts]
    texts = sorted((text for text in texts if len(text[0]) <= LONGEST), key=lambda text: len(text[0]))
    width, rows = model.model.config.hidden_size, []
    for start in tqdm(range(0, len(texts), READ_TOGETHER), unit="batch"):
        some = texts[start : start + READ_TOGETHER]
        out = model.model.model(pad_sequence([ids for ids, _ in some], batch_first=True), use_cache=False)
        for (ids, part), state_LD, h_LD in zip(some, out.state.half(), out.latent[..., :width].half(), strict=True):
            slots = (ids == slot_id).nonzero()[-len(part.points) :, 0]
            row = state_LD[: len(ids)].clone(), h_LD[: len(ids)].clone()
            rows.append(Row(*row, slots, part.points, part.ends, part.weights, part.facts))
    return rows


def outcomes(model: LoopWMForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the heads read (N, D), logits of points (N, C) and of continuation (N,), at all slots."""
    (attention, heads, outcome_layer), config = reward_parts(model), model.config

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_frequencies)

    positions = torch.arange(batch.h.shape[1])
    k, v = attention.keys_values(batch.h, batch.state, AttentionInputs(*angles(positions[None])))
    h_BSD = batch.h.gather(1, batch.slots[:, :, None].expand(-1, -1, batch.h.shape[2]))
    mask = positions <= batch.slots[:, None, :, None]
    q = attention.queries(h_BSD, *angles(batch.slots))
    context = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(2)
    outcome = outcome_layer(attention.with_context(h_BSD, context).flatten(0, 1))
    return outcome, heads.points(outcome), heads.continuation(outcome)[:, 0]


def batch_loss(model: LoopWMForCausalLM, facts: nn.ModuleList, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss of a batch and the cross-entropy of rewards at its last slots. facts: the auxiliary heads."""
    outcome, points, continuation = outcomes(model, batch)
    weights, values = batch.weights.flatten(), batch.facts.flatten(0, 1)
    paid = F.cross_entropy(points, batch.points.flatten(), reduction="none")
    losses = paid + ENDS_WEIGHT * F.binary_cross_entropy_with_logits(
        continuation, 1 - batch.ends.flatten(), reduction="none"
    )
    for i, head in enumerate(facts):
        named = F.cross_entropy(head(outcome), values[:, i], ignore_index=UNKNOWN, reduction="none")
        losses = losses + FACTS_WEIGHT / len(facts) * named
    return (losses * weights).sum() / weights.sum(), float(paid.detach()[batch.last.flatten()].mean())


class Goals:
    """Episodes to draw from, won or missed.

    A miss has the thing or the place of a goal that is won as often, of the same kind: what goals ask for says nothing
    of whether they are reached. Things are drawn first, since episodes have few of most.
    """

    def __init__(self, episodes: Iterable[Episode]) -> None:
        """Sort episodes. Raises InputError unless there are simple ones of both outcomes."""
        self.won, self.missed = list[Episode](), list[Episode]()
        self.of_thing, self.missed_like = (
            defaultdict[str, list[Episode]](list),
            defaultdict[Likeness, list[Episode]](list),
        )
        for episode in episodes:
            goal = parse_goal(episode.goal)
            if episode.steps[-1].done:
                self.won.append(episode)
                self.of_thing[goal.thing].append(episode)
            elif nearly_reached(episode):
                self.missed.append(episode)
                for likeness in likenesses(goal):
                    self.missed_like[likeness].append(episode)
        self.simple_missed = list(filter(decided_by_the_action, self.missed))
        if not (self.simple_missed and any(map(decided_by_the_action, self.won))):
            raise InputError("--goals: must hold episodes that were won and others that nearly were, of simple goals")

    def draw(self, level: Extent, rng: Random) -> Episode:
        simple = level.places is not None or level.steps < ALL_GOALS_FROM
        win = self._draw_win(rng)
        while simple and not decided_by_the_action(win):
            win = self._draw_win(rng)
        if rng.random() < 0.5:
            return win
        misses = self.missed_like[rng.choice(likenesses(parse_goal(win.goal)))] if rng.random() < LIKE_SHARE else []
        return rng.choice(misses or (self.simple_missed if simple else self.missed))

    def _draw_win(self, rng: Random) -> Episode:
        return rng.choice(self.of_thing[rng.choice(list(self.of_thing))] if rng.random() < 0.5 else self.won)


Likeness = tuple[str, str | None, str | None, str | None, int]


def likenesses(goal: Goal) -> list[Likeness]:
    """Return what goals of the same kind share with this one: its thing, its place."""
    kind = goal.verb, goal.lamp, goal.count
    return [("thing", goal.thing, *kind), ("place", goal.place, *kind)]


def parts_of_goals(model: WorldModel, goals: Goals, rng: Random) -> Iterator[Shown]:
    teach = partial(goal_taught, kinds=Kinds())
    while True:
        extent = WHOLE if rng.random() < WHOLE_SHARE else rng.choice(PARTS)
        yield show(model, goals.draw(extent, rng), extent, teach, rng)


def parts_of(
    model: WorldModel, draw: Callable[[Random], Episode], teach: Callable[[Episode], Taught], rng: Random
) -> Iterator[Shown]:
    """Yield parts of episodes that end with what is taught."""
    while True:
        extent = WHOLE if rng.random() < WHOLE_SHARE else Extent(None, rng.randint(2, 28))
        yield show(model, draw(rng), extent, teach, rng)


def parts_of_others(model: WorldModel, folders: Sequence[Sequence[Episode]], rng: Random) -> Iterator[Shown]:
    """Yield parts of episodes, whole or cut, mostly with all history; each folder is as likely as any other."""
    while True:
        episode = rng.choice(rng.choice(folders))
        if rng.random() < 0.6:
            episode = cut(episode, rng)
        extent = WHOLE if rng.random() < WHOLE_SHARE else Extent(None, rng.randint(3, 28))
        yield show(model, episode, extent, reward_taught, rng)


def cut(episode: Episode, rng: Random) -> Episode:
    """Cut an episode behind one of its steps."""
    return replace(episode, steps=episode.steps[: rng.randint(2, len(episode.steps))])


@dataclass(frozen=True)
class Lesson:
    """Rows with the same facts. values: of each fact. share: of the batches."""

    rows: Sequence[Row]
    values: Sequence[int]
    share: float


def fit(model: LoopWMForCausalLM, lessons: Sequence[Lesson], updates: int, rate: float, rng: Random) -> None:
    """Fit by AdamW. The rate rises over 100 updates and falls over the last FALL."""
    width = model.config.hidden_size
    facts = [nn.ModuleList(nn.Linear(width, size) for size in lesson.values) for lesson in lessons]
    attention, heads, outcome = reward_parts(model)
    fitted = [p for part in (attention, outcome, heads.points, heads.continuation) for p in part.parameters()]
    auxiliary = [p for part in facts for p in part.parameters()]
    optimizer = torch.optim.AdamW([*fitted, *auxiliary], betas=(0.9, 0.95), weight_decay=0.05)
    progress = tqdm(range(updates), unit="step")
    for update in progress:
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (update + 1) / 100, (updates - update) / (FALL * updates))
        (chosen,) = rng.choices(range(len(lessons)), [lesson.share for lesson in lessons])
        loss, paid = batch_loss(model, facts[chosen], Batch.of(_neighbours(lessons[chosen].rows, rng)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(fitted, 1.0)
        optimizer.step()
        if chosen == 0:
            progress.set_postfix(loss=f"{paid:.3f}", refresh=False)


def _neighbours(rows: Sequence[Row], rng: Random) -> list[Row]:
    """Draw rows of similar lengths, to pad little."""
    start = rng.randrange(max(1, len(rows) - 8 * ROWS))
    near = rows[start : start + 8 * ROWS]
    return rng.sample(near, min(ROWS, len(near)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--goals", type=Path, nargs="+", required=True, help="episodes of ALFWorld, also relabelled")
    parser.add_argument("--others", type=Path, nargs="+", default=[], help="episodes whose rewards stand as they are")
    parser.add_argument("--rows", type=positive, default=20000, help="to read (default: %(default)s)")
    parser.add_argument("--updates", type=positive, default=8000, help="of 24 rows each (default: %(default)s)")
    parser.add_argument(
        "--shares",
        type=float,
        nargs=4,
        default=SHARES,
        metavar=("GOALS", "OTHERS", "BOXES", "FOCUS"),
        help="of rows (default: %(default)s); boxes and uses of `focus` are those of the other episodes",
    )
    parser.add_argument("--rate", type=above_zero, default=2e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")


def run(args: argparse.Namespace) -> None:
    """Fit and write the checkpoint. Raises InputError."""
    if args.out.exists():
        raise InputError(f"--out: {args.out} exists already")
    if min(args.shares) < 0 or not sum(args.shares):
        raise InputError(f"--shares: must not be below 0, and one above it, got {args.shares}")
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    goal_episodes = train_only(recorded_episodes(args.goals), "--goals")
    folders = [[one for one in recorded_episodes([folder]) if len(one.steps) > 1] for folder in args.others]
    others = train_only((one for folder in folders for one in folder), "--others")
    model, tokenizer = load_checkpoint(args.model)
    fitted = with_reward_attention(model)
    world_model, goals = WorldModel(model, tokenizer), Goals(goal_episodes)
    boxes, focuses = Boxes(others), Focuses(others)
    of_goals, of_others, of_boxes, of_focus = args.shares
    lessons: list[tuple[Iterator[Shown], tuple[int, ...], float]]
    lessons = [(parts_of_goals(world_model, goals, rng), FACTS, of_goals)]
    if folders:
        lessons.append((parts_of_others(world_model, folders, rng), (), of_others))
    if boxes:
        lessons.append((parts_of(world_model, boxes.draw, box_taught, rng), BOX_FACTS, of_boxes))
    if focuses:
        lessons.append((parts_of(world_model, focuses.draw, focus_taught, rng), FOCUS_FACTS, of_focus))
    read = [
        Lesson(read_rows(world_model, islice(parts, round(share * args.rows))), values, share)
        for parts, values, share in lessons
        if share
    ]
    fit(fitted, read, args.updates, args.rate, rng)
    learned = training_record([*goal_episodes, *others])
    export_model(fitted, tokenizer, args.out, learned.joined(TrainingEpisodes.load(args.model)))
