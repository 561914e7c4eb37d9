"""TWISTED: patch tokens, the next frame decoded all at once, an agent that learns in imagination."""
