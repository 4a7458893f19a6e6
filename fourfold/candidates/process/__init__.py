"""Run a candidate in its own process: protocol, client, server and child processes."""
