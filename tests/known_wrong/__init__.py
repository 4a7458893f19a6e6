"""Known wrong implementations with one mistake each, and controls that are right in unusual ways."""
