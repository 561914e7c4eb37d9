"""Scores of predictions: metrics, error kinds, rows, intervals and tables. Independent of models."""
