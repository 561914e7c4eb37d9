"""ALFWorld: games, the engine, an expert, hidden states and texts."""
