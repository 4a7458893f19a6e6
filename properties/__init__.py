"""The records of the operations: their inputs, exactness, laws, declared errors and cost."""
