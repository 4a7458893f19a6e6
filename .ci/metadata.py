"""The addresses of the package, and its README with whole links: those of the repository that `origin` names."""

import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# The remote's address, as git@github.com:OWNER/NAME.git or https://github.com/OWNER/NAME.
REMOTE = re.compile(r"(?:https://|ssh://git@|git@)(?P<host>[\w.-]+)[:/](?P<path>[\w./-]+?)(?:\.git)?/?\n")


class Addresses(MetadataHookInterface):
    """Fill in ``readme`` and ``urls``; without a public remote, the README as it is and no addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the two fields."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        ask = ["sh", "-c", "git remote get-url origin"]  # by a shell, as there may be no git
        metadata["urls"] = {}
        if remote := REMOTE.fullmatch(subprocess.run(ask, cwd=self.root, capture_output=True, text=True).stdout):
            home = f"https://{remote['host']}/{remote['path']}"
            page = f"{home}/blob/HEAD/"
            text = re.sub(r"\]\((?!https?:|#)", f"]({page}", text)
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{page}docs/README.md",
                "Changelog": f"{page}CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
