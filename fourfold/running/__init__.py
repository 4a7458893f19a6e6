"""How checks are run: the pytest plugin, what a run selects, isolation, progress, the table and the verdict."""
