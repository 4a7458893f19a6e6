"""The implementations: one folder an operation, and the machinery that loads, wires and launches them."""
