"""Token ids alone: the running batch, its requests and jobs, and the thread that owns the model."""
