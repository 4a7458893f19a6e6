"""The packages of test runners by name, including their private modules. Nothing is imported here."""

# The packages that collect, run and report tests.
RUNNERS = ("pytest", "_pytest", "pluggy", "hypothesis", "xdist", "execnet", "pytest_timeout", "pytest_benchmark")
# Those whose exceptions skip a test or a case.
PASSING_OVER = ("pytest", "_pytest", "hypothesis")
