"""Export a checkpoint of a text run as a model."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model

from loopwm.records.errors import InputError
from loopwm.records.files import read_json
from loopwm.records.training_episodes import TrainingEpisodes
from loopwm.text.model.modeling import LoopWMForCausalLM
from loopwm.text.model.tokenizer import load_tokenizer
from loopwm.text.training.config import load_config
from loopwm.text.training.loss import TextObjective
from loopwm.text.training.program import export_model, model_config, tokenizer_of

WEIGHTS, AVERAGE = "model.safetensors", "custom_checkpoint_0.pkl"
"""File names that accelerate uses in a checkpoint."""


def load_weights(objective: TextObjective, checkpoint: Path, averaged: bool) -> None:
    """Load a checkpoint's weights, or their average if the run keeps one. Raises InputError."""
    file = checkpoint / (AVERAGE if averaged else WEIGHTS)
    try:
        if averaged:
            state = torch.load(file, weights_only=True)
            objective.load_state_dict({k.removeprefix("module."): v for k, v in state.items() if k != "n_averaged"})
        else:
            load_model(objective, file)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{file}: {str(error).splitlines()[0]}") from error


def export_checkpoint(checkpoint: Path, out: Path) -> None:
    """Export a checkpoint. Raises InputError if it is not one of a text run."""
    if out.exists():
        raise InputError(f"--out: {out} exists; name a new folder")
    config = load_config(checkpoint.parent.parent / "config.yaml")
    tokenizer = load_tokenizer(tokenizer_of(config.model))
    model = LoopWMForCausalLM(model_config(config.model, len(tokenizer)))
    objective = TextObjective(model, config.objective)
    load_weights(objective, checkpoint, averaged=config.optimizer.average > 0)
    state = read_json(checkpoint / "progress.json")["program"]
    model.config.tokens_per_byte = state.get("tokens_per_byte")
    out.parent.mkdir(parents=True, exist_ok=True)
    export_model(objective.model, tokenizer, out, TrainingEpisodes.from_state(state.get("training_episodes")))


if __name__ == "__main__":
    from loopwm.text.export_command import main

    sys.exit(main())
