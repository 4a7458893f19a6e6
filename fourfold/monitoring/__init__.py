"""Compare a sample of a kernel's live calls with the bounds of its operation. See `fourfold.monitor`."""
