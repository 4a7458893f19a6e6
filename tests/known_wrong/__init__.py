"""Implementations that are wrong, each in one known way, and some that are right in unusual ways."""
