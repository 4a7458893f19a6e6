"""Hypothesis strategies for the inputs of a call."""
