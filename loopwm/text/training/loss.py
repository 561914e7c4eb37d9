"""Training objective of text worlds; each part returns (loss, diagnostics).

    L = (sum_tokens l_obs + lambda_r sum_k l_rew + lambda_c sum_k l_cont + gamma sum_k l_bag
         + delta sum_k l_state + alpha sum_branches L_consist + beta sum_branches L_contract) / tokens

Every sum runs over the global batch, so that the loss does not depend on the cut into micro-batches. Diagnostics,
except those of the observation loss, are pairs (sum, count), float32 (2,), whose quotient over a global batch is
logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopwm.core.depth import DepthPlan
from loopwm.core.twohot import shares
from loopwm.text.data.collate import BranchSteps, PackedBatch, TreeBatch, WordBags, branch_mask
from loopwm.text.data.tree import IGNORED, QUERY_HORIZON, STATE_KINDS, STATE_NAMES
from loopwm.text.data.tree_attention import BranchMask, TreeMask
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.heads import MOST_POINTS, BagHead
from loopwm.text.model.modeling import LoopWMForCausalLM, LoopWMModel, LoopWMOutput
from loopwm.text.model.propagation import run_stages
from loopwm.text.training.config import ObjectiveConfig


class RowOutput(NamedTuple):
    """Per-column parts of a `LoopWMOutput`, (B, L, D) each."""

    last_hidden_state: Tensor
    latent: Tensor
    state: Tensor
    previous_state: Tensor

    @classmethod
    def of(cls, out: LoopWMOutput) -> RowOutput:
        return cls(*(out[name] for name in cls._fields))


def row_mask(config: LoopWMConfig, batch: TreeBatch) -> TreeMask:
    return batch.attention_mask() if config.decode_sees == "all" else batch.state_mask()


def one_pass_mask(config: LoopWMConfig, batch: TreeBatch) -> BranchMask:
    """Return the mask of a batch laid out for one pass, which computes only visible columns."""
    return branch_mask(batch, row_mask(config, batch))


def run_rows(model: LoopWMModel, batch: TreeBatch, depth: DepthPlan | int) -> RowOutput:
    """Run a batch by the model's `decode_sees` and `propagate`: at once, or in stages with carried latents.

    The stages are in `loopwm/text/model/propagation.py`.
    Raises ValueError if the model carries latents and the batch is not laid out `by_stage`.
    """
    if model.config.propagate == "none":
        mask = batch.packed_mask() if isinstance(batch, PackedBatch) else one_pass_mask(model.config, batch)
        return RowOutput.of(model(batch.tokens, mask, batch.positions, use_cache=False, depth=depth))
    outs = run_stages(model, model.config, batch, row_mask(model.config, batch), depth)
    return RowOutput(*(torch.cat([out[name] for out in outs], dim=1) for name in RowOutput._fields))


Term = tuple[Tensor, dict[str, Tensor]]
"""Summed loss and its diagnostics."""

MEDIAN_STEPS = 256
"""Optimiser steps in the median of C_max."""

TINY = 1e-12
"""Added under the root of a norm, whose slope at zero is infinite."""


def observation_loss(
    loss_N: Tensor,
    weight_N: Tensor,
    right_N: Tensor,
    horizon_N: Tensor,
    starts_N: Tensor,
    undetermined_N: Tensor,
    normaliser: float,
) -> Term:
    """Cross-entropy of observation tokens (LoopWM, equation 10: l_obs), weighted, summed and divided by `normaliser`.

    Args:
        loss_N: loss of each target, in nats.
        weight_N: weight of each target.
        right_N: True if the target was the most probable token.
        horizon_N: horizon of each target, 0 in the trunk.
        starts_N: True where an observation starts; its targets are all before the next start.
        undetermined_N: True if no shown text determines the target.
        normaliser: target tokens of the global batch.

    Returns:
        The loss and diagnostics, each (QUERY_HORIZON + 1,) by horizon, answers to state queries last: unweighted loss
        in nats, targets, right tokens, observations, and `exact` ones, all of whose tokens are right, as greedy
        decoding would match; loss and number of undetermined targets; `answerable` observations, which have none, and
        exact ones of them.
    """

    def by_horizon(horizon: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(QUERY_HORIZON + 1, device=values.device).index_add(0, horizon, values.detach().float())

    first = starts_N.nonzero()[:, 0]

    def by_observation(marks: Tensor) -> Tensor:
        # The running count of starts numbers the observations.
        return torch.zeros_like(first, dtype=torch.float32).index_add(0, starts_N.cumsum(0) - 1, marks.float())

    exact, answerable = by_observation(~right_N) == 0, by_observation(undetermined_N) == 0
    sums = {
        "loss": by_horizon(horizon_N, loss_N),
        "targets": by_horizon(horizon_N, torch.ones_like(loss_N)),
        "right": by_horizon(horizon_N, right_N),
        "observations": by_horizon(horizon_N[first], torch.ones_like(exact)),
        "exact": by_horizon(horizon_N[first], exact),  # an observation counts where it starts
        "undetermined_loss": by_horizon(horizon_N, loss_N * undetermined_N),
        "undetermined": by_horizon(horizon_N, undetermined_N),
        "answerable": by_horizon(horizon_N[first], answerable),
        "answerable_exact": by_horizon(horizon_N[first], answerable & exact),
    }
    return (weight_N * loss_N).sum() / normaliser, sums


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of steps, each (N,): supervised, reward in points, done, accepted."""

    supervised: Tensor
    reward: Tensor
    done: Tensor
    accepted: Tensor

    @classmethod
    def of(cls, steps: Sequence[BranchSteps]) -> Outcomes:
        return cls(*(torch.cat([getattr(s, field.name) for s in steps]) for field in fields(cls)))

    @property
    def recorded(self) -> Tensor:
        """Supervised steps with a recorded reward, (N,) bool."""
        return self.supervised & ~self.reward.isnan()


