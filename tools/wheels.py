"""Build what is released, and look at it: an sdist, a wheel for Linux and one for Windows.

    python tools/wheels.py [--output dist]      # make wheels, in .venv-wheels

Needs what tools/requirements-wheels.txt names and the headers of the Python that runs it, and no
compiler of the system: zig's makes both wheels, so that they do not depend on the machine. The one
for Linux comes from the sdist by setup.py. The one for Windows is the same with an extension and a
simulator of its own, linked with what CPython's stable ABI lists. All files have the date of
SOURCE_DATE_EPOCH, or of the commit: two builds of one tree are equal.
"""

from __future__ import annotations

import argparse
import email
import gzip
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import c_build
from c_build import ROOT, ZIG

PACKAGE = "oracle_offload"
MANYLINUX, GLIBC = "manylinux_2_28_x86_64", "2.28"  # Debian 10, Ubuntu 18.10, RHEL 8
WINDOWS = "win_amd64"
PYTHON_ABI = (3, 11)  # Py_LIMITED_API
# Windows' own: the C runtime is a part of it since Windows 10.
SYSTEM_LIBRARY = re.compile(r"(kernel32|ntdll|advapi32|api-ms-win-crt-[a-z]+-l1-1-0)\.dll")

# What Include/*.h asks of PC/pyconfig.h below the limited API, which no Python on Linux has.
PYCONFIG = """\
#define MS_WINDOWS 1
#define MS_WIN32 1
#define MS_WIN64 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_STAT_H 1
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_PID_T SIZEOF_INT
#define SIZEOF_SIZE_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
_Static_assert(sizeof(int) == SIZEOF_INT && sizeof(long) == SIZEOF_LONG, "LLP64");
_Static_assert(sizeof(long long) == SIZEOF_LONG_LONG, "LLP64");
_Static_assert(sizeof(void *) == SIZEOF_VOID_P && sizeof(sizeof(int)) == SIZEOF_SIZE_T, "LLP64");
_Static_assert(sizeof(L'x') == SIZEOF_WCHAR_T, "UTF-16");
"""


def call(command: Sequence[str | Path], cwd: Path = ROOT, **environment: str) -> str:
    """Run a command; return what it says, or end with it."""
    words = [str(word) for word in command]
    merged = {**os.environ, **environment}
    done = subprocess.run(
        words, cwd=cwd, env=merged, check=False, text=True, stdout=-1, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}")
    return done.stdout


def date() -> str:
    """Return the seconds that every file is dated with."""
    named = os.environ.get("SOURCE_DATE_EPOCH", "")
    return named or call(["git", "log", "-1", "--format=%ct"]).strip()


# ---- building ----


