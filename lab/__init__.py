"""Studies, one-off measurements, reports and benchmarks. Not installed; the product never imports it."""
