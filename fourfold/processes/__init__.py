"""Processes that this one starts: their limits, their messages and their end."""
