"""Detection of changes that a candidate made to the program that judges it."""
