"""``kubectl_complete-offramp``: what kubectl runs to complete ``kubectl offramp …`` in a shell.

kubectl gives the words so far, the last one unfinished, and expects one candidate per line and a directive; ``:4`` says
that candidates are not file names.
"""

from __future__ import annotations

import contextlib
import os
import sys

from offramp_cli.main import app
from offramp_cli.source.source import PLUGIN

NO_FILES = ":4"


def main() -> None:
    """Complete the words of the command line by the same rules as ``offramp`` itself."""
    words = sys.argv[1:] or [""]
    sys.argv[0] = PLUGIN
    os.environ |= {
        "_OFFRAMP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["offramp", *words]),
        "COMP_CWORD": str(len(words)),
    }
    with contextlib.suppress(SystemExit):
        app(prog_name="offramp")
    print(NO_FILES)
