"""What every implementation of an operation must satisfy: inputs, exactness, laws, declared errors and cost."""
