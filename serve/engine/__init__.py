"""Token ids alone: the scheduler, the running batch, cached keys and values, and the thread that owns the model."""