def build_sdist(output: Path, folder: Path, epoch: int) -> Path:
    """Build the sdist of the files that git knows; return it."""
    for name in call(["git", "ls-files", "-z"]).split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    call([sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", output, folder])
    (made,) = output.glob("*.tar.gz")
    again = made.with_name("again")
    with (
        tarfile.open(made) as old,
        again.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            member.pax_headers = {}
            member.mode = 0o755 if member.isdir() or member.mode & stat.S_IXUSR else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    again.replace(made)
    return made


def zig_cc(folder: Path) -> Path:
    """Return zig's compiler for an old glibc, as a command of one word: setuptools wants that."""
    path = folder / "zig-cc"
    words = [*ZIG, "cc", "-target", f"x86_64-linux-gnu.{GLIBC}"]
    # Debian's Python.h includes a header that is where only compilers of Debian look.
    beside = folder / "include"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    headers = Path("/usr/include") / multiarch
    if multiarch and any(headers.glob("python3*")):
        beside.mkdir()
        (beside / multiarch).symlink_to(headers)
        words += ["-idirafter", str(beside)]
    quoted = " ".join(f"'{word}'" for word in words)
    path.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
    path.chmod(0o755)
    return path


def build_for_linux(sdist: Path, output: Path, folder: Path) -> Path:
    """Build the wheel for Linux from the sdist; return it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.glob(f"{PACKAGE}-*")
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, tree)
    call(command, cwd=folder, CC=str(zig_cc(folder)), LDFLAGS="-s", CFLAGS="-g0")
    (made,) = folder.glob("*.whl")
    return Path(shutil.move(retagged(made, MANYLINUX), output))


def build_for_windows(linux: Path, output: Path, folder: Path) -> Path:
    """Build the wheel for Windows next to that for Linux; return it."""
    call([sys.executable, "-m", "wheel", "unpack", "--dest", folder / "wheel", linux])
    (tree,) = (folder / "wheel").iterdir()
    package = tree / PACKAGE
    for path in package.glob("*.so"):
        path.unlink()
    variant = windows_variant(python_headers(folder))
    build = c_build.Build(variant, folder / "objects")
    objects = [*build.engine(), *build.objects(c_build.sources("binding"))]
    flags = ["-shared", str(stable_library(folder))]
    # Linked elsewhere: the linker puts an import library next to it.
    for path in (build.simulator(), build.link(build.folder / "_core.pyd", objects, flags)):
        shutil.copy(path, package / path.name)
    record = package / "_build_info.json"
    info = json.loads(record.read_text(encoding="utf-8"))
    info["platform"] = "win-amd64"
    info["simulator"]["file"] = variant.simulator
    record.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    call([sys.executable, "-m", "wheel", "pack", "--dest-dir", folder, tree])
    return Path(shutil.move(retagged(folder / linux.name, WINDOWS), output))


def retagged(wheel: Path, platform: str) -> Path:
    """Return the wheel under the name, and with the tag, of a platform."""
    words = ("wheel", "tags", "--remove", "--platform-tag", platform, wheel)
    return wheel.with_name(call([sys.executable, "-m", *words]).split()[-1])


def windows_variant(headers: Path) -> c_build.Variant:
    """Return how the package is compiled for Windows."""
    return c_build.Variant(
        name="windows-package",
        compiler=[*ZIG, "cc", "-target", "x86_64-windows-gnu"],
        flags=["-O2", "-g0", "-s", "-fno-sanitize=undefined"],
        component_flags={"binding": (f"-isystem{headers}",)},
        libraries=(),
        simulator="simcuda.dll",
    )


def python_headers(folder: Path) -> Path:
    """Return a copy of this Python's headers, with a pyconfig.h for Windows."""
    headers = folder / "python"
    shutil.copytree(sysconfig.get_path("include"), headers)
    (headers / "pyconfig.h").write_text(PYCONFIG)
    return headers


def stable_library(folder: Path) -> Path:
    """Return python3.lib: what python3.dll exports of the stable ABI, and nothing else."""
    from abi3info import DATAS, FUNCTIONS

    def names(known: Any) -> list[str]:
        return sorted(
            symbol.name
            for symbol, told in known.items()
            if (told.added.major, told.added.minor) <= PYTHON_ABI and told.ifdef != "HAVE_FORK"
        )

    lines = ["LIBRARY python3.dll", "EXPORTS", *names(FUNCTIONS)]
    lines += [f"{name} DATA" for name in names(DATAS)]
    definition, library = folder / "python3.def", folder / "python3.lib"
    definition.write_text("\n".join(lines) + "\n")
    call([*ZIG, "dlltool", "-m", "i386:x86-64", "-d", definition, "-l", library])
    return library


# ---- looking ----


def look(sdist: Path, linux: Path, windows: Path) -> dict[str, Any]:
    """Return what the files are, by tools that did not make them."""
    call([sys.executable, "-m", "twine", "check", "--strict", sdist, linux, windows])
    with zipfile.ZipFile(windows) as archive:
        libraries = {
            name: libraries_of(archive.read(f"{PACKAGE}/{name}"))
            for name in ("_core.pyd", "simcuda.dll")
        }
    return {
        "sdist": sdist.name,
        "linux": {"file": linux.name, "tags": tags(linux), "fits": fits(linux)},
        "windows": {"file": windows.name, "tags": tags(windows), **libraries},
    }


def tags(wheel: Path) -> list[str]:
    """Return the tags that a wheel has inside."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        return email.message_from_bytes(archive.read(name)).get_all("Tag", [])


def fits(wheel: Path) -> str:
    """Return the oldest platform that auditwheel says a wheel runs on."""
    said = call([sys.executable, "-m", "auditwheel", "show", wheel])
    found = re.search(r'platform\s+tag:\s+"(\w+)"', said)
    return found[1] if found else said


def libraries_of(image: bytes) -> dict[str, list[str]]:
    """Return what a DLL imports, library -> names, and under "" what it exports."""
    import pefile

    read = pefile.PE(data=image)
    found = {
        entry.dll.decode().lower(): sorted(symbol.name.decode() for symbol in entry.imports)
        for entry in read.DIRECTORY_ENTRY_IMPORT
    }
    exports = (symbol.name.decode() for symbol in read.DIRECTORY_ENTRY_EXPORT.symbols)
    return {"": sorted(exports), **found}


def complaints(seen: dict[str, Any]) -> Iterable[str]:
    """Yield what is wrong with what `look` saw."""
    for kind, platform in (("linux", MANYLINUX), ("windows", WINDOWS)):
        wanted = [f"cp311-abi3-{platform}"]
        if seen[kind]["tags"] != wanted or not seen[kind]["file"].endswith(f"-{wanted[0]}.whl"):
            yield f"{seen[kind]['file']} is tagged {seen[kind]['tags']}, not {wanted}"
    fit = re.fullmatch(r"manylinux_2_(\d+)_x86_64", seen["linux"]["fits"])
    if fit is None or int(fit[1]) > int(GLIBC.partition(".")[2]):
        yield f"{seen['linux']['file']} needs {seen['linux']['fits']}"
    for name, most in (("_core.pyd", {"python3.dll"}), ("simcuda.dll", set())):
        others = {library for library in seen["windows"][name] if library} - most
        others = {library for library in others if not SYSTEM_LIBRARY.fullmatch(library)}
        if others:
            yield f"{name} needs {', '.join(sorted(others))}"
    if seen["windows"]["_core.pyd"][""] != ["PyInit__core"]:
        yield f"_core.pyd exports {', '.join(seen['windows']['_core.pyd'][''])}"


def main(argv: Sequence[str] | None = None) -> int:
    """Build and look; 0, or 3 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--report", type=Path, help="write what was seen, as JSON")
    args = parser.parse_args(argv)
    output = args.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    epoch = date()
    os.environ["SOURCE_DATE_EPOCH"] = epoch
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / kind for kind in ("made", "source", "linux", "windows")]
        for folder in folders:
            folder.mkdir()
        made = folders[0]
        sdist = build_sdist(made, folders[1], int(epoch))
        linux = build_for_linux(sdist, made, folders[2])
        windows = build_for_windows(linux, made, folders[3])
        seen = look(sdist, linux, windows)
        for path in (sdist, linux, windows):
            shutil.copy(path, output / path.name)
            print(f"{output / path.name}: {path.stat().st_size:,} bytes")
    print(f"{seen['linux']['file']}: fits {seen['linux']['fits']}")
    for name in ("_core.pyd", "simcuda.dll"):
        needed = sorted(library for library in seen["windows"][name] if library)
        print(f"{seen['windows']['file']}: {name} needs {', '.join(needed)}")
    if args.report:
        args.report.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    wrong = [*complaints(seen)]
    print("".join(f"wrong: {line}\n" for line in wrong), end="", file=sys.stderr)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
