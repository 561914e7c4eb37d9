"""World sessions: state, storage and steps."""
