"""Memory study: accuracy of memory modules on a cue after a delay of other symbols.

Trained on delays of 4 to 18 steps, tested after 8, 16, 32 and 64. Symbols are learned vectors, the module is that of a
pixel world. Guessing is right once in `CUES`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from eval.scores.tables import table
from lab.pixels.memories import MemoryModule, ModuleConfig
from loopwm.core.depth import DepthPlan
from loopwm.records.files import read_json, write_atomic, write_json
from loopwm.records.provenance import provenance

CUES, OTHERS = 4, 8
QUESTION = CUES + OTHERS
TRAINED, TESTED = (4, 18), (8, 16, 32, 64)
ROWS, DIM = 32, 64


def _config(**settings: Any) -> ModuleConfig:
    return ModuleConfig(dim=DIM, heads=4, mlp_dim=2 * DIM, **settings)


MODULES = {
    "looped recurrence": _config(kind="recurrence"),
    "looped attention": _config(kind="attention"),
    "GRU": _config(kind="gru"),
    "LSTM": _config(kind="lstm"),
    "Mamba": _config(kind="mamba"),
    "GRU of the last four": _config(kind="gru", frames=4),
}


@dataclass(frozen=True)
class Settings:
    steps: int = 400
    seeds: tuple[int, ...] = (0, 1, 2)
    questions: int = 500
    """Test rows per delay."""
    learning_rate: float = 3e-3


class CueClassifier(nn.Module):
    """Classifier of the cue from a sequence of symbols."""

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(QUESTION + 1, config.dim)
        self.memory = MemoryModule(config)
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, CUES)

    def forward(self, symbols: Tensor, depth: int | DepthPlan) -> Tensor:
        """Return logits (B, CUES) at the last of symbols (B, T)."""
        return self.head(self.norm(self.memory(self.embedding(symbols), depth)[:, -1]))


def make_rows(rows: int, delay: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Generate symbols (B, delay + 2), from a cue to the question symbol, and the cues (B,)."""
    cue = rng.integers(CUES, size=rows)
    others = CUES + rng.integers(OTHERS, size=(rows, delay))
    symbols = np.concatenate((cue[:, None], others, np.full((rows, 1), QUESTION)), 1)
    return torch.from_numpy(symbols), torch.from_numpy(cue)


def train_model(config: ModuleConfig, seed: int, settings: Settings) -> CueClassifier:
    torch.manual_seed(seed)
    model, rng = CueClassifier(config), np.random.default_rng(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    for step in range(settings.steps):
        symbols, cue = make_rows(ROWS, int(rng.integers(TRAINED[0], TRAINED[1] + 1)), rng)
        plan = DepthPlan.sample(seed, step, range(ROWS), config.mu_rec, config.max_loops)
        loss = F.cross_entropy(model(symbols, plan), cue)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for group in optimizer.param_groups:  # the learning rate falls linearly over the last third
            group["lr"] = settings.learning_rate * min(1.0, 3 * (1 - (step + 1) / settings.steps) + 0.01)
    return model.eval()


@torch.no_grad()
def cue_accuracy(model: CueClassifier, delay: int, questions: int) -> float:
    """Return the accuracy after a delay, on the same rows for every model."""
    symbols, cue = make_rows(questions, delay, np.random.default_rng((delay, questions)))
    return float((model(symbols, model.memory.config.default_depth).argmax(-1) == cue).float().mean())


def run_study(out: Path, settings: Settings, modules: Mapping[str, ModuleConfig] = MODULES) -> dict[str, Any]:
    """Train missing models and write results.json and report.md."""
    by_module: dict[str, list[dict[str, float]]] = {name: [] for name in modules}
    jobs = [(name, seed) for name in modules for seed in settings.seeds]
    for name, seed in tqdm(jobs, unit="model"):
        file = out / f"{name.replace(' ', '-')}-{seed}.json"
        spec = {"module": asdict(modules[name]), "settings": {**asdict(settings), "seeds": seed}}
        record = read_json(file) if file.is_file() else {}
        if record.get("asked_for") != spec:
            started = time.process_time()
            model = train_model(modules[name], seed, settings)
            shares = {str(delay): cue_accuracy(model, delay, settings.questions) for delay in TESTED}
            record = {"asked_for": spec, "shares": shares, "core_seconds": time.process_time() - started}
            write_json(file, record)
        by_module[name].append({**record["shares"], "core_seconds": record["core_seconds"]})
    results = {
        "study": "memory alone",
        "settings": asdict(settings),
        "trained_on": TRAINED,
        "modules": by_module,
        "provenance": provenance("lab"),
    }
    write_json(out / "results.json", results)
    write_atomic(out / "report.md", render(by_module, settings))
    return results


def render(by_module: Mapping[str, Sequence[Mapping[str, float]]], settings: Settings) -> str:
    lines = [
        [
            name,
            *(_percent([seed[str(delay)] for seed in seeds]) for delay in TESTED),
            f"{np.mean([seed['core_seconds'] for seed in seeds]):.0f}",
        ]
        for name, seeds in by_module.items()
    ]
    head = (
        f"# Study: memory alone\n\nOne of {CUES} cues, recalled after a delay; trained on delays of {TRAINED[0]} to "
        f"{TRAINED[1]}, {settings.steps} steps of {ROWS} rows. Percent right of {settings.questions} questions, mean "
        f"of {len(settings.seeds)} seeds (lowest).\n\n"
    )
    return head + table(["Module", *map(str, TESTED), "core seconds a seed"], lines) + "\n"


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * np.mean(shares):.1f} ({100 * min(shares):.1f})"
