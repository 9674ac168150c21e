"""Prints how large the house is: `python -m tests.sizes`, which `make lint` runs. Sizes limit nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = (".py", ".lua")


def main() -> None:
    """Prints a row of files and lines for each top-level folder that holds code, and the words of the documents."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    paths = [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    lines_by_folder: dict[str, list[int]] = {}
    for path in paths:
        if path.suffix in CODE:
            folder = path.relative_to(ROOT).parts[0]
            lines_by_folder.setdefault(folder, []).append(path.read_text().count("\n"))
    for folder, lines in sorted(lines_by_folder.items()):
        sys.stdout.write(f"{folder:<16}{len(lines):>6} files{sum(lines):>9} lines\n")
    pages = [path for path in paths if path.suffix == ".md" and path.parent in (ROOT, ROOT / "docs")]
    words = sum(len(path.read_text().split()) for path in pages if path.name != "CHANGELOG.md")
    sys.stdout.write(f"{'documents':<16}{len(pages):>6} files{words:>9} words\n")


if __name__ == "__main__":
    main()
