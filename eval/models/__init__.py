"""What can be evaluated: checkpoints, floors and language models, behind one protocol."""
