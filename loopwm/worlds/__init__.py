"""Imagined worlds for agents: one protocol, in this process (`local`) or in a service (`http`), and environments on it
(`gym`, `openenv`).
"""
