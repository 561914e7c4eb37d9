"""Token-level engine: scheduler, running batch, prefix cache and the thread that owns the model."""
