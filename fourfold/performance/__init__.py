"""Performance: benchmarks, the device's ceilings, the regression gate and the report."""
