"""ALFWorld: games, the engine, an expert, hidden states and texts."""

from data_prep.environments.alfworld.environment import AlfWorld

ENVIRONMENT = AlfWorld
