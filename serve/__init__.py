"""OpenAI-compatible HTTP service. Layers: app (HTTP) -> service (text) -> engine (token ids) -> the model."""
