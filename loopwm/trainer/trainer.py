"""Training loop: accumulation, clipping, logging, evaluation, checkpoints, exact resume.

A run's folder contains config.yaml, provenance.json, metrics.jsonl, TensorBoard events, checkpoints and the exported
model. A checkpoint folder is written whole and then renamed; resuming takes the newest one. A run may start from a
checkpoint of another, to continue a plateau of the learning rate on other data or to cool down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from loopwm.core.block import checkpoint_blocks, compile_blocks
from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic, writing
from loopwm.records.run_folder import RunFolder, where_from
from loopwm.runtime import Precision, compiler_found, faster_precision, product_rate, use_device
from loopwm.trainer.optimizer import build_optimizers, learning_rate_factor
from loopwm.trainer.program import MicroBatch, Program, SystemConfig

# Tied embeddings are stored once, which accelerate warns of at every checkpoint.
logging.getLogger("accelerate.utils.other").addFilter(lambda record: "shared tensor" not in record.getMessage())

TENSORBOARD = "tensorboard"

Config = TypeVar("Config", bound=SystemConfig)


class Trainer(Generic[Config]):
    """Trains a program's objective in a run folder.

    Args:
        config: of the run.
        program: called after the random state is seeded, so that initial weights follow from the seed.
        folder: run folder; resumed if it has a checkpoint.
        start_from: checkpoint of another run, from which a fresh run takes weights, optimiser states, average and
            number of steps; its rows start over. Raises InputError if it does not fit.
        clock: returns seconds.
    """

    def __init__(
        self,
        config: Config,
        program: Callable[[Config], Program],
        folder: Path,
        start_from: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self._last = clock, clock()
        self.config, self.minutes = config, config.run.minutes
        self.folder = folder
        self.files = RunFolder(folder, "step", config.run.keep_checkpoints)
        device = use_device("auto")
        # Accelerate has to know the precision when it starts, and the precision which rank measures it.
        ranks = PartialState(cpu=device.type == "cpu")
        self.precision = self._precision(ranks, device)
        self.accelerator = Accelerator(mixed_precision=self.precision, cpu=device.type == "cpu")
        torch.manual_seed(config.run.seed)
        self.program = program(config)
        if self.program.micro_batches % self.accelerator.num_processes:
            raise InputError(
                f"batch.micro_batches: {self.program.micro_batches} cannot be shared by "
                f"{self.accelerator.num_processes} processes"
            )
        if config.run.compile_layers and compiler_found():
            compile_blocks(self.program.objective, dynamic=device.type == "cpu")
        if config.run.activation_checkpointing:
            checkpoint_blocks(self.program.objective)
        self.objective, self.optimizers = self._prepared()
        self.average = self._average()
        self.step = 0
        self.seconds = 0.0
        """Time of the run, also before an interruption."""
        self.loader_state = self.program.loader_state_type()
        if start_from is not None and not self.files.checkpoints():
            self._load(start_from)
        self._prepare_folder()
        self._resume()
        with writing(folder / TENSORBOARD):
            main = self.accelerator.is_main_process
            self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=self.step + 1) if main else None

    def _precision(self, ranks: PartialState, device: torch.device) -> Precision:
        """Return the precision of the run.

        `auto` is bfloat16 on a GPU. On a CPU rank 0 measures it once; a resumed run keeps it, since losses differ
        between precisions.
        """
        configured = self.config.run.mixed_precision
        if configured != "auto":
            return configured
        if device.type == "cuda":
            return "bf16"
        choice: list[Any] = [None]
        if ranks.is_main_process:
            choice = [self.files.provenance().get("precision") or faster_precision()]
        return broadcast_object_list(choice)[0]

    def _prepared(self) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Return objective and optimisers for all processes; sharded if accelerate was launched with FSDP.

        FSDP gathers all weights once a micro-batch and not those of a layer whenever it runs: a loop would gather its
        layers in every pass, and processes whose rows loop less often would keep the others waiting.
        """
        objective = self.program.objective
        if os.environ.get("ACCELERATE_USE_FSDP", "false") == "true" and self.accelerator.num_processes > 1:
            # By torch itself: accelerate shards on GPUs only, and saves a single optimiser.
            fully_shard(objective.to(self.accelerator.device))
            return objective, build_optimizers(objective, self.config.optimizer)
        prepared = self.accelerator.prepare(objective, *build_optimizers(objective, self.config.optimizer))
        return prepared[0], list(prepared[1:])

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self, max_minutes: float | None = None) -> None:
        """Train up to config.run.steps, or until `max_minutes` have passed; then save and export."""
        started = time.monotonic()
        main = self.accelerator.is_main_process
        if main:
            precision = "float32" if self.precision == "no" else self.precision
            print(f"{self.program.size()}, {precision} on {self.accelerator.device.type}", flush=True)
        throughput = Throughput(self._roof())
        processes = self.accelerator.num_processes
        with self._bar(disable=not main) as bar:
            for batches, loader_state in self.program.global_batches(self.loader_state, self.step, processes):
                if self._finished() or self._out_of_time(started, max_minutes):
                    break
                record = self._train_step(batches)
                self.step, self.loader_state = self.step + 1, loader_state
                record |= throughput.add(record["tokens"], record.pop("flops", None))
                self._advance(bar)
                bar.set_postfix_str(self._summary(record))
                if self.step % self.config.run.log_every == 0:
                    self._log("train", record)
                    throughput.restart()
                self._after_step()
        self._save()
        self._export()

    def _bar(self, disable: bool) -> tqdm[Any]:
        total, initial, unit = self.config.run.steps, self.step, "step"
        if self.minutes:
            total, initial, unit = round(60 * self.minutes), round(self.seconds), "s"
        return tqdm(total=total, initial=initial, disable=disable, unit=unit, mininterval=5)

    def _advance(self, bar: tqdm[Any]) -> None:
        now = self.clock()
        self.seconds, self._last = self.seconds + now - self._last, now
        bar.update(round(min(self.seconds, 60 * self.minutes)) - bar.n if self.minutes else 1)

    def _done(self) -> float:
        """Return the share of the run that is behind it, the same in every process."""
        if not self.minutes:
            return self.step / self.config.run.steps
        seconds = torch.tensor(self.seconds, device=self.accelerator.device)
        return min(1.0, self.accelerator.reduce(seconds, "max").item() / (60 * self.minutes))

    def _finished(self) -> bool:
        return self._done() >= 1

    def _export(self) -> None:
        with self._averaged(), self._gathered():
            if self.accelerator.is_main_process:
                self.program.export(self.folder / "model")
            self.accelerator.wait_for_everyone()

    def _out_of_time(self, started: float, max_minutes: float | None) -> bool:
        spent = max_minutes is not None and time.monotonic() - started > 60 * max_minutes
        # Every process must stop at the same step.
        flag = torch.tensor(float(spent), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum").item() > 0)

    def _roof(self) -> float:
        """Measure the rate of matrix products, summed over the processes, which measure at the same time."""
        rate = torch.tensor(
            product_rate(self.accelerator.mixed_precision, self.accelerator.device), dtype=torch.float64
        )
        return float(self.accelerator.reduce(rate.to(self.accelerator.device), "sum").item())

    def _after_step(self) -> None:
        run = self.config.run
        if self.step % run.eval_every == 0:
            self._log("dev", self.evaluate())
        if self.step % run.save_every == 0:
            self._save()

    # -- one step ------------------------------------------------------------------------------------------------

    def _train_step(self, batches: list[MicroBatch]) -> dict[str, float]:
        optimizer_config = self.config.optimizer
        rate = optimizer_config.learning_rate * learning_rate_factor(self.step, self._done(), optimizer_config)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        sums = self._accumulate(batches)
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), optimizer_config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.accelerator.unwrap_model(self.objective))
        record = self._record(sums)
        if not math.isfinite(record["loss"]):  # before a checkpoint of it takes the place of a good one
            raise InputError(f"step {self.step + 1}: loss is {record['loss']}; lower optimizer.learning_rate")
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return record | self.program.after_step(record) | {"rate": rate, "grad_norm": float(norm)}

    def _accumulate(self, batches: list[MicroBatch]) -> dict[str, Tensor]:
        """Back-propagate this process's share of the global batch and sum its measurements."""
        world = self.accelerator.num_processes
        normaliser = self.program.normaliser(batches)
        share = batches[self.accelerator.process_index :: world]
        sums: dict[str, Tensor] = {}
        for i, batch in enumerate(share):
            moved = batch.to(self.accelerator.device)
            last = i + 1 == len(share)
            with contextlib.nullcontext() if last or self._sharded else self.accelerator.no_sync(self.objective):
                with self.accelerator.autocast():
                    loss, measured = self.program.loss(self.objective, moved, self.step, normaliser)
                # Data parallel averages gradients over processes; the loss is a sum over the global batch.
                self.accelerator.backward(loss * world)
            _add(sums, measured)
        return sums

    def _record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Convert the measurements of all processes to numbers.

        A process may lack a measurement, such as a horizon that its batches do not have. It still takes part with
        zeros:
        processes that reduce different tensors would deadlock.
        """
        shapes = {name: value.shape for name, value in sums.items()}
        everywhere = {name: shape for theirs in gather_object([shapes]) for name, shape in theirs.items()}
        device = self.accelerator.device
        mine = [sums.get(name, torch.zeros(shape, device=device)) for name, shape in sorted(everywhere.items())]
        # One transfer from the device, which would otherwise be waited for once a number.
        flat = torch.cat([value.float().flatten() for value in mine])
        parts = self.accelerator.reduce(flat, "sum").cpu().split([value.numel() for value in mine])
        return self.program.record(
            {name: part.view(everywhere[name]) for name, part in zip(sorted(everywhere), parts, strict=True)}
        )

    def _summary(self, record: Mapping[str, float]) -> str:
        roof = f" ({record['roof_share']:.0%} of the roof)" if "roof_share" in record else ""
        speed = f"{record['tokens_per_s']:.0f} tokens/s{roof}"
        return f"loss {record['loss']:.3f} {speed} {self.program.summary(record)}"

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        batches = self.program.evaluation_batches()
        if not batches:
            return {}
        sums: dict[str, Tensor] = {}
        self.objective.eval()
        with self._averaged(), self._gathered():  # processes may have different numbers of batches
            for batch in batches[self.accelerator.process_index :: self.accelerator.num_processes]:
                with self.accelerator.autocast():
                    _add(sums, self.program.evaluation(self.objective, batch.to(self.accelerator.device)))
        self.objective.train()
        return self._record(sums)

    # -- the average of the weights ------------------------------------------------------------------------------

    def _average(self) -> AveragedModel | None:
        if not self.config.optimizer.average:
            return None
        if self._sharded:
            raise InputError("optimizer.average: must be 0 with FSDP, whose weights lie in parts")
        if any(isinstance(module, torch.nn.BatchNorm2d) for module in self.objective.modules()):
            raise InputError("optimizer.average: must be 0 for a model with batch norm, whose statistics it lacks")
        averaging = get_ema_multi_avg_fn(self.config.optimizer.average)
        average = AveragedModel(self.accelerator.unwrap_model(self.objective), multi_avg_fn=averaging)
        self.accelerator.register_for_checkpointing(average)
        return average

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Swap the objective's weights for their average inside the block."""
        if self.average is None:
            yield
            return
        weights = list(self.accelerator.unwrap_model(self.objective).parameters())
        own = [weight.detach().clone() for weight in weights]
        _set(weights, self.average.parameters())
        try:
            yield
        finally:
            _set(weights, own)

    @property
    def _sharded(self) -> bool:
        return isinstance(self.objective, FSDPModule)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Give every process all weights inside the block. All processes must enter it."""
        if not isinstance(self.objective, FSDPModule):
            yield
            return
        self.objective.unshard()
        try:
            yield
        finally:
            self.objective.reshard()

    # -- what lies on disk ---------------------------------------------------------------------------------------

    def _prepare_folder(self) -> None:
        self.files.check(self.config)
        data, before = self.program.provenance(), self.files.provenance()
        if any(name in before and before[name] != data.get(name) for name in ("data", "transitions")):
            raise InputError(f"{self.folder}: must go on with the data it began with, which has changed since")
        if self.accelerator.is_main_process:
            info = where_from(self.config.run.seed, self.accelerator.num_processes) | data
            info["precision"] = self.precision
            self.files.claim(self.config, info)
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.files.has(self.step):
            return
        folder = self.files.begin_checkpoint(self.step)
        with writing(folder):
            if self._sharded:
                sharded.save(self._state(), checkpoint_id=folder)
            else:
                self.accelerator.save_state(str(folder), safe_serialization=True)
        self.accelerator.wait_for_everyone()  # each process writes its own random state
        if self.accelerator.is_main_process:
            loader_state = dataclasses.asdict(self.loader_state)
            progress = {"step": self.step, "cursor": loader_state, "program": self.program.state_dict()}
            if self.minutes:  # checkpoints of a run of steps are the same at any speed
                progress["seconds"] = self.seconds
            write_atomic(folder / "progress.json", json.dumps(progress))
            self.files.finish_checkpoint(self.step)
        self.accelerator.wait_for_everyone()

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        """Load weights, optimiser and program states; return the checkpoint's progress. Raises InputError."""
        try:
            if self._sharded:
                state = self._state()
                sharded.load(state, checkpoint_id=checkpoint)
                parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizers"]}
                set_state_dict(self.objective, self.optimizers, **parts)
            else:
                self.accelerator.load_state(str(checkpoint))
            progress: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
            self.step = progress["step"]
            self.program.load_state_dict(progress["program"])
        except Exception as error:  # the loaders raise many types for a damaged or foreign checkpoint
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"{checkpoint}: no checkpoint that this configuration can start from: {reason}") from error
        return progress

    def _state(self) -> dict[str, Any]:
        """Return this process's parts of weights and optimiser states. All processes must call it."""
        model, optimizers = get_state_dict(self.objective, self.optimizers)
        return {"model": model, "optimizers": optimizers}

    def _resume(self) -> None:
        """Continue from the newest checkpoint; drop metrics written after it."""
        # Rank 0 chooses: on a shared disk, another rank may see one more checkpoint or one less.
        newest: Path | None = broadcast_object_list([next(reversed(self.files.checkpoints()), None)])[0]
        if newest is not None:
            progress = self._load(newest)
            self.loader_state = self.program.loader_state_type(**progress["cursor"])
            self.seconds = progress.get("seconds", 0.0)
        if self.accelerator.is_main_process:
            self.files.go_on_from(self.step)

    def _log(self, kind: str, record: dict[str, float]) -> None:
        if self.writer is None:
            return
        with writing(self.folder / TENSORBOARD):
            for name, value in record.items():
                self.writer.add_scalar(f"{kind}/{name}", value, self.step)
        self.files.log(self.step, {"kind": kind, **record})


@torch.no_grad()
def _set(weights: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _add(sums: dict[str, Tensor], measured: Mapping[str, Tensor]) -> None:
    for name, value in measured.items():
        sums[name] = sums[name] + value if name in sums else value


class Throughput:
    """Tokens and FLOPs of the optimiser steps since the last log, over the time since then by wall clock.

    Building batches, evaluation and saving count.
    """

    def __init__(self, roof: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock. roof: FLOPs a second of the matrix products of all processes."""
        self._roof = roof
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far."""
        self._since = self._clock()
        self._tokens = self._flops = 0.0

    def add(self, tokens: float, flops: float | None) -> dict[str, float]:
        """Count a step and return the rates to log.

        These are tokens_per_s and, where FLOPs are known, flops_per_token and roof_share, the share of the
        roof that they reach.
        """
        self._tokens += tokens
        seconds = self._clock() - self._since
        rates = {"tokens_per_s": self._tokens / seconds}
        if flops is not None:
            self._flops += flops
            rates["flops_per_token"] = self._flops / self._tokens
            rates["roof_share"] = self._flops / seconds / self._roof
        return rates
