"""What everything rests on: cases, dtypes, layouts, the record of an operation, error bounds and comparison."""
