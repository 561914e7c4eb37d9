"""Agents trained in a world model: PPO, actor-critic, and the validation gate of the world."""
