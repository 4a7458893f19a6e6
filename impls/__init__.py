"""The implementations of the operations, in one folder per operation."""
