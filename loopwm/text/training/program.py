"""Text system as a program of the trainer: builds the model, streams batches, evaluates, exports."""

from __future__ import annotations

import gc
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from loopwm.core.depth import DepthPlan, ramped_mean
from loopwm.records import template
from loopwm.records.errors import InputError
from loopwm.records.files import publish, read_json, writing
from loopwm.records.shards import read_shards
from loopwm.records.token_episode import TokenEpisode
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.data.collate import TreeBatch
from loopwm.text.data.data_loader import BatchStream, LoaderState, PlannedRow, horizons, make_sources
from loopwm.text.data.tree import RowBuilder, TargetWeights, TemplateIds, TreeRow, by_stage, trunk_and_branches
from loopwm.text.model.chat_template import chat_template
from loopwm.text.model.checkpoint import load_checkpoint
from loopwm.text.model.configuration import PRESETS, LoopWMConfig
from loopwm.text.model.flops import row_flops, training_flops
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import (
    TOKENIZER_FILE,
    integer_tokens,
    load_tokenizer,
    special_ids,
    start_with_fourier,
    tokenizer_hash,
)
from loopwm.text.training.config import ModelConfig, TrainingConfig
from loopwm.text.training.loss import TextObjective
from loopwm.text.training.measurements import EXACT, counts, flops, record

PREDICTED = ("reward_coef", "continue_coef", "accept_coef")
HEAD_OF = {**dict.fromkeys(PREDICTED, "prediction_heads"), "consistency_coef": "monitor_head"}
"""Switch of the model that a coefficient requires."""

OF_WEIGHTS = "weights"
"""Preset for the shape of `model.weights`."""

DEV_SEED = 0
"""Seed of the dev rows in every run, so that runs are compared on the same rows."""


@dataclass(frozen=True)
class DevBatch:
    """Rows of one world and policy, its `name`."""

    name: str
    rows: TreeBatch

    def to(self, device: torch.device) -> DevBatch:
        return replace(self, rows=self.rows.to(device))


def template_ids(tokenizer: PreTrainedTokenizerFast) -> TemplateIds:
    marks = (template.GOAL, template.HIDDEN, template.LOOK, template.INV, template.OBS, template.ACT)
    return TemplateIds(*special_ids(tokenizer, (*marks, template.STATE, template.END)))


def model_config(model: ModelConfig, vocab_size: int) -> LoopWMConfig:
    """Apply overrides to a preset, or to the shape of `model.weights`. Raises InputError."""
    if model.preset not in (known := (*PRESETS, OF_WEIGHTS)):
        raise InputError(f"model.preset: must be one of {', '.join(known)}, got {model.preset!r}")
    # Without the gate of the weights: see `new_model`.
    preset = PRESETS.get(model.preset) or read_json(Path(model.weights) / "config.json") | {"exit_gate": False}
    unknown = set(model.overrides) - set(LoopWMConfig().to_dict())
    if unknown:
        raise InputError(f"model.overrides.{min(unknown)}: unknown key")
    try:
        return LoopWMConfig(**{"vocab_size": vocab_size, **preset, **model.overrides})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise InputError(f"model.overrides: {' '.join(str(error).split())}") from error


def tokenizer_of(model: ModelConfig) -> Path:
    """Return the tokenizer file of a run: that of `model.weights` if its shape is used, too. Raises InputError."""
    if model.preset != OF_WEIGHTS:
        return TOKENIZER_FILE
    file = Path(model.weights) / TOKENIZER_FILE.name
    # Checkpoints spell the frozen tokenizer in another way than its file, of which shards have the hash.
    frozen = load_tokenizer(file).get_vocab() == load_tokenizer().get_vocab()
    return TOKENIZER_FILE if frozen else file


def new_model(
    model_config: LoopWMConfig, config: TrainingConfig, tokenizer: PreTrainedTokenizerFast
) -> LoopWMForCausalLM:
    """Build the model that a run starts from. Raises InputError for `model.weights` of another shape or tokenizer.

    An exit gate among the weights is dropped: it was fitted to weights that training will change.
    """
    model = LoopWMForCausalLM(model_config)
    if config.model.weights:
        initial, its_tokenizer = load_checkpoint(Path(config.model.weights))
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise InputError(f"model.weights: must have the run's tokenizer, got another in {config.model.weights}")
        try:
            gate = "model.core.gate."
            model.load_state_dict({k: weight for k, weight in initial.state_dict().items() if not k.startswith(gate)})
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"model.weights: {reason}; model.preset={OF_WEIGHTS} takes their shape") from error
    elif config.model.integers == "fourier":
        generator = torch.Generator().manual_seed(config.run.seed)
        start_with_fourier(model.model.embed_tokens.weight, tokenizer, generator)
    return model


