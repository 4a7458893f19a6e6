"""Verification in a clone of this repository: the plugin, and the operations of this library."""

import os
import sys

# Tests start some two hundred processes. Without bytecode, each of them would compile every module of this project and
# of Hypothesis again, in two seconds. So it is written even where the environment asks Python not to, as containers do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["fourfold"]
