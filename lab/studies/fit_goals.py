"""Fit the coda and the reward heads of a finished model so that rewards follow the goal; its core stays frozen.

Recorded episodes are won under their own goals, so a model that never reads the goal errs nowhere. In relabelled ones
(`python -m lab relabel-goals`) the same actions pay or not, by the goal. From whole histories a model does not find out
what decides; from goal and action alone it does within minutes. So the fit is a curriculum (Bengio et al., 2009): the
rows of each of `LEVELS` show more. Auxiliary heads, dropped afterwards, name what decides: what the goal asks for, what
was moved, what is held. All else is distilled from the model as it was: texts, acceptance and the summary for monitors
(knowledge distillation, Hinton et al., 2015). Rewards of other episodes are fitted to what they paid.

Shape suffixes: B rows, L positions, D width, P chosen positions, V vocabulary, N slots.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from lab.agents.searcher import Goal, parse_goal
from lab.studies.goal_rows import (
    FACTS,
    LONGEST,
    MOVED_FACT,
    Batch,
    Extent,
    Kinds,
    Row,
    Shown,
    decided_by_the_action,
    nearly_reached,
    show,
)
from loopwm.core.block import AttentionInputs, causal_attention, rotary_angles
from loopwm.records.command import above_zero, positive
from loopwm.records.episodes import Episode, recorded_episodes
from loopwm.records.errors import InputError
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.heads import pooled
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.training.program import export_model
from loopwm.text.world import WorldModel

EXAMPLE = (
    "python -m lab fit-goals --model loopwm/pretrained --goals data/episodes/goals data/episodes/alfworld-expert "
    "--others data/episodes/scienceworld-gold data/episodes/scienceworld-fatal --out runs/goals"
)

LEVELS = (
    *(Extent(places, 1) for places in (0, 1, 2, 4, 8, None)),
    *(Extent(None, steps) for steps in (2, 3, 4, 6, 8, 12, 18, 28, 99)),
)
ALL_GOALS_FROM = 4
"""Steps that a row must show before its goal may ask for two things, a changed one or one under a lamp."""
FIRST_UPDATES, LEAST_UPDATES, MOST_UPDATES = 2600, 60, 600
"""Updates of the first level; fewest and most of others, which end when the loss of rewards falls below LEARNT."""
LEARNT = 0.25
EARLIER_SHARE, OTHERS_SHARE = 0.2, 0.15
"""Shares of batches: levels before, of those of goals; episodes whose rewards are as they were paid."""
LIKE_SHARE = 0.85
"""Share of missed goals that are drawn to be like one that was won."""
ROWS, POOL, NEW_ROWS, NEW_EVERY = 12, 400, 24, 8
"""Rows of a batch and of a level. NEW_ROWS of these are exchanged each NEW_EVERY updates: from rows that are seen more
often than four times a model learns the rows."""
TEXT_POSITIONS, SLOTS = 200, 48
"""Positions and slots of a batch at which the model is held to what it was and taught."""
TEXT_WEIGHT, FACTS_WEIGHT, OTHERS_WEIGHT, ACCEPT_WEIGHT, MONITOR_WEIGHT = 3.0, 4.0, 2.0, 0.5, 0.5
MOVED_WEIGHT, EARLIER_WEIGHT = 0.5, 0.1
"""Weights of a row's slots before the last: of actions that put something down, of others."""
FALL = 0.3
"""Share of the updates over which the rate falls to zero."""


class Reader(nn.Module):
    """All of a model behind the core: coda, heads, and the logits of texts."""

    def __init__(self, model: LoopWMForCausalLM) -> None:
        super().__init__()
        heads, monitor = model.model.heads, model.model.monitor
        if heads is None or monitor is None:
            raise InputError("--model: has no prediction heads or no monitor")
        self.model, self.heads, self.monitor = model, heads, monitor

    def latent(self, ids_BL: Tensor, state_BLD: Tensor) -> Tensor:
        """Return h (B, L, D)."""
        return self.model.model.core.read_out(state_BLD, self._shared(ids_BL), causal_attention, state_BLD.dtype)

    def log_probabilities(self, ids_BL: Tensor, latent_BLD: Tensor, chosen_P2: Tensor) -> Tensor:
        """Return those of the next tokens at the chosen (row, position) pairs, (P, V)."""
        inner = self.model.model
        final = inner.norm(latent_BLD)
        if inner.copy is not None:
            slot, embeds = inner.config.core.copy_slot, inner.embed_tokens(ids_BL)
            final = final + inner.copy(final, embeds, self._shared(ids_BL), causal_attention, slot)
        return self.model.lm_head(final[chosen_P2[:, 0], chosen_P2[:, 1]]).log_softmax(-1)

    def fitted(self) -> list[nn.Parameter]:
        """Return what is fitted: the coda and the heads of rewards and ends."""
        parts = (self.model.model.core.coda, self.heads.points, self.heads.continuation)
        return [parameter for part in parts for parameter in part.parameters()]

    def _shared(self, ids_BL: Tensor) -> AttentionInputs:
        config, positions = self.model.config, torch.arange(ids_BL.shape[1])[None]
        return AttentionInputs(
            *rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_frequencies), None
        )


