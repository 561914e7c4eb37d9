"""Save and load a pixel model of any system: `config.json`, which names the system, and `model.safetensors`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from loopwm.pixel.system import PixelSystem, system_class
from loopwm.records.config import typed
from loopwm.records.errors import InputError, loading
from loopwm.records.files import publish, writing
from loopwm.records.frames import FrameSpace

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPARED = "prepared."
"""Prefix of tensors that `prepare` produced; no optimiser updates them."""


def save_checkpoint(system: PixelSystem, folder: Path) -> None:
    """Write a checkpoint folder atomically, replacing an existing one. Changed settings of sampling are in it."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    sections = {"model": asdict(system.config), "objective": asdict(system.objective), "space": asdict(system.space)}
    if system.sampling != system.Sampling():
        sections["sampling"] = asdict(system.sampling)
    config = json.dumps({"system": system.name, **sections}, indent=1) + "\n"
    tensors = system.state_dict() | {PREPARED + name: tensor for name, tensor in system.prepared().items()}
    with writing(folder):
        (temporary / CONFIG).write_text(config, encoding="utf-8")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary / WEIGHTS)
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)  # safetensors writes for the owner only
    publish(temporary, folder)


def load_checkpoint(folder: Path, name: str | None = None) -> PixelSystem:
    """Load a model in evaluation mode. name: required system, or None for any.

    Raises InputError for a checkpoint that is missing, damaged or of another system.
    """
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder / CONFIG}: no such file")
    with loading(folder):
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if name is not None and record.get("system") != name:
            raise ValueError(f"system: must be {name!r}, got {record.get('system')!r}")
        kind = system_class(record.get("system", "none"))
        model = _complete_section(kind.Model, record, "model")
        objective = _complete_section(kind.Objective, record, "objective")
        system = kind(model, objective, typed(FrameSpace, record["space"]))
        system.sampling = typed(kind.Sampling, record.get("sampling", {}))
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{WEIGHTS}: no such file")
        tensors = load_file(folder / WEIGHTS)  # safetensors: loads no code
        prepared = {key: tensors.pop(key) for key in [*tensors] if key.startswith(PREPARED)}
        system.take_prepared({key.removeprefix(PREPARED): tensor for key, tensor in prepared.items()})
        system.load_state_dict(tensors)
    return system.eval()


def _complete_section(section: type, record: dict[str, Any], name: str) -> Any:
    """Parse a section that must contain every key, since defaults may have changed after it was written."""
    if missing := {f.name for f in fields(section)} - record[name].keys():
        raise ValueError(f"{name}.{min(missing)}: missing")
    return typed(section, record[name])
