"""The Python API: functions that verify an implementation, see `fourfold`."""
