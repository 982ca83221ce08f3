"""Have variants of the engine served the same? `python equal.py A.json B.json` reads
reports of the part `same`. If a part is not complete, or hashes differ, it says so, and
its exit status is 1.
"""

import json
import sys
from pathlib import Path


def hashes(path):
    """Those of a report; SystemExit if it has not all of them."""
    try:
        part = json.loads(path.read_text())["parts"]["same"]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path} has no report of the part `same`: {error!r}")
    if part["state"] != "complete":
        sys.exit(f"{path}: the part `same` is not complete: {part['state']}")
    return [part["tasks"][name]["sha256"] for name in ("first", "second")]


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: python equal.py A.json B.json")
    found = {name: hashes(Path(name)) for name in sys.argv[1:]}
    if len({value for values in found.values() for value in values}) != 1:
        sys.exit(f"the tokens differ, by their hashes: {json.dumps(found, indent=1)}")
    print(f"equal tokens: {', '.join(found)}")


if __name__ == "__main__":
    main()
