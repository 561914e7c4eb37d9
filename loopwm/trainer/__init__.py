"""The training loop, which knows no system: a text world and a pixel world are each a `Program`."""
