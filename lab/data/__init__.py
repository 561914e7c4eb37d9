"""Diagnostics of episodes, vocabularies and windows."""
