"""Find a user's function, and call it as an operation."""
