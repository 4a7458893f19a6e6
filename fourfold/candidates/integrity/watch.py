"""Watches for candidates that change the package's code, its records and tables, or pytest's plugins."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.candidates.integrity.snapshot import Snapshot, functions_of_file, modules_of
from fourfold.compat.test_runners import RUNNERS

# The packages that judge and report: this one, and the test runners.
OWN, OTHERS = "fourfold", RUNNERS
# The attributes of its `fourfold.checks.search.Search` that a check does not change.
LIMITS = ("elements", "blob", "case", "brief", "keeps", "seed", "refusals", "note")
WATCH = pytest.StashKey["ProgramWatch"]()


class ProgramWatch:
    """A watch over the program that judges, with its state before a candidate was loaded.

    Args:
        config: of the run.
        operations: the records.

    Attributes:
        tampering: all changes by candidates so far.
    """

    def __init__(self, config: pytest.Config, operations: Any) -> None:
        self._manager, self._hooks = config.pluginmanager, vars(config.hook)
        self._snapshot = Snapshot(modules_of(*OTHERS), modules_of(OWN), [("operations", operations)])
        self._plugins: set[int] | None = None
        self._callers: dict[str, Any] = {}
        self._changes_by_search: list[Callable[[], list[str]]] = []
        self.tampering: list[str] = []

    def settle(self) -> None:
        """Treat new plugins and hooks as changes from now on, until `unsettle`."""
        self._plugins = {id(plugin) for plugin in self._manager.get_plugins()}
        self._callers = dict(self._hooks)

    def unsettle(self) -> None:
        """Allow new plugins again, such as conftest.py files."""
        self._plugins = None

    def hold_subject(self, subject: Any) -> None:
        """Treat changes of a check's subject as tampering until the next call of `changes`."""
        self._changes_by_search.append(Snapshot(objects=[("the subject", subject)]).changes)

    def hold_search(self, search: Any) -> None:
        """Treat changes of a search's limits as tampering until the next call of `changes`."""
        self._changes_by_search.append(limits_of(search))

    def changes(self) -> list[str]:
        """Return the names of changes since the last call, and undo them."""
        changes_by_search, self._changes_by_search = self._changes_by_search, []
        changes = [*self._snapshot.changes(), *(c for changes in changes_by_search for c in changes())]
        if self._plugins is not None:
            changes += self._hook_changes(self._plugins)
        self.tampering += changes
        return changes

    def _hook_changes(self, plugins: set[int]) -> list[str]:
        changes = [f"pytest's hook {name}" for name, caller in self._callers.items() if self._hooks[name] is not caller]
        self._hooks.update(self._callers)
        for plugin in self._manager.get_plugins():
            if id(plugin) not in plugins:
                changes.append(f"pytest's plugins: {self._manager.get_name(plugin)}")
                self._manager.unregister(plugin)
        return changes


_latest: list[Snapshot] = []


def limits_of(search: Any) -> Callable[[], list[str]]:
    """Return a function that names the limits and methods of a search that have changed since."""
    values = {limit: getattr(search, limit) for limit in LIMITS}
    fields = {field.name for field in dataclasses.fields(search)}

    def changes() -> list[str]:
        limits = [limit for limit, value in values.items() if getattr(search, limit) is not value]
        return [f"the search's {limit}" for limit in (*limits, *vars(search).keys() - fields)]

    return changes


class PackageWatch:
    """Watch this package, Hypothesis and a record during the checks of a candidate without pytest.

    Args:
        file: the candidate's.
        record: of the operation.
    """

    def __init__(self, file: Path, record: Any) -> None:
        self._file, self._modules, self._on_import = file, 0, list[str]()
        self._record = Snapshot(objects=[("the record", record)])
        if _latest and not _latest[0].is_of_now:
            _latest.clear()

    def begin(self, search: Any) -> Callable[[], list[str]]:
        """Return a function that names the changes since, and undoes them, except those made by the import.

        Args:
            search: the search of a check, with its limits set.
        """
        own_modules, foreign_modules = modules_of(OWN), modules_of("hypothesis")
        modules = len(own_modules) + len(foreign_modules)
        if not _latest or _latest[0].modules != modules:
            _latest[:] = [Snapshot(foreign_modules, own_modules)]
        if self._modules != modules:
            self._modules, self._on_import = modules, functions_of_file(self._file, own_modules)
        parts = [_latest[0].changes, self._record.changes, limits_of(search)]
        return lambda: [*self._on_import, *(change for part in parts for change in part())]
