"""Run checks on a subject, and sum up the verdict."""
