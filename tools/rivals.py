"""Collect the programs that `benchmarks/bench_rivals.py` measures, into ignored .rivals/.

    python tools/rivals.py                                   # from the projects' own repositories
    python tools/rivals.py --mirror ai-toolkit=/mirrors/ai-toolkit.git
    python tools/rivals.py --checkout ai-toolkit --into folder  # its whole source at that commit

Named files at named commits, as they are; nothing of it is ever committed. Which file came from
where is written to rivals.json there, and from it into the rows of the benchmark. The folder
travels with the source tree to machines that are lent for minutes: it may have LIMIT_BYTES. So of
RamTorch, whose 26 files have 626 KiB, it gets the three that `OffloadModel` imports, and these in
an archive, from which Python imports them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".rivals"
LIST = "rivals.json"
LIMIT_BYTES = 212 * 2**10
KINDS = (".py", ".txt", ".json", ".yaml")  # of files in a whole source: no pictures, no weights


@dataclass(frozen=True)
class Repository:
    """Files of a git repository: each path there, and the one below .rivals/ that it gets."""

    name: str
    url: str
    commit: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Package:
    """Files of a wheel of the package index, which become an archive below .rivals/."""

    name: str
    version: str
    sha256: str
    files: Sequence[str]


# Without toolkit/__init__.py, which changes another library, and ramtorch's, which imports all of
# it: Python takes the folder without it.
REPOSITORIES = (
    Repository(
        "ai-toolkit",
        "https://github.com/ostris/ai-toolkit",
        "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350",
        {
            f"toolkit/memory_management/{name}": f"toolkit/memory_management/{name}"
            for name in ("__init__.py", "manager.py", "manager_modules.py")
        }
        | {"LICENSE": "LICENSE-ai-toolkit"},
    ),
    Repository(
        "musubi-tuner",
        "https://github.com/kohya-ss/musubi-tuner",
        "30c658c4f4b0bf05038b3346eff9670259b10fc7",
        {
            "src/musubi_tuner/modules/custom_offloading_utils.py": (
                "musubi_tuner/modules/custom_offloading_utils.py"
            ),
        },
    ),
)
PACKAGES = (
    Package(
        "ramtorch",
        "1.11.0",
        "69f968c23bec1c6d6ccaccc05c20ac5abc641e740705c758bbbc0ce9ae960648",
        [f"ramtorch/{name}.py" for name in ("offload", "nvme_store", "offload_simulator")],
    ),
)


class NotCollected(Exception):
    """What could not be had of one rival, and why."""


def run(command: Sequence[str | Path], **environment: str) -> bytes:
    """Return what the command prints; `NotCollected` with its last line if it fails."""
    settings = {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env=settings)
    except OSError as error:
        raise NotCollected(str(error)) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        words = " ".join(str(word) for word in command[:6])
        raise NotCollected(f"{words}: {said[-1] if said else f'exit status {done.returncode}'}")
    return done.stdout


def fetched(repository: Repository, source: str, scratch: Path) -> list[str | Path]:
    """Return the git command that can show the commit's files; fetches no others."""
    if Path(source).is_dir():
        here = Path(source)
        return ["git", "--git-dir", here / ".git" if (here / ".git").exists() else here]
    git: list[str | Path] = ["git", "-C", scratch]
    run(["git", "init", "--quiet", scratch])
    run([*git, "remote", "add", "origin", source])
    how = ("--quiet", "--depth", "1", "--filter=blob:none")
    run([*git, "fetch", *how, "origin", repository.commit])
    return git


def collect_repository(repository: Repository, into: Path, source: str = "") -> list[str]:
    """Copy the files of one repository; return their paths below `into`."""
    with tempfile.TemporaryDirectory() as scratch:
        git = fetched(repository, source or repository.url, Path(scratch))
        texts = {
            there: run([*git, "show", f"{repository.commit}:{path}"])
            for path, there in repository.files.items()
        }
    for there, text in texts.items():
        (into / there).parent.mkdir(parents=True, exist_ok=True)
        (into / there).write_bytes(text)
    return list(texts)