@torch.inference_mode()
def read_rows(model: WorldModel, teacher: Reader, parts: Iterable[Shown]) -> list[Row]:
    """Run the frozen core at the model's default depth. Rows over LONGEST tokens are left out; sorted by length."""
    slot_id = model.tokenizer(model.slots.after_action, add_special_tokens=False)["input_ids"][-1]
    texts = [(torch.tensor(model.tokenizer(part.text, add_special_tokens=False)["input_ids"]), part) for part in parts]
    texts = sorted((text for text in texts if len(text[0]) <= LONGEST), key=lambda text: len(text[0]))
    rows = []
    for start in range(0, len(texts), ROWS):
        some = texts[start : start + ROWS]
        ids_BL = pad_sequence([ids for ids, _ in some], batch_first=True)
        state_BLD = model.model.model(ids_BL, use_cache=False).state
        before_BLD = teacher.latent(ids_BL, state_BLD.float())
        for (ids, part), state_LD, before_LD in zip(some, state_BLD.half(), before_BLD.half(), strict=True):
            slots, length = (ids == slot_id).nonzero()[-len(part.points) :, 0], len(ids)
            cut = state_LD[:length].clone(), before_LD[:length].clone()
            rows.append(Row(ids, *cut, slots, part.points, part.ends, part.facts))
    return rows