def _most_tokens_per_byte(tokenizer: PreTrainedTokenizerFast, episodes: Sequence[TokenEpisode]) -> float:
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    sizes = np.array([len(name) for name in names])  # a byte-level BPE writes a byte as a character
    starts = (np.concatenate([episode.goal, episode.observations[0]]) for episode in episodes)
    return float(max(len(start) / sizes[start].sum() for start in starts))


class _Steps(IterableDataset[Any]):
    """Steps of a stream, every n-th in each of n workers, so that a loader returns them in their order."""

    def __init__(self, built: Callable[..., Iterator[Any]]) -> None:
        self._built = built

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None, "built in workers only"
        gc.freeze()  # collections would go through all episodes, and copy the memory that workers share
        return self._built((worker.id, worker.num_workers))


class TextProgram:
    loader_state_type = LoaderState

    def __init__(self, config: TrainingConfig) -> None:
        if not config.data.train:
            raise InputError("data.train: must name a shard folder, got none")
        self.config = config
        self.micro_batches = config.batch.micro_batches
        self.tokenizer_file = tokenizer_of(config.model)
        self.tokenizer = load_tokenizer(self.tokenizer_file)
        self.model_config = model_config(config.model, len(self.tokenizer))
        if self.model_config.exit_gate:
            # Nothing in the objective reaches the gate: it would only decay.
            raise InputError("model.overrides.exit_gate: must be false, got true (use python -m lab fit-gate)")
        for key, head in HEAD_OF.items():
            if getattr(config.objective, key) > 0 and not getattr(self.model_config, head):
                raise InputError(f"objective.{key}: must be 0 without model.overrides.{head}")
        self.objective = TextObjective(new_model(self.model_config, config, self.tokenizer), config.objective)
        made_with = tokenizer_hash(self.tokenizer_file)
        episodes = _episodes(config.data.train, config.data.folder_weights, made_with)
        self.training_episodes: TrainingEpisodes | None = TrainingEpisodes.of_shards(map(Path, config.data.train))
        """Episodes of the data and of the initial weights; None if the weights have no record of theirs."""
        self.model_config.tokens_per_byte = _most_tokens_per_byte(self.tokenizer, episodes)
        if config.model.weights:
            earlier = TrainingEpisodes.load(Path(config.model.weights))
            self.training_episodes = self.training_episodes.joined(earlier)
            self._join_tokens_per_byte(LoopWMConfig.from_pretrained(config.model.weights).tokens_per_byte)
        self._check_names(episodes)
        self.train_stream = self._stream(episodes, config.run.seed)
        self.dev_stream = self._stream(_episodes(config.data.dev, {}, made_with), DEV_SEED) if config.data.dev else None

    def _join_tokens_per_byte(self, earlier: float | None) -> None:
        """Take the larger limit of the run's data and of earlier training; None (unknown) if that had none."""
        current = self.model_config.tokens_per_byte
        self.model_config.tokens_per_byte = None if earlier is None or current is None else max(earlier, current)

    def _check_names(self, episodes: Sequence[TokenEpisode]) -> None:
        """Raise InputError for a world or task that a key names and that has no training episode."""
        data, objective = self.config.data, self.config.objective
        tasks_of_data = {(episode.env, episode.task) for episode in episodes}
        for env, task in ((env, task) for env, tasks in data.tasks.items() for task in tasks):
            if (env, task) not in tasks_of_data:
                raise InputError(f"data.tasks.{env}.{task}: must have an episode in data.train, got none")
        by_world = {
            "data.echo_weights": data.echo_weights,
            "objective.integer_weights": objective.integer_weights,
            "objective.opening_weights": objective.opening_weights,
        }
        for key, env in ((key, env) for key, weights in by_world.items() for env in weights):
            if env not in {world for world, _ in tasks_of_data}:
                raise InputError(f"{key}.{env}: must have an episode in data.train, got none")

    def _stream(self, episodes: Sequence[TokenEpisode], seed: int) -> BatchStream:
        integers = integer_tokens(self.tokenizer)
        worlds = {episode.env for episode in episodes}
        c = self.config.objective
        weights = {
            env: TargetWeights(
                dict.fromkeys(integers, c.integer_weights.get(env, 1.0)),
                c.opening_weights.get(env, 1.0),
                c.undetermined_weight,
            )
            for env in worlds
        }
        change_weight = c.state_change_weight if c.state_coef else 0.0
        builder = RowBuilder(template_ids(self.tokenizer), self.model_config.slots, weights, change_weight)
        (pad,) = special_ids(self.tokenizer, (template.PAD,))
        if self.config.batch.packed and not self.model_config.trunk_is_served:
            raise InputError("batch.packed: must be 0 for a model whose trunk is not served (propagate, decode_sees)")
        layout = trunk_and_branches if self.model_config.propagate == "none" else by_stage
        served = self.model_config.trunk_is_served
        sources = make_sources(episodes, self.config.data, self.config.objective, builder, served, seed)
        return BatchStream(sources, builder, self.config.batch, pad, layout)

    def size(self) -> str:
        """Return the parameters, and the FLOPs a token of a forward and backward pass at the mean depth."""
        config, model = self.model_config, self.objective.model
        keys = (self.config.data.trunk_tokens_min + self.config.data.trunk_tokens_max) // 4  # half of a trunk
        backward = self.config.depth.backward_loops or math.ceil(config.mu_rec / 2)
        cost = training_flops(config, config.mu_rec, backward, keys)
        return f"{model.num_parameters() / 1e6:.1f}M parameters, {cost / 1e6:.0f}M FLOPs a token"

    def global_batches(
        self, loader_state: LoaderState, step: int = 0, processes: int = 1
    ) -> Iterator[tuple[list[TreeBatch], LoaderState]]:
        """Yield the global batches from optimiser step `step` on, dealt to `processes` processes."""
        if not self.config.batch.workers:
            return self._built(loader_state, step, processes)
        # File names instead of open files: a batch has dozens of tensors, and many batches wait.
        torch.multiprocessing.set_sharing_strategy("file_system")
        batches = _Steps(partial(self._built, loader_state, step, processes))
        return iter(DataLoader(batches, batch_size=None, num_workers=self.config.batch.workers, prefetch_factor=4))

    def _built(
        self, loader_state: LoaderState, step: int, processes: int, worker: tuple[int, int] = (0, 1)
    ) -> Iterator[tuple[list[TreeBatch], LoaderState]]:
        curriculum = horizons(self.config.objective, self.config.data.max_horizon, step)
        costs = (partial(self._row_cost, at) for at in itertools.count(step))
        return self.train_stream.global_batches(loader_state, curriculum, costs, processes, worker)

    def _row_cost(self, step: int, index: int, row: TreeRow) -> float:
        """Return the FLOPs of a row of a step. A micro-batch that draws one depth for all its rows may draw another."""
        plan = self._draw(step, (index,))
        loops, keys = plan.loops[0], sum(row.positions) + len(row)  # each attends to its past and itself
        return row_flops(
            self.model_config, float(len(row)), float(keys), float(row.targets), loops, min(loops, plan.mu_bwd)
        )

    def evaluation_batches(self) -> list[DevBatch]:
        """Return the rows of the first `eval_batches` steps of the dev stream, by world and policy.

        They are the same every time.
        """
        if self.dev_stream is None:
            return []
        sources: dict[str, list[PlannedRow]] = {}
        for rows, _ in itertools.islice(self.dev_stream.steps(LoaderState()), self.config.run.eval_batches):
            for planned in rows:
                sources.setdefault(f"{planned.episode.env}/{planned.episode.policy}", []).append(planned)
        horizon = self.config.data.max_horizon
        return [
            DevBatch(name, batch)
            for name, rows in sorted(sources.items())
            for batch in self.dev_stream.collate(rows, self._groups(rows), horizon)
        ]

    def _groups(self, rows: Sequence[PlannedRow]) -> int:
        """Return the micro-batches of the size in training that rows fill."""
        batch = self.config.batch
        if not batch.packed:
            return math.ceil(len(rows) / (batch.rows // batch.micro_batches))
        return math.ceil(sum(planned.tokens for planned in rows) / (batch.tokens / batch.micro_batches))

    def depth_plan(self, step: int, batch: TreeBatch) -> DepthPlan:
        return self._draw(step, batch.row_ids, batch.place)

    def _draw(self, step: int, row_ids: Sequence[int], places: Tensor | None = None) -> DepthPlan:
        seed, depth = self.config.run.seed, self.config.depth
        mean = ramped_mean(self.model_config.mu_rec, step, depth.ramp_start, depth.ramp_steps)
        plan = DepthPlan.sample(seed, step, row_ids, mean, self.model_config.max_loops, places, depth.sampling)
        return replace(plan, mu_bwd=depth.backward_loops or plan.mu_bwd)  # 0: ceil(mu_rec / 2)

    def normaliser(self, batches: Sequence[TreeBatch]) -> float:
        """Count the target tokens of a global batch."""
        return sum(batch.targets for batch in batches)

    def loss(
        self, objective: nn.Module, batch: TreeBatch, step: int, normaliser: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        plan = self.depth_plan(step, batch)
        loss, diagnostics = objective(batch, plan, normaliser)
        work = {"flops": flops(self.model_config, batch, plan)}
        return loss, diagnostics | work | counts(batch, sum(plan.loops), loss.device)

    def evaluation(self, objective: nn.Module, batch: DevBatch) -> dict[str, Tensor]:
        """Return loss and exactness by horizon at the default depth, teacher-forced, and exactness by source."""
        depth = self.model_config.default_depth
        loss, sums = objective(batch.rows, depth, 1.0)  # `record` divides the sums
        exact = {f"{kind}/{batch.name}": sums[kind] for kind in (*EXACT, *EXACT.values())}
        return sums | exact | counts(batch.rows, depth * len(batch.rows.row_ids), loss.device)

    def record(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return record(sums)

    def summary(self, record: Mapping[str, float]) -> str:
        return f"depth {record['mean_depth']:.1f} |h| {record['state_rms']:.2f} |dh| {record['last_step_rms']:.2f}"

    def after_step(self, record: Mapping[str, float]) -> dict[str, float]:
        if "first_step_rms" in record:  # a step may have no branch
            self.objective.remember_first_step(record["first_step_rms"])
        # Logged after the update: the bound that the next step uses.
        return {"c_max": self.objective.c_max().item()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "training_episodes": self.training_episodes and self.training_episodes.state_dict(),
            "tokens_per_byte": self.model_config.tokens_per_byte,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.training_episodes:  # the checkpoint may be that of another run, on other episodes
            earlier = TrainingEpisodes.from_state(state.get("training_episodes"))
            self.training_episodes = self.training_episodes.joined(earlier)
        self._join_tokens_per_byte(state.get("tokens_per_byte"))

    def provenance(self) -> dict[str, Any]:
        folders = (*self.config.data.train, *self.config.data.dev)
        shards = {folder: json.loads((Path(folder) / "index.json").read_text())["shards"] for folder in folders}
        return {"tokenizer_hash": tokenizer_hash(self.tokenizer_file), "data": shards}

    def export(self, folder: Path) -> None:
        export_model(self.objective.model, self.tokenizer, folder, self.training_episodes)


def _episodes(folders: Sequence[str], weights: Mapping[str, float], made_with: str) -> list[TokenEpisode]:
    return [
        replace(episode, weight=weights.get(folder, 1.0))
        for folder in folders
        for episode in read_shards(Path(folder), made_with)
    ]


def export_model(
    model: LoopWMForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    episodes: TrainingEpisodes | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a model in Hugging Face form, with tokenizer and training episodes if known.

    Parameters are of `dtype`, in shards of at most 8 MiB, or an eighth of a large model.

    The folder appears complete or not at all.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    # A copy: `bfloat16()` would round the weights that training continues with.
    published = LoopWMForCausalLM(model.config)
    # Not `state_dict()`: under FSDP it returns parts, even of gathered weights.
    published.load_state_dict(dict(model.named_parameters(remove_duplicate=False)))
    tokenizer.chat_template = chat_template(model.config.slots)
    with writing(folder):
        published.to(dtype=dtype)  # type: ignore[call-arg]  # wrapped by transformers
        published.save_pretrained(temporary, max_shard_size=max(8_000_000, published.num_parameters() // 4))
        tokenizer.save_pretrained(temporary)
        if episodes is not None:
            episodes.save(temporary)
    publish(temporary, folder)