def reward_loss(logits_NC: Tensor, outcomes: Outcomes) -> Term:
    """Cross-entropy of the rewards at supervised steps (LoopWM, equation 10: l_rew), summed.

    The two classes around a reward that is no whole number share the target. Diagnostics: reward_loss, and
    reward_accuracy: the share of steps whose most probable class is nearest to the reward.
    """
    wanted = outcomes.recorded
    logits, reward = logits_NC[wanted].float(), outcomes.reward[wanted]
    target = shares(reward.clamp(-MOST_POINTS, MOST_POINTS) + MOST_POINTS, logits.shape[-1])
    loss = F.cross_entropy(logits, target, reduction="none")
    right = (logits.argmax(-1) == target.argmax(-1)).float()
    return loss.sum(), {"reward_loss": _pair(loss), "reward_accuracy": _pair(right)}


def continuation_loss(logits_N: Tensor, outcomes: Outcomes) -> Term:
    """Binary cross-entropy of continuation at supervised steps (LoopWM, equation 10: l_cont), summed.

    Diagnostics: continue_loss and continue_accuracy.
    """
    wanted = outcomes.recorded
    return _chance_loss("continue", logits_N[wanted], ~outcomes.done[wanted])


def acceptance_loss(logits_N: Tensor, outcomes: Outcomes) -> Term:
    """Binary cross-entropy of acceptance at supervised steps, summed. Diagnostics: accept_loss and accept_accuracy."""
    return _chance_loss("accept", logits_N[outcomes.supervised], outcomes.accepted[outcomes.supervised])


def _chance_loss(name: str, logits_N: Tensor, target_N: Tensor) -> Term:
    logits, target = logits_N.float(), target_N.float()
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    right = ((logits > 0) == (target > 0)).float()
    return loss.sum(), {f"{name}_loss": _pair(loss), f"{name}_accuracy": _pair(right)}


def consistency_loss(summary_ND: Tensor, reference_ND: Tensor, deepest_N: Tensor) -> Term:
    """Sum over branches of 1/(K-1) sum_{k=1}^{K-1} |g_omega(h_k) - e*_k|^2 (LoopWM, equation 20).

    Both sides are unit vectors (N, D) at the N steps between. Diagnostics: consistency_loss, of one branch.

    Args:
        summary_ND: g_omega(h_k).
        reference_ND: e*_k; receives no gradient.
        deepest_N: K of the steps' branches.
    """
    distance = (summary_ND - reference_ND.detach()).square().sum(-1)
    share = 1 / (deepest_N - 1)  # steps between exist from K = 2 on
    loss = (distance * share).sum()
    return loss, {"consistency_loss": torch.stack((loss.detach(), share.sum()))}


