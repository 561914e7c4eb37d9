"""Imagined worlds as an agent holds them: one protocol, in this process (`local`) or kept by a service (`http`), and
environments on it (`gym`, `openenv`)."""
