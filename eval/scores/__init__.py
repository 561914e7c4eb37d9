"""What predictions are worth: metrics, error kinds, rows, intervals and tables. Knows no model."""
