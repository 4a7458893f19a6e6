"""The pytest plugin: options, collection, isolation, progress, the table and the report."""
