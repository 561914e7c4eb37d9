"""Agents trained in a world model: PPO and actor-critic."""
