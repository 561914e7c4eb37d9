"""Measurements of text runs: sums over micro-batches, and the numbers to log that are made of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from loopwm.core.depth import DepthPlan
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.tree import IGNORED, QUERY_HORIZON
from loopwm.text.model.configuration import LoopWMConfig
from loopwm.text.model.flops import row_flops

EXACT = {"exact": "observations", "answerable_exact": "answerable"}
"""Measurements of exact observations and what they are shares of: all, and those without undetermined tokens."""

BY_HORIZON = ("loss", "targets", "right", "undetermined_loss", "undetermined", *EXACT, *EXACT.values())
SUMS = {*BY_HORIZON, "tokens", "rows", "loops", "flops"}
"""Measurements that are no pairs of sum and count."""


def record(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return added measurements as numbers to log."""
    loss, targets, right = sums["loss"], sums["targets"], sums["right"]
    numbers = {
        "loss": (loss.sum() / targets.sum()).item(),
        "tokens": sums["tokens"].item(),
        "rows": sums["rows"].item(),
        "target_share": (targets.sum() / sums["tokens"]).item(),
        "mean_depth": (sums["loops"] / sums["rows"]).item(),
    }
    if "flops" in sums:
        numbers["flops"] = sums["flops"].item()
    for k in torch.nonzero(targets).flatten().tolist():
        numbers[f"loss_{_kind(k)}"] = (loss[k] / targets[k]).item()
        numbers[f"token_accuracy_{_kind(k)}"] = (right[k] / targets[k]).item()
    for name, value in sums.items():
        kind, _, source = name.partition("/")
        if kind in EXACT:
            numbers |= _exact(kind, value, sums[name.replace(kind, EXACT[kind], 1)], source)
        elif kind not in SUMS and value[1]:  # a count of 0: nothing was measured
            numbers[name] = (value[0] / value[1]).item()
    return numbers | _answerable(sums)


def _exact(kind: str, exact: Tensor, observations: Tensor, source: str) -> dict[str, float]:
    """Shares of observations that are right to the last token, by horizon, and how many there were."""
    at = f"/{source}" if source else ""
    record = {}
    for k in torch.nonzero(observations).flatten().tolist():
        record[f"{kind}_{_kind(k)}{at}"] = (exact[k] / observations[k]).item()
        record[f"{EXACT[kind]}_{_kind(k)}{at}"] = observations[k].item()
    return record


def _answerable(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the losses of determined and of undetermined targets, and dev_answerable.

    The latter, where groups of worlds and policies were measured apart, is the mean over groups of the share of
    answerable observations that are exact. State queries do not count there: no suite asks them.
    """
    record = {}
    undetermined, targets = sums["undetermined"].sum(), sums["targets"].sum()
    if undetermined > 0:
        record["undetermined_share"] = (undetermined / targets).item()
        record["loss_undetermined"] = (sums["undetermined_loss"].sum() / undetermined).item()
    if targets > undetermined:  # else no target is determined
        determined = sums["loss"].sum() - sums["undetermined_loss"].sum()
        record["loss_determined"] = (determined / (targets - undetermined)).item()
    groups = [
        (sums[name.replace("answerable", "answerable_exact", 1)][:QUERY_HORIZON].sum() / count).item()
        for name in sums
        if name.startswith("answerable/") and (count := sums[name][:QUERY_HORIZON].sum()) > 0
    ]
    return record | ({"dev_answerable": sum(groups) / len(groups)} if groups else {})


def _kind(horizon: int) -> str:
    """Name a horizon in records: k0 is the trunk."""
    return "query" if horizon == QUERY_HORIZON else f"k{horizon}"


def counts(batch: TreeBatch, loops: int, device: torch.device) -> dict[str, Tensor]:
    """Real tokens, rows and loops of a micro-batch."""
    rows = torch.tensor([len(batch.row_ids), loops], device=device)
    return {"tokens": (batch.branch >= 0).sum(), "rows": rows[0], "loops": rows[1]}


def flops(config: LoopWMConfig, batch: TreeBatch, plan: DepthPlan) -> Tensor:
    """Return the FLOPs of a micro-batch, forward and backward.

    A token's position is the number of tokens before it on its path, which are the keys that it attends to beside
    itself.
    """
    real = batch.branch >= 0
    tokens, keys = real.sum(1).float(), ((batch.positions + 1) * real).sum(1).float()
    loops = torch.tensor(plan.loops, dtype=torch.float32, device=real.device)
    targets = (batch.label != IGNORED).sum(1).float()
    return row_flops(config, tokens, keys, targets, loops, loops.clamp(max=plan.mu_bwd)).sum()
