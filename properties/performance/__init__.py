"""How fast: what is timed and how, what it is held against, and whether a change made it slower."""
