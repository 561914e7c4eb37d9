"""The training loop: accumulation, clipping, logging, evaluation, checkpoints, exact resume.

State of a run lies in its folder: config.yaml, provenance.json, metrics.jsonl, TensorBoard events, checkpoints and
the exported model. A checkpoint folder is written whole and then renamed; resuming takes the newest one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from loopwm.text.objective import MAX_HORIZON
from loopwm.text.tree import TreeBatch
from loopwm.training.config import ConfigError, TrainingConfig
from loopwm.training.optimizer import build_optimizers, learning_rate_factor, set_learning_rate
from loopwm.training.provenance import provenance
from loopwm.training.rows import Cursor
from loopwm.training.text import TextProgram


@dataclasses.dataclass
class Totals:
    """Sums over the micro-batches of a step: losses and counts by horizon, real tokens, rows and loops.

    pairs: every other diagnostic of the objective by name, as sum and count.
    """

    loss: Tensor
    targets: Tensor
    right: Tensor
    tokens: float = 0.0
    rows: float = 0.0
    loops: float = 0.0
    pairs: dict[str, Tensor] = dataclasses.field(default_factory=dict)


class Trainer:
    def __init__(self, config: TrainingConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        precision = config.run.mixed_precision
        self.accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
        if config.batch.micro_batches % self.accelerator.num_processes:
            raise ConfigError(
                f"batch.micro_batches: {config.batch.micro_batches} cannot be shared by "
                f"{self.accelerator.num_processes} processes"
            )
        torch.manual_seed(config.run.seed)
        self.program = TextProgram(config)
        optimizers = build_optimizers(self.program.objective, config.optimizer)
        prepared = self.accelerator.prepare(self.program.objective, *optimizers)
        self.objective, self.optimizers = prepared[0], list(prepared[1:])
        self.step = 0
        self.cursor = Cursor()
        self._prepare_folder()
        self._resume()
        self.writer = SummaryWriter(str(folder / "tensorboard")) if self.accelerator.is_main_process else None

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self, max_minutes: float | None = None) -> None:
        """Trains up to config.run.steps, or until `max_minutes` have passed, then saves and exports."""
        started = time.monotonic()
        main = self.accelerator.is_main_process
        bar = tqdm(total=self.config.run.steps, initial=self.step, disable=not main, unit="step", mininterval=5)
        for batches, cursor in self.program.global_batches(self.cursor, self.step):
            if self.step >= self.config.run.steps or self._out_of_time(started, max_minutes):
                break
            record = self._train_step(batches)
            self.step, self.cursor = self.step + 1, cursor
            bar.update()
            bar.set_postfix_str(_summary(record))
            self._after_step(record)
        bar.close()
        self._save()
        if main:
            self.program.export(self.folder / "model")

    def _out_of_time(self, started: float, max_minutes: float | None) -> bool:
        spent = max_minutes is not None and time.monotonic() - started > 60 * max_minutes
        # Every process must stop at the same step.
        flag = torch.tensor(float(spent), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item() > 0)

    def _after_step(self, record: dict[str, float]) -> None:
        run = self.config.run
        if self.step % run.log_every == 0:
            self._log("train", record)
        if self.step % run.eval_every == 0:
            self._log("dev", self.evaluate())
        if self.step % run.save_every == 0:
            self._save()

    # -- one step ------------------------------------------------------------------------------------------------

    def _train_step(self, batches: list[TreeBatch]) -> dict[str, float]:
        started = time.monotonic()
        optimizer_config = self.config.optimizer
        rate = optimizer_config.learning_rate * learning_rate_factor(self.step, self.config.run.steps, optimizer_config)
        set_learning_rate(self.optimizers, rate)
        totals = self._accumulate(batches)
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), optimizer_config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        record = self._record(totals)
        record |= self.program.after_step(record)
        seconds = time.monotonic() - started
        record |= {"rate": rate, "grad_norm": float(norm), "tokens_per_s": record["tokens"] / seconds}
        return record

    def _accumulate(self, batches: list[TreeBatch]) -> Totals:
        """Back-propagates this process's share of the global batch."""
        device, world = self.accelerator.device, self.accelerator.num_processes
        normaliser = sum(batch.targets for batch in batches)
        share = batches[self.accelerator.process_index :: world]
        totals = _empty_totals(device)
        for i, batch in enumerate(share):
            moved = batch.to(device)
            plan = self.program.depth_plan(self.step, moved)
            last = i + 1 == len(share)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.objective):
                with self.accelerator.autocast():
                    loss, diagnostics = self.objective(moved, plan, normaliser)
                # Data parallel averages gradients over processes; the loss is a sum over the global batch.
                self.accelerator.backward(loss * world)
            _add(totals, batch, diagnostics, sum(plan.loops))
        return totals

    def _record(self, totals: Totals) -> dict[str, float]:
        """Sums of all processes as readable numbers."""
        reduced = {
            f.name: self.accelerator.reduce(
                torch.as_tensor(getattr(totals, f.name), device=self.accelerator.device, dtype=torch.float32), "sum"
            )
            for f in dataclasses.fields(totals)
            if f.name != "pairs"
        }
        loss, targets, right = reduced["loss"], reduced["targets"], reduced["right"]
        record = {
            "loss": (loss.sum() / targets.sum()).item(),
            "tokens": reduced["tokens"].item(),
            "mean_depth": (reduced["loops"] / reduced["rows"]).item(),
        }
        for k in torch.nonzero(targets).flatten().tolist():
            record[f"loss_k{k}"] = (loss[k] / targets[k]).item()
            record[f"token_accuracy_k{k}"] = (right[k] / targets[k]).item()
        for name, pair in totals.pairs.items():
            total, count = self.accelerator.reduce(pair, "sum").tolist()
            if count:
                record[name] = total / count
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Teacher-forced loss by horizon on the dev stream at the default depth."""
        batches = self.program.evaluation_batches()
        if not batches:
            return {}
        device = self.accelerator.device
        totals = _empty_totals(device)
        self.objective.eval()
        depth = self.program.model_config.default_depth
        for batch in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
            with self.accelerator.autocast():
                _, diagnostics = self.objective(batch.to(device), depth, 1.0)
            _add(totals, batch, diagnostics, depth * len(batch.row_ids))
        self.objective.train()
        return self._record(totals)

    # -- what lies on disk ---------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        """Writes config and provenance, or refuses a folder that belongs to another configuration."""
        path = self.folder / "config.yaml"
        text = yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(self.config))), sort_keys=False)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path}: the run folder belongs to another configuration")
        if self.accelerator.is_main_process and not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            info = provenance(self.config, self.accelerator.num_processes)
            (self.folder / "provenance.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-????????"))

    def _save(self) -> None:
        final = self.folder / "checkpoints" / f"step-{self.step:08d}"
        if final.exists():
            return
        temporary = final.with_name(f"tmp-{final.name}")
        self.accelerator.save_state(str(temporary), safe_serialization=True)
        if self.accelerator.is_main_process:
            cursor = dataclasses.asdict(self.cursor)
            progress = {"step": self.step, "cursor": cursor, "program": self.program.state_dict()}
            (temporary / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
            temporary.rename(final)
            for old in self._checkpoints()[: -self.config.run.keep_checkpoints]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        """Continues from the newest checkpoint; metrics written after it are dropped."""
        checkpoints = self._checkpoints()
        if checkpoints:
            self.accelerator.load_state(str(checkpoints[-1]))
            progress = json.loads((checkpoints[-1] / "progress.json").read_text(encoding="utf-8"))
            self.step, self.cursor = progress["step"], Cursor(**progress["cursor"])
            self.program.load_state_dict(progress["program"])
        if self.accelerator.is_main_process:
            for torn in (self.folder / "checkpoints").glob("tmp-*"):
                shutil.rmtree(torn)
            self._truncate_metrics()

    def _truncate_metrics(self) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= self.step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.rename(path)

    def _log(self, kind: str, record: dict[str, float]) -> None:
        if self.writer is None:
            return
        for name, value in record.items():
            self.writer.add_scalar(f"{kind}/{name}", value, self.step)
        line = json.dumps({"step": self.step, "kind": kind, **record})
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")


def _empty_totals(device: torch.device) -> Totals:
    loss, targets, right = (torch.zeros(MAX_HORIZON + 1, device=device) for _ in range(3))
    return Totals(loss, targets, right)


def _add(totals: Totals, batch: TreeBatch, diagnostics: dict[str, Tensor], loops: int) -> None:
    pairs = dict(diagnostics)
    totals.loss += pairs.pop("loss")
    totals.targets += pairs.pop("targets")
    totals.right += pairs.pop("right")
    totals.tokens += float((batch.branch >= 0).sum())
    totals.rows += len(batch.row_ids)
    totals.loops += loops
    for name, pair in pairs.items():
        totals.pairs[name] = totals.pairs[name] + pair if name in totals.pairs else pair


def _summary(record: dict[str, Any]) -> str:
    return (
        f"loss {record['loss']:.3f} {record['tokens_per_s']:.0f} tokens/s depth {record['mean_depth']:.1f} "
        f"|h| {record['state_rms']:.2f} |dh| {record['last_step_rms']:.2f}"
    )
