"""Agents that learn in a world: PPO, actor-critic, and the check of the world."""
