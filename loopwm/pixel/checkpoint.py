"""A pixel model on disk, of any system: `config.json`, which names the system, and `model.safetensors`."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from loopwm.pixel.system import PixelSystem, system_class
from loopwm.records.config import typed
from loopwm.records.errors import InputError
from loopwm.records.files import publish
from loopwm.records.frames import FrameSpace

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPARED = "prepared."
"""Names in the file of weights what no optimiser trained."""


def save_checkpoint(system: PixelSystem, folder: Path) -> None:
    """The folder appears as a whole or not at all; one that is there is replaced."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    sections = {"model": asdict(system.config), "objective": asdict(system.objective), "space": asdict(system.space)}
    (temporary / CONFIG).write_text(json.dumps({"system": system.name, **sections}, indent=1) + "\n", encoding="utf-8")
    tensors = system.state_dict() | {PREPARED + name: tensor for name, tensor in system.prepared().items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary / WEIGHTS)
    publish(temporary, folder)


def load_checkpoint(folder: Path, name: str | None = None) -> PixelSystem:
    """The model, in evaluation mode. name: of the system that it must be of, None for any.

    Raises InputError for what is missing, damaged or of another system.
    """
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise InputError(f"{folder / file}: no such file")
    try:
        record = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if name is not None and record.get("system") != name:
            raise ValueError(f"system: is {record.get('system')!r}, expected {name!r}")
        system = _built(record)
        tensors = load_file(folder / WEIGHTS)
        prepared = {key: tensors.pop(key) for key in [*tensors] if key.startswith(PREPARED)}
        system.take_prepared({key.removeprefix(PREPARED): tensor for key, tensor in prepared.items()})
        system.load_state_dict(tensors)
    except Exception as error:  # whatever a damaged folder makes the loaders raise is one refusal to the user
        raise InputError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    return system.eval()


def _built(record: dict[str, Any]) -> PixelSystem:
    kind = system_class(record.get("system", "none"))
    space = typed(FrameSpace, record["space"])
    return kind(_whole(kind.Model, record, "model"), _whole(kind.Objective, record, "objective"), space)


def _whole(section: type, record: dict[str, Any], name: str) -> Any:
    """A section of which no key is missing: defaults may have changed since."""
    if missing := {f.name for f in fields(section)} - record[name].keys():
        raise ValueError(f"{name}.{min(missing)}: missing")
    return typed(section, record[name])
