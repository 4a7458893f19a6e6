"""The checks: one module per claim, and the search for cases on which a claim does not hold."""
