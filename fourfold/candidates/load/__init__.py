"""Find somebody's function, and call it as an operation."""
