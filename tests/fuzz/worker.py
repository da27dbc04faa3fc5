"""The child process: reads examples from stdin, a line of JSON each, and answers in kind.

``python worker.py EXAMPLE`` runs one example, for a debugger.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # what all tests share


def answer(example: dict[str, Any]) -> dict[str, Any]:
    import importlib

    counts: Counter[str] = Counter()
    try:
        importlib.import_module(example["kind"]).run(example, counts)
    except Exception:
        return {"fault": traceback.format_exc(), "counts": counts}
    return {"counts": counts}


def main() -> None:
    # what is deprecated is called all the same, also where warnings are errors
    warnings.filterwarnings("ignore", r"gg\w+ is deprecated", DeprecationWarning)
    if len(sys.argv) > 1:
        print(json.dumps(answer(json.loads(sys.argv[1])), indent=1).replace("\\n", "\n"))
        return
    # what else is printed, by C too, is no answer
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
