"""Detect what a candidate has changed in the program that judges it."""
