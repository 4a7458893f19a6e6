"""Verification in a clone of this repository: the plugin, and the operations of this library."""

import os

# Installed packages name their operations by entry points; a clone need not be installed.
os.environ.setdefault("FOURFOLD_OPERATIONS", "fourfold.properties")

pytest_plugins = ["fourfold"]
