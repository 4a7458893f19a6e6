"""Threads that call at once get what each of them gets alone."""

from fourfold.pytest_plugin.checks import check_test

test_threads_do_not_matter = check_test("threads")