def check_out(repository: Repository, into: Path, source: str = "") -> None:
    """Write what the repository has of source and of settings at its commit to `into`."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        git = fetched(repository, source or repository.url, Path(scratch))
        listed = run([*git, "ls-tree", "-r", "-z", "--name-only", repository.commit]).decode()
        names = [name for name in listed.split("\0") if name.endswith(KINDS)]
        what = ("checkout", "--quiet", repository.commit, "--", *names)
        index = str(Path(scratch) / "index")  # a mirror keeps its own
        run([*git, "--work-tree", into.resolve(), *what], GIT_INDEX_FILE=index)


def collect_package(package: Package, into: Path, source: str = "") -> list[str]:
    """Archive the files of one wheel; `source` is a folder with it, else pip fetches it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(source or scratch)
        if not source:
            how = ("--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check")
            what = f"{package.name}=={package.version}"
            run([sys.executable, "-m", "pip", "download", *how, "--dest", scratch, what])
        wheels = sorted(folder.glob(f"{package.name}-{package.version}-*.whl"))
        if not wheels:
            raise NotCollected(f"{folder} has no wheel of {package.name} {package.version}")
        found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if found != package.sha256:
            raise NotCollected(f"{wheels[0].name} has the sum {found}, not {package.sha256}")
        archive = into / f"{package.name}.zip"
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made,
        ):
            for there in sorted({name.rpartition("/")[0] for name in package.files}):
                made.mkdir(there)  # Python finds a package without __init__.py by it
            for name in package.files:
                made.writestr(name, wheel.read(name))
    return [archive.name]


def collect(
    into: Path,
    mirrors: Mapping[str, str],
    repositories: Sequence[Repository] = REPOSITORIES,
    packages: Sequence[Package] = PACKAGES,
) -> dict[str, str]:
    """Fill `into` again and print what it got; return why what is missing could not be had."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    taken, missing = dict[str, dict[str, object]](), dict[str, str]()
    rivals: list[Repository | Package] = [*repositories, *packages]
    for rival in rivals:
        source = mirrors.get(rival.name, "")
        try:
            if isinstance(rival, Repository):
                version, files = rival.commit, collect_repository(rival, into, source)
            else:
                version, files = rival.version, collect_package(rival, into, source)
        except NotCollected as error:
            missing[rival.name] = str(error)
            print(f"{rival.name}: {error}", file=sys.stderr)
            continue
        nbytes = sum((into / name).stat().st_size for name in files)
        taken[rival.name] = {"version": version, "files": files, "size_bytes": nbytes}
        print(f"{rival.name} {version}: {len(files)} files, {nbytes} bytes")
    (into / LIST).write_text(json.dumps(taken, indent=2) + "\n", encoding="utf-8")
    return missing


def size_bytes(folder: Path) -> int:
    """Return what travels of a folder: all but what Python makes where it imports."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Collect; 1 if something could not be had, or it is more than may travel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--into", type=Path, default=FOLDER)
    parser.add_argument(
        *("--mirror", "-m"),
        action="append",
        default=[],
        metavar="NAME=PLACE",
        help="another git repository (path or URL), or a folder with the wheel",
    )
    parser.add_argument(
        "--checkout",
        choices=[one.name for one in REPOSITORIES],
        help="the whole source of one instead, into --into",
    )
    arguments = parser.parse_args(argv)
    mirrors = dict(text.partition("=")[::2] for text in arguments.mirror)
    known = {rival.name for rival in REPOSITORIES} | {rival.name for rival in PACKAGES}
    if mirrors.keys() - known:
        parser.error(f"no rival {', '.join(sorted(mirrors.keys() - known))}; there are {known}")
    if arguments.checkout:
        (wanted,) = (one for one in REPOSITORIES if one.name == arguments.checkout)
        try:
            check_out(wanted, arguments.into, mirrors.get(wanted.name, ""))
        except NotCollected as error:
            print(f"{wanted.name}: {error}", file=sys.stderr)
            return 1
        return 0
    missing = collect(arguments.into, mirrors)
    nbytes = size_bytes(arguments.into)
    print(f"{arguments.into}: {nbytes} of {LIMIT_BYTES} bytes")
    return 1 if missing or nbytes > LIMIT_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
