"""Operations: their records, cases, axes, layouts, claims and refusals, and the registry."""