def contraction_loss(h_NMD: Tensor, steps: BranchSteps, c_max: Tensor) -> Term:
    """Sum over branches of max(0, sum_k rms(h_{k+1} - h_k) - K C_max) (LoopWM, equation 22).

    The norm is a root mean square over slots and width, so that C_max does not depend on the width. Diagnostics:
    contraction_loss of a branch, latent_step_rms of a step, first_step_rms of the step from h_0.
    """
    later = (steps.horizon > 0).nonzero()[:, 0]
    h = h_NMD.float()
    # Steps of a branch are adjacent, so the step before is one index back.
    moved = ((h[later] - h[later - 1]).square().mean((1, 2)) + TINY).sqrt()
    excess = moved.new_zeros(steps.branches).index_add(0, steps.branch[later], moved - c_max)  # K times C_max in all
    loss = excess.relu()
    first = moved[steps.horizon[later] == 1]
    numbers = {"contraction_loss": loss, "latent_step_rms": moved, "first_step_rms": first}
    return loss.sum(), {name: _pair(values) for name, values in numbers.items()}


def bag_of_words_loss(logits_NV: Tensor, token_NO: Tensor, weight_NO: Tensor) -> Term:
    """Cross-entropy of one distribution over the vocabulary against the distinct tokens of o_k.

    Tokens count in proportion to their weights.

    Summed over the steps (Zhao et al., 2017, arXiv:1703.10960, section 3.3: the bag-of-word loss). Only the last step
    of a deferred plan is decoded, so without this term earlier latents learn from that observation only. It trains
    each latent on its own step, so that a later action can read that an earlier one was refused. Ours, not LoopWM's.
    Steps without weights are left out. Diagnostics: bag_loss, of a step.
    """
    target_NV = logits_NV.new_zeros(logits_NV.shape, dtype=torch.float32)
    target_NV = target_NV.scatter_reduce(1, token_NO, weight_NO, "amax")  # repeated tokens count once, padding by 0
    weighted = target_NV.sum(1) > 0
    target_NV = target_NV[weighted] / target_NV[weighted].sum(1, keepdim=True)
    loss = F.cross_entropy(logits_NV[weighted].float(), target_NV, reduction="none")
    return loss.sum(), {"bag_loss": _pair(loss)}


def state_words_loss(name: str, logits: Sequence[Tensor], bags: Sequence[WordBags]) -> Term:
    """Sum `bag_of_words_loss` over groups of steps for a text of the state after them, such as `look`.

    A refused action has the same words as every other, so the words of its observation do not say what is held after
    it. Ours, not LoopWM's. Diagnostics: look_loss or inventory_loss, of a step.
    """
    terms = [bag_of_words_loss(x, bag.tokens, bag.weight) for x, bag in zip(logits, bags, strict=True)]
    loss, numbers = reduce(_added, terms)
    return loss, {f"{name}_loss": numbers["bag_loss"]}


@torch.no_grad()
def recurrence_norms(batch: TreeBatch, out: RowOutput) -> dict[str, Tensor]:
    """Return state_rms and last_step_rms as pairs over rows.

    They are the rms of h^(T) and of its last step in each row's batch.
    """
    real, rows = batch.branch >= 0, len(batch.row_ids)
    state, previous = out.state[real], out.previous_state[real]
    norms = {"state_rms": state, "last_step_rms": state - previous}  # padding has no part in them
    return {name: _pair(x.square().mean().sqrt().expand(rows)) for name, x in norms.items()}


def _pair(values: Tensor) -> Tensor:
    """Return the sum and the number of values."""
    return torch.stack((values.detach().sum(), torch.tensor(float(len(values)), device=values.device)))


def _added(one: Term, other: Term) -> Term:
    """Add two terms with the same diagnostics."""
    return one[0] + other[0], {name: number + other[1][name] for name, number in one[1].items()}


