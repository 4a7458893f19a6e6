"""The Python API: functions that verify an implementation. See `fourfold`."""
