"""Files of saved worlds: safetensors, with the checkpoint they belong to in the header."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from loopwm.records.errors import InputError
from loopwm.records.files import write_atomic
from loopwm.text.model.modeling import LoopWMForCausalLM

FORMAT = "loopwm-world-v2"

BEHAVIOUR = ("state_slots", "slots_in_trunk", "copy_attention", "rope_theta", "propagate", "carry_state", "decode_sees")
"""What of a configuration, beside the core's sizes, changes what the same weights compute."""


def fingerprint(model: LoopWMForCausalLM) -> str:
    """SHA-256 over weights and configuration: what a world's keys and values depend on."""
    config = model.config
    settings = dataclasses.asdict(config.core) | {name: getattr(config, name) for name in BEHAVIOUR}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def write_world(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], checkpoint: str) -> None:
    """Writes tensors and JSON facts; the file appears complete or not at all."""
    header = {"format": FORMAT, "checkpoint": checkpoint, "facts": json.dumps(facts)}
    write_atomic(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}, header))


def read_world(path: Path, device: torch.device, checkpoint: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file. Raises InputError if it is damaged or a world of another checkpoint."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise InputError(f"{path}: not a saved world")
            if header["checkpoint"] != checkpoint:
                raise InputError(f"{path}: a world of another checkpoint, {header['checkpoint'][:12]}..")
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(header["facts"])  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from error
