"""The packages of test runners, by name: those of their private modules, too. Nothing is imported here."""

# What collects, runs and reports tests.
RUNNERS = ("pytest", "_pytest", "pluggy", "hypothesis", "xdist", "execnet", "pytest_timeout", "pytest_benchmark")
# Of these, whose exceptions make a test or a case be passed over.
PASSING_OVER = ("pytest", "_pytest", "hypothesis")
