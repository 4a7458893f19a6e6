"""Run a candidate in a process of its own: protocol, client, server and child processes."""
