"""The command ``fourfold``: see `fourfold.cli.main`."""

import sys

from fourfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
