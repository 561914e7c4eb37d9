"""What can be evaluated: checkpoints, baselines and language models, behind one protocol."""
