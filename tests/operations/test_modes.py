"""torch's modes change no result; autocast may change its precision."""

from fourfold.pytest_plugin.checks import check_test

test_modes_do_not_matter = check_test("modes")
test_autocast_changes_precision_alone = check_test("autocast")
