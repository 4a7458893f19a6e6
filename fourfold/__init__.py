"""Fourfold: is a GPU kernel right, on every shape, dtype and layout? Is its gradient right? Is it fast?

PYTEST_DONT_REWRITE: pytest would warn that this module was imported before it could rewrite what it asserts: nothing.
"""

from pathlib import Path

# ``pytest -p fourfold`` loads the plugin. Installing this package does not: options such as --device would collide with
# those of other test suites. Of what is named here it loads `rootdir` alone, which has no options.
# pytest configures the last first: what is timed follows from what a run selects.
pytest_plugins = ["fourfold.running.rootdir", "fourfold.performance.plugin", "fourfold.running.plugin"]

# In a clone the operations lie beside this package, in impls/, oracles/ and properties/; a wheel holds them inside it.
# Either way they are `fourfold.impls`, `fourfold.oracles` and `fourfold.properties`.
if not (Path(__file__).parent / "impls").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))
