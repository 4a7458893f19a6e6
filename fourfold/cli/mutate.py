"""``fourfold mutate``: see `fourfold.mutation`."""

import argparse
import sys

from fourfold.cli.source import NotThere, require_function, require_operation
from fourfold.processes.child import become


def command(given: argparse.Namespace) -> int:
    """Replace this process by one that sets its variables before it imports torch."""
    try:
        if given.op:
            require_operation(given.op)
        if given.kernel:
            require_function(given.kernel)
            require_operation(given.operation)
    except NotThere as error:
        given.error(str(error))
    return become([sys.executable, "-m", "fourfold.mutation", *given.words])
