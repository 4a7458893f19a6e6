"""What an operation is: its record, cases, axes, layouts, claims, refusals, and the registry."""
