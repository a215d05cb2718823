"""Words that this project does not use, where a plainer one says the same: part of `make lint`.

    python tools/words.py              # every place; exit 1 if there is one
    python tools/words.py docs csrc    # of these files and folders
    python tools/words.py --count      # how many of each word, by folder

It reads what people read: comments, docstrings and messages of code, and the prose of pages. Names
and code, in the source or between backticks, are left alone. The words of the engine that have a
meaning of their own are explained at the top of csrc/include/oracle_offload.h, and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What to say instead; mostly a sentence with another subject is better than another word.
INSTEAD = {
    "stand": "is, is written, holds",
    "stands": "is, is written, holds",
    "stood": "was",
    "lie": "is, is stored",
    "lies": "is, is stored",
    "lay": "was",
    "told": "said, passed, given",
    "nobody": "no one, nothing, or name what does not",
    "whoever": "code that, a caller that, users who",
    "anew": "again",
    "beside": "next to, and, at the same time as",
    "besides": "also",
    "owed": "still to be done, still to be waited for",
    "strike": "remove",
    "hear": "see, be notified",
    "hears": "sees, is notified",
    "heard": "seen, was notified",
    "takes leave": "detaches, ends",
    "taking leave": "detaching, ending",
}
_DIALECT = re.compile(rf"(?<![\w`./-])({'|'.join(INSTEAD)})(?![\w`(=-]|\.\w)", re.IGNORECASE)
_CODE = re.compile(r"``[^`]*``|`[^`]*`")
_FIELD = re.compile(r"\{\{|\{[^{}]*\}")  # of an f-string; from Python 3.12 on it is no string
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_C_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_SHELL_TEXT = re.compile(r"(?m)(?:^|\s)#.*$|@?echo .*$")

READ = (".py", ".c", ".h", ".cu", ".cpp", ".md", ".sh", ".pyi")
# Results are as they were measured, and the messages of other programs are theirs.
LEFT_OUT = (
    "benchmarks/results/",
    "tests/data/",
    "docs/images/",
    "tools/words.py",
    "tests/unit/test_words.py",
)


def prose(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield what people read in a file: the number of its first line, and the text."""
    if path.suffix in (".py", ".pyi"):
        middle = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)  # from Python 3.12 on
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING, middle):
                is_f = re.match("[rR]?[fF]", token.string) is not None
                yield token.start[0], _FIELD.sub("", token.string) if is_f else token.string
    elif path.suffix == ".md":
        yield 1, _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    else:
        pattern = _SHELL_TEXT if path.suffix in (".sh", "") else _C_TEXT
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, found[0]


def places(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each place of a file."""
    for line, text in prose(path, path.read_text(encoding="utf-8")):
        plain = _CODE.sub(lambda found: re.sub(r"[^\n]", "`", found[0]), text)
        for found in _DIALECT.finditer(plain):
            if text.strip("'\"") != found[0]:  # a name or key alone
                yield line + plain.count("\n", 0, found.start()), found[0]


def files(paths: list[str]) -> list[Path]:
    """Return the files of the repository that are read, of these files and folders."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = sorted({name for name in listed.split("\0") if (ROOT / name).is_file()})
    return [
        ROOT / name
        for name in names
        if name == "Makefile" or name.endswith(READ)
        if not name.startswith(LEFT_OUT)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files and folders; all without one")
    parser.add_argument("--count", action="store_true", help="how many of each, by folder")
    arguments = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    for path in files(arguments.paths):
        name = path.relative_to(ROOT).as_posix()
        for line, word in places(path):
            counts[word.lower(), name.partition("/")[0]] += 1
            if not arguments.count:
                print(f"{name}:{line}: '{word}': {INSTEAD[word.lower()]}")
    if arguments.count:
        for (word, folder), count in sorted(counts.items()):
            print(f"{count:5d}  {word:12s} {folder}")
    return int(bool(counts))


if __name__ == "__main__":
    raise SystemExit(main())
