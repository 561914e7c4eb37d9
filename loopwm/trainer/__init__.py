"""Training loop, independent of the system: a text world and a pixel world are each a `Program`."""
