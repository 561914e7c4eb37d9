"""HTTP alone: routes, bodies, replies and errors. Knows no tensors and no token ids of its own."""
