"""Text worlds: tokenizer, model, imagination, rows, objective and training."""
