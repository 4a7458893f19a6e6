"""Running error analysis of torch's operators."""