def batch_loss(reader: Reader, teacher: Reader, facts: nn.ModuleList, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss of a batch and the cross-entropy of rewards at its last slots. facts: the auxiliary heads."""
    latent_BLD = reader.latent(batch.ids, batch.state)
    loss = TEXT_WEIGHT * _text_distance(reader, teacher, batch, latent_BLD)
    chosen, weight = _slots(batch)
    places = batch.slots[chosen]
    h, before = latent_BLD[places[:, 0], places[:, 1]][:, None], batch.before[places[:, 0], places[:, 1]][:, None]
    points, continuation, acceptance = reader.heads(h)
    with torch.no_grad():
        accepted, summary = teacher.heads(before)[2].sigmoid(), teacher.monitor(before)
    loss = loss + ACCEPT_WEIGHT * F.binary_cross_entropy_with_logits(acceptance, accepted)
    loss = loss + MONITOR_WEIGHT * (1 - (reader.monitor(h) * summary).sum(-1).mean())
    paid = F.cross_entropy(points, batch.points[chosen], reduction="none")
    ends = F.binary_cross_entropy_with_logits(continuation, 1 - batch.ends[chosen], reduction="none")
    if batch.facts is None:
        loss = loss + OTHERS_WEIGHT * (paid + 2 * ends).mean()
    else:
        loss = loss + ((paid + ends) * weight).sum() / batch.last.sum()
        loss = loss + FACTS_WEIGHT * _facts_loss(facts, h, batch.facts[chosen], weight)
    return loss, float(paid.detach()[batch.last[chosen]].mean())


def _text_distance(reader: Reader, teacher: Reader, batch: Batch, latent_BLD: Tensor) -> Tensor:
    """Return KL(before || now) of the next tokens in nats, at some positions."""
    before_last = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None] - 1
    text_P2 = _some(before_last.nonzero(), TEXT_POSITIONS)
    with torch.no_grad():
        before = teacher.log_probabilities(batch.ids, batch.before, text_P2)
    now = reader.log_probabilities(batch.ids, latent_BLD, text_P2)
    return F.kl_div(now, before, log_target=True, reduction="batchmean")


def _slots(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices of slots to teach at, all last ones among them, and the weight of each."""
    moved = torch.zeros_like(batch.last) if batch.facts is None else batch.facts[:, MOVED_FACT] > 0
    some = torch.rand(len(batch.last)) < SLOTS / len(batch.last)
    chosen = (batch.last | moved | some).nonzero()[:, 0]
    earlier = torch.where(moved, MOVED_WEIGHT, EARLIER_WEIGHT)
    return chosen, torch.where(batch.last, torch.ones(()), earlier)[chosen]


def _facts_loss(heads: nn.ModuleList, h: Tensor, facts_NF: Tensor, weight_N: Tensor) -> Tensor:
    mean = pooled(h)
    losses = [F.cross_entropy(head(mean), facts_NF[:, i], reduction="none") for i, head in enumerate(heads)]
    return (torch.stack(losses).mean(0) * weight_N).sum() / weight_N.sum()


def _some(places: Tensor, count: int) -> Tensor:
    return places[torch.randperm(len(places))[:count]]


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


class Pool:
    """Rows to draw batches from, sorted by length. parts: endless; rows are exchanged for new ones."""

    def __init__(self, parts: Iterator[Shown], read: Callable[[Iterable[Shown]], list[Row]], rng: Random) -> None:
        self.parts, self.read, self.rng = parts, read, rng
        self.rows = read(self._next(POOL))

    def batch(self) -> Batch:
        """Draw rows of similar lengths, to pad little."""
        start = self.rng.randrange(max(1, len(self.rows) - ROWS**2))
        near = self.rows[start : start + ROWS**2]
        return Batch.of(self.rng.sample(near, min(ROWS, len(near))))

    def renew(self) -> None:
        new = self.read(self._next(NEW_ROWS))
        for _ in new:
            self.rows.pop(self.rng.randrange(len(self.rows)))
        self.rows = sorted(self.rows + new, key=lambda row: len(row.ids))

    def _next(self, count: int) -> list[Shown]:
        return [next(self.parts) for _ in range(count)]


class Fit:
    """A fit by AdamW under way. The rate rises over 50 updates and falls over the last of `updates`."""

    def __init__(self, reader: Reader, teacher: Reader, updates: int, rate: float) -> None:
        self.reader, self.teacher, self.updates, self.rate = reader, teacher, updates, rate
        self.facts = nn.ModuleList(nn.Linear(reader.model.config.hidden_size, size) for size in FACTS)
        self.parameters = reader.fitted()
        self.optimizer = torch.optim.AdamW([*self.parameters, *self.facts.parameters()], betas=(0.9, 0.95))
        self.done = 0

    def update(self, batch: Batch) -> float:
        """Return the cross-entropy of rewards at the last slots."""
        left = (self.updates - self.done) / (FALL * self.updates)
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1.0, (self.done + 1) / 50, left)
        loss, paid = batch_loss(self.reader, self.teacher, self.facts, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.done += 1
        return paid


def run_levels(fit: Fit, new_pool: Callable[[Extent], Pool], others: Pool | None, rng: Random) -> None:
    """Fit to one level after another, and to the last one until the updates are used up."""
    pools: list[Pool] = []
    with tqdm(total=fit.updates, unit="step") as progress:
        for index, level in enumerate(LEVELS):
            pools.append(new_pool(level))
            progress.set_description(f"level {index + 1} of {len(LEVELS)}")
            least, most = (FIRST_UPDATES, FIRST_UPDATES) if index == 0 else (LEAST_UPDATES, MOST_UPDATES)
            paid = Average()
            while fit.done < fit.updates:
                if level is not LEVELS[-1] and (paid.count >= most or (paid.count >= least and paid.mean < LEARNT)):
                    break
                pool = _pool(pools, others, rng)
                loss = fit.update(pool.batch())
                if pool is pools[-1]:
                    paid.add(loss)
                if fit.done % NEW_EVERY == 0:
                    pools[-1].renew()
                    if others is not None and rng.random() < OTHERS_SHARE:
                        others.renew()
                progress.update()
                progress.set_postfix(loss=f"{paid.mean:.3f}")


def _pool(pools: Sequence[Pool], others: Pool | None, rng: Random) -> Pool:
    if others is not None and rng.random() < OTHERS_SHARE:
        return others
    return rng.choice(pools) if rng.random() < EARLIER_SHARE else pools[-1]


@dataclass
class Average:
    """Running mean of about the last 20 values, from that of an even chance."""

    mean: float = 0.7
    count: int = 0

    def add(self, value: float) -> None:
        self.mean += (value - self.mean) / 20
        self.count += 1


def parts_of_others(model: WorldModel, folders: Sequence[Sequence[Episode]], rng: Random) -> Iterator[Shown]:
    """Yield up to 14 steps of episodes, whole or cut; each folder is as likely as any other."""
    while True:
        episode = rng.choice(rng.choice(folders))
        if rng.random() < 0.6:
            episode = cut(episode, rng)
        yield show(model, episode, Extent(None, rng.randint(3, 14)), None, rng)


def cut(episode: Episode, rng: Random) -> Episode:
    """Cut an episode behind one of its steps."""
    return replace(episode, steps=episode.steps[: rng.randint(2, len(episode.steps))])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--goals", type=Path, nargs="+", required=True, help="episodes of ALFWorld, also relabelled")
    parser.add_argument("--others", type=Path, nargs="+", default=[], help="episodes whose rewards stand as they are")
    parser.add_argument("--updates", type=positive, default=9000, help="of 12 rows each (default: %(default)s)")
    parser.add_argument("--rate", type=above_zero, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint; must not exist")


def run(args: argparse.Namespace) -> None:
    """Fit and write the checkpoint. Raises InputError."""
    if args.out.exists():
        raise InputError(f"--out: {args.out} exists already")
    model, tokenizer = load_checkpoint(args.model)
    world_model, rng, kinds = WorldModel(deepcopy(model), tokenizer), Random(args.seed), Kinds()
    torch.manual_seed(args.seed)
    goals = Goals(recorded_episodes(args.goals))
    folders = [[one for one in recorded_episodes([folder]) if len(one.steps) > 1] for folder in args.others]
    reader, teacher = Reader(model.float()), Reader(deepcopy(model))
    read = partial(read_rows, world_model, teacher)

    def parts(level: Extent) -> Iterator[Shown]:
        while True:
            yield show(world_model, goals.draw(level, rng), level, kinds, rng)

    others = Pool(parts_of_others(world_model, folders, rng), read, rng) if folders else None
    fit = Fit(reader, teacher, args.updates, args.rate)
    run_levels(fit, lambda level: Pool(parts(level), read, rng), others, rng)
    export_model(model, tokenizer, args.out, TrainingEpisodes.load(args.model))
