"""Imagined worlds for agents behind one protocol.

They are in this process (`local`) or in a service (`http`), with environments on top (`gym`, `vector`).
"""
