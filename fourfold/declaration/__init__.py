"""From a user's declaration of an operation to its record."""
