"""Counts phrases that stop an English reader, in messages, help, docstrings and documentation.

    python tools/dialect.py                  fails where a file has more than tools/dialect.txt says
    python tools/dialect.py --list [PATH...] shows each of them, with its line
    python tools/dialect.py --record         writes the counts of today; they should only fall

Of Python files the string literals count, of Markdown all of the text.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
COUNTS = ROOT / "tools" / "dialect.txt"
HEAD = "# Phrases of tools/dialect.py in each file. A number may fall, and should not rise.\n"
PLACES = ("README.md", "CHANGELOG.md", "docs/**/*.md", "src/**/*.py", "examples/*.py")
PHRASES = (
    r"(fore)?told\b(?! apart)",
    r"nobody\b",
    r"somebody\b",
    r"who(m)?ever\b",
    r"anew\b",
    r"as it lies\b",
    r"(which|that|what) there (is|are) not\b",
    r"(?<!there )(is|are) no (?!longer\b|more\b|less\b|later\b|evidence\b)",
    r"thousand million",
    r"of which nothing is known",
    r"is to be (said|told|had)\b",
    r"called otherwise\b|call it otherwise\b",
    r"so (many|few)\b(?! as\b| that\b)",
    r"(which|that) (is|are) not there\b",
    r"(is|are|was|were) said\b",
    r"(their|its) like\b",
    r"of late\b",
    r"sees? to it\b",
    r"without a word\b",
    r"(?<!no )one's own\b",
    r"comes (twice|\d+ times)",
    r"stands? twice",
    r"say (True|False|\w+=)",
    r"(is|are) a text\b",
    r"from [01] (on|up)\b",
    r"speaks? of\b",
    r"is asked of\b",
    r"lies? so\b",
    r"gone on\b",
    r"tells? of\b",
    r"tells whether\b",
    r"in the midst\b",
    r"does no harm\b",
    r"of which nothing\b",
    r"all the same\b",
    r"(is|are) taken for\b",
    r"by none\b",
    r"(a|the) format of others\b",
    r"ask for one of these\b",
)
FOUND = re.compile(rf"\b(?:{'|'.join(PHRASES)})", re.IGNORECASE)


def main() -> None:
    arguments = sys.argv[1:]
    if "--list" in arguments:
        for path, line, phrase in every(arguments[arguments.index("--list") + 1 :]):
            print(f"{path}:{line}: {phrase}")
        return
    counts: dict[str, int] = {}
    for path, _, _ in every():
        counts[path] = counts.get(path, 0) + 1
    if "--record" in arguments:
        COUNTS.write_text(HEAD + "".join(f"{n:4} {path}\n" for path, n in sorted(counts.items())))
        return
    known = recorded()
    more = {path: n for path, n in counts.items() if n > known.get(path, 0)}
    for path, n in more.items():
        print(f"{path}: {n} phrases that stop a reader, {known.get(path, 0)} are recorded")
    if more:
        print("Show them with `python tools/dialect.py --list PATH`, and say them plainly.")
    sys.exit(bool(more))


def every(only: list[str] | None = None) -> Iterator[tuple[str, int, str]]:
    """Path, line and phrase of each, in the files that begin with one of these paths."""
    files = sorted({file for place in PLACES for file in ROOT.glob(place)})
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        if only and not path.startswith(tuple(only)):
            continue
        text = file.read_text(encoding="utf-8")
        for first, part in literals(text) if file.suffix == ".py" else [(1, text)]:
            for match in FOUND.finditer(part):
                yield path, first + part.count("\n", 0, match.start()), shown(part, match)


def literals(source: str) -> Iterator[tuple[int, str]]:
    """The string literals of Python code with their lines, docstrings and f-strings too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def shown(text: str, match: re.Match[str]) -> str:
    around = text[max(0, match.start() - 40) : match.end() + 40]
    return " ".join(around.split())


def recorded() -> dict[str, int]:
    lines = COUNTS.read_text(encoding="utf-8").splitlines() if COUNTS.exists() else []
    pairs = (line.split(maxsplit=1) for line in lines if line[0] != "#")
    return {path: int(count) for count, path in pairs}


if __name__ == "__main__":
    main()