class TextObjective(nn.Module):
    """Model and loss in one module, so that data-parallel wrappers see one forward.

    first_steps: rms of the step from h_0 to h_1 in the last optimiser steps, the newest last. A buffer, so that it is
    saved and resumed with a run.
    """

    first_steps: Tensor

    def __init__(self, model: LoopWMForCausalLM, objective: ObjectiveConfig | None = None) -> None:
        super().__init__()
        self.model = model
        self.objective = c = objective or ObjectiveConfig()
        self.bag = BagHead(model.config.hidden_size) if c.bag_coef else None
        self.state_bags = nn.ModuleList(BagHead(model.config.hidden_size) for _ in STATE_KINDS if c.state_coef)
        self.register_buffer("first_steps", torch.full((MEDIAN_STEPS,), torch.nan))  # NaN: not filled yet

    def forward(self, batch: TreeBatch, depth: DepthPlan | int, normaliser: float) -> Term:
        """Compute the loss of a batch (LoopWM, equation 10); `normaliser` is the number of targets of the global batch.

        Diagnostics: those of every term, and state_rms and last_step_rms of the recurrence.
        """
        out = run_rows(self.model.model, batch, depth)
        wanted = batch.label != IGNORED
        logits = self.model.lm_head(out.last_hidden_state[wanted])  # most columns are no target
        target_N = batch.label[wanted]
        loss_N = F.cross_entropy(logits.float(), target_N, reduction="none")  # float32 also under autocast
        # A target starts an observation if the position before it is none.
        starts_N = (wanted & ~F.pad(wanted, (1, -1)))[wanted]
        right_N = logits.argmax(-1) == target_N
        loss, diagnostics = observation_loss(
            loss_N,
            batch.weight[wanted],
            right_N,
            batch.horizon[wanted],
            starts_N,
            batch.undetermined[wanted],
            normaliser,
        )
        for weight, (term, numbers) in self._branch_terms(batch, out):
            loss = loss + weight * term / normaliser  # all by target tokens: see `ObjectiveConfig`
            diagnostics |= numbers
        return loss, diagnostics | recurrence_norms(batch, out)

    def _branch_terms(self, batch: TreeBatch, out: RowOutput) -> Iterator[tuple[float, Term]]:
        """Yield the terms on the latents of the branches, each with its coefficient (LoopWM, equation 22)."""
        model, c, steps = self.model.model, self.objective, batch.steps
        groups = (steps, batch.trunk_steps)
        h_NMD = steps.at_slots(out.latent[..., : model.config.hidden_size])
        measured = h_NMD if c.contraction_coef else h_NMD.detach()  # always logged; detached, it costs nothing
        yield c.contraction_coef, contraction_loss(measured, steps, self.c_max())
        if model.heads is not None:
            reward, continuation, acceptance = model.heads(torch.cat([s.at_slots(out.latent) for s in groups]))
            outcomes = Outcomes.of(groups)
            yield c.reward_coef, reward_loss(reward, outcomes)
            yield c.continue_coef, continuation_loss(continuation, outcomes)
            yield c.accept_coef, acceptance_loss(acceptance, outcomes)
        if model.monitor is not None:
            at = steps.between
            reference = model.embed_observations(steps.observation[at], steps.observation_length[at])
            yield c.consistency_coef, consistency_loss(model.monitor(h_NMD[at]), reference, steps.deepest[at])
        # The last one reads the state, before the coda: later columns attend to the coda's input, not to its output.
        if self.bag is not None:
            words = [self.model.lm_head(self.bag(s.at_slots(out.state))) for s in groups]
            pairs = zip(words, groups, strict=True)
            yield c.bag_coef, _added(*(bag_of_words_loss(x, s.observation, s.observation_weight) for x, s in pairs))
        with_state = [s for s in groups if s.state]  # a group without a step has no texts
        for i, head in enumerate(self.state_bags if with_state else ()):
            words = [self.model.lm_head(head(s.at_slots(out.state))) for s in with_state]
            bags = [s.state[i] for s in with_state]
            yield c.state_coef, state_words_loss(STATE_NAMES[i], words, bags)

    def c_max(self) -> Tensor:
        """Return C_max (LoopWM, equation 21): twice the running median of a step's rms; infinite at first."""
        return (2 * self.first_steps.nanmedian()).nan_to_num(nan=torch.inf)

    def remember_first_step(self, rms: float) -> None:
        """Add the mean rms of an optimiser step's steps from h_0 to h_1 to the running median."""
        self.first_steps.copy_(torch.cat((self.first_steps[1:], self.first_steps.new_tensor([rms]))))
