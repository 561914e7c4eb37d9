"""A TWISTED model on disk, and as a world that imagination steps through.

A folder holds `config.json`, `model.safetensors` and the codebook, `tokenizer.safetensors`.

Shape suffixes: B batch, T environment steps, L patch tokens, K codes, H/W/C frame.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopwm.core import ExitRule
from loopwm.pixel.imagined import Imagined
from loopwm.pixel.twisted.codebook import PatchTokenizer
from loopwm.pixel.twisted.decoding import Decoder, sample
from loopwm.pixel.twisted.model import Imagining, Twisted, TwistedConfig
from loopwm.records.errors import InputError
from loopwm.records.files import publish
from loopwm.records.frames import FrameSpace

CONFIG, WEIGHTS, CODEBOOK = "config.json", "model.safetensors", "tokenizer.safetensors"


@dataclass(frozen=True)
class TwistedCheckpoint:
    """A model with the codebook that its tokens come from and the environment that it imagines."""

    model: Twisted
    tokenizer: PatchTokenizer
    space: FrameSpace

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of the codes there are, (..., K) from token logits (..., K): the head has room for a full codebook."""
        unused = torch.arange(logits.shape[-1], device=logits.device) >= self.tokenizer.size
        return logits.float().masked_fill(unused, -math.inf).softmax(-1)

    def save(self, folder: Path) -> None:
        """The folder appears as a whole or not at all; one that is there is replaced."""
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        config = {"system": "twisted", "model": asdict(self.model.config), "space": asdict(self.space)}
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}
        save_file(weights, temporary / WEIGHTS)
        self.tokenizer.save(temporary / CODEBOOK)
        publish(temporary, folder)

    @classmethod
    def load(cls, folder: Path) -> TwistedCheckpoint:
        """Raises InputError for what is missing, damaged or of another system."""
        for name in (CONFIG, WEIGHTS, CODEBOOK):
            if not (folder / name).is_file():
                raise InputError(f"{folder / name}: no such file")
        try:
            record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if record.get("system") != "twisted":
                raise ValueError(f"system: is {record.get('system')!r}, expected 'twisted'")
            space = FrameSpace(**_tuples(record["space"]))
            tokenizer = PatchTokenizer.load(folder / CODEBOOK)
            known = {field.name for field in fields(TwistedConfig)}
            if record["model"].keys() != known:
                raise ValueError(f"model: {min(record['model'].keys() ^ known)} is missing or unknown")
            model = Twisted(TwistedConfig(**_tuples(record["model"])), tokenizer.grid, space.actions)
            model.load_state_dict(load_file(folder / WEIGHTS))
        except Exception as error:  # whatever a damaged folder makes the loaders raise is one refusal to the user
            raise InputError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
        return cls(model.eval(), tokenizer, space)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists alone."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}


class TwistedWorld:
    """A `FrameWorld`: frames in, the frame after an action out, as its decoder makes it of the predicted tokens."""

    def __init__(self, checkpoint: TwistedCheckpoint, decoder: Decoder, depth: int | ExitRule | None = None) -> None:
        """depth: loops of every pass, None for the checkpoint's. Raises ValueError for one it does not allow."""
        self.checkpoint = checkpoint
        self.model, self.tokenizer = checkpoint.model, checkpoint.tokenizer
        self.decoder = decoder
        self.depth = self.model.dynamics.core.check(self.model.config.default_depth if depth is None else depth)
        self.space = checkpoint.space

    @torch.inference_mode()
    def start(self, obs: Tensor, action: Tensor, first: Tensor, generator: torch.Generator) -> Imagining:
        """obs: uint8 (B, T, H, W, C), action: (B, T - 1), first: (B, T)."""
        return self.model.observe(self.tokenizer.encode(obs), action, first, self.depth)

    @torch.inference_mode()
    def step(self, state: Imagining, action: Tensor, generator: torch.Generator) -> Imagined[Imagining]:
        """The state given stays as it is."""
        logits, cache = self.model.step(state, action, self.depth)
        tokens = self.decoder(self.checkpoint.probabilities(logits.tokens), state.tokens, generator)
        reward = sample(logits.reward[:, None].float().softmax(-1), generator)[:, 0]
        done = logits.done.float().sigmoid()
        terminated = torch.rand(done.shape, generator=generator, device=generator.device).to(done.device) < done
        after = Imagining(cache, tokens, state.frames + 1, torch.zeros_like(terminated))
        return Imagined(self.tokenizer.decode(tokens), self.model.rewards[reward], terminated, after)

    def replace(self, state: Imagining, rows: Tensor, fresh: Imagining) -> Imagining:
        return state.replace(rows, fresh)
