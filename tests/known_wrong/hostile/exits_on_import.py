"""Ends the process with exit code 0 when it is imported."""

import os

os._exit(0)
