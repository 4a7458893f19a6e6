"""The command ``fourfold``."""
