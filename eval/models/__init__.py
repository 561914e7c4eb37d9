"""Predictors to evaluate: checkpoints, baselines and language models, behind one protocol."""
