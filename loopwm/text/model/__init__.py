"""The Hugging Face model, its heads and tokenizer."""
