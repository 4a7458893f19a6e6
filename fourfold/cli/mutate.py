"""``fourfold mutate``: see `fourfold.mutation`."""

import argparse
import sys

from fourfold.cli.source import NotThere, require_function, require_operation
from fourfold.processes.child import become


def command(args: argparse.Namespace) -> int:
    """Replace this process by one that sets its variables before it imports torch."""
    try:
        if args.op:
            require_operation(args.op)
        if args.kernel:
            require_function(args.kernel)
            require_operation(args.operation)
    except NotThere as error:
        args.error(str(error))
    return become([sys.executable, "-m", "fourfold.mutation", *args.words])
