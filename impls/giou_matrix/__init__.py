"""The operation ``giou_matrix`` on every backend."""
