"""Text worlds: template, tokenizer, model, imagination. `format` alone needs no torch."""
