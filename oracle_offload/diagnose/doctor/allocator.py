"""PyTorch's CUDA allocator settings: parsed, linted, and set in time.

The settings are one string, `key:value,key:value`, in an environment variable that the allocator
reads once, at its first use. The keys and bounds below are those of torch 2.13
(c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h), the bounds measured against its
parser; older releases know fewer keys.

Which variable counts differs by release:

========== =================================================================================
torch      reads
========== =================================================================================
to 2.8     PYTORCH_CUDA_ALLOC_CONF; on ROCm also PYTORCH_HIP_ALLOC_CONF
2.9, 2.10  PYTORCH_ALLOC_CONF before PYTORCH_CUDA_ALLOC_CONF for most keys, the reverse for the
           CUDA-only ones
from 2.11  PYTORCH_CUDA_ALLOC_CONF, then PYTORCH_HIP_ALLOC_CONF, then PYTORCH_ALLOC_CONF
           (measured on 2.13)
========== =================================================================================

PYTORCH_CUDA_ALLOC_CONF is therefore the name that every release honours, and the one set here.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ...errors import OffloadError

_log = logging.getLogger("oracle_offload")

CUDA_NAME = "PYTORCH_CUDA_ALLOC_CONF"
HIP_NAME = "PYTORCH_HIP_ALLOC_CONF"
NEW_NAME = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True)
class Note:
    """One thing to say about a setting.

    Attributes
    ----------
    verdict : str
        "bad": torch refuses or ignores it, or it is known to fail; "warn": it works, badly.
    text : str
        What is wrong.
    fix : str
        What to do.
    """

    verdict: str
    text: str
    fix: str


# --- Keys and the values they take -------------------------------------------------------------


def _boolean(value: str) -> str | None:
    return None if value in ("True", "False") else "must be True or False, spelled so"


def _integer(
    low: int, high: int | None = None, power_of_2: bool = False
) -> Callable[[str], str | None]:
    def check(value: str) -> str | None:
        if not re.fullmatch(r"[0-9]{1,19}", value):  # more does not fit torch's size_t
            return "must be a whole number without a unit"
        number = int(value)
        if number < low or (high is not None and number > high):
            return f"must be at least {low}" + (f" and at most {high}" if high else "")
        if power_of_2 and number & (number - 1):
            return "must be a power of 2"
        return None

    return check


def _fraction(*, open_ends: bool) -> Callable[[str], str | None]:
    def check(value: str) -> str | None:
        try:
            number = float(value)
        except ValueError:
            return "must be a number between 0 and 1"
        if 0 < number < 1 or (not open_ends and number in (0, 1)):
            return None
        return f"must be a fraction between 0 and 1{', both excluded' if open_ends else ''}"

    return check


def _divisions(value: str) -> str | None:
    power = _integer(1, power_of_2=True)
    if not value.startswith("["):
        return power(value) and "must be a power of 2, or a list such as [256:1,512:2,>:8]"
    if not value.endswith("]"):
        return "lacks the closing bracket"
    for pair in value[1:-1].split(","):
        interval, _, division = pair.partition(":")
        if interval != ">" and power(interval):
            return f"has the interval {interval!r}, which must be a power of 2 (in MB) or >"
        if division != "0" and power(division):
            return f"has the division {division!r}, which must be 0 or a power of 2"
    return None


def _backend(value: str) -> str | None:
    known = ("native", "cudaMallocAsync", "hipMallocAsync")
    return None if value in known else "must be native or cudaMallocAsync"


_OPTIONS: dict[str, Callable[[str], str | None]] = {
    "backend": _backend,
    "expandable_segments": _boolean,
    "garbage_collection_threshold": _fraction(open_ends=True),
    "graph_capture_record_stream_reuse": _boolean,
    "large_segment_size_mb": _integer(11),
    "max_non_split_rounding_mb": _integer(20),
    "max_split_size_mb": _integer(20),
    "per_process_memory_fraction": _fraction(open_ends=False),
    "pinned_free_catch_all": _boolean,
    "pinned_max_cached_size_mb": _integer(0),
    "pinned_max_round_threshold_mb": _integer(0),
    "pinned_num_register_threads": _integer(1, 128, power_of_2=True),
    "pinned_reserve_segment_size_mb": _integer(1),
    "pinned_use_background_threads": _boolean,
    "pinned_use_cuda_host_register": _boolean,
    "pinned_use_hip_host_register": _boolean,
    "release_lock_on_cudamalloc": _boolean,
    "release_lock_on_hipmalloc": _boolean,
    "roundup_power2_divisions": _divisions,
    "throw_on_cudamalloc_oom": _boolean,
}
_FRACTIONS = ("garbage_collection_threshold", "per_process_memory_fraction")


# --- Parse and lint ----------------------------------------------------------------------------


def parse_allocator_conf(text: str) -> dict[str, str]:
    """Split a settings string into its options, the last of a repeated key winning as in torch.

    Parameters
    ----------
    text : str
        Such as "expandable_segments:True,roundup_power2_divisions:[256:1,>:8]". As in torch, white
        space is dropped wherever it is.

    Returns
    -------
    dict
        Key to value, neither checked; a part without a colon has the value "". Never raises.
    """
    return dict(_parts(text))


def _parts(text: str) -> list[tuple[str, str]]:
    parts, depth, start = [], 0, 0
    text = "".join(text.split()) + ","
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            if place > start:
                key, _, value = text[start:place].partition(":")
                parts.append((key, value))
            start, depth = place + 1, 0
    if depth > 0:  # an unclosed bracket swallowed the rest
        key, _, value = text[start:-1].partition(":")
        parts.append((key, value))
    return parts


def format_allocator_conf(options: Mapping[str, str]) -> str:
    """Return the settings string of `options`, the reverse of `parse_allocator_conf`."""
    return ",".join(f"{key}:{value}" for key, value in options.items())


def lint_allocator_conf(
    text: str, *, torch: tuple[int, int] | None = None, wsl: bool = False
) -> tuple[Note, ...]:
    """Return what is wrong with a settings string, the worst first.

    Parameters
    ----------
    text : str
        The value of the variable.
    torch : tuple of int, optional
        (major, minor) of the torch that will read it; some combinations fail in old releases only.
    wsl : bool
        Whether it runs in the Windows Subsystem for Linux.

    Returns
    -------
    tuple of Note
        Empty when nothing is known against it. Never raises.
    """
    notes = _lint_syntax(text) + _lint_meaning(parse_allocator_conf(text), torch, wsl)
    return tuple(sorted(notes, key=lambda note: note.verdict != "bad"))


def _lint_syntax(text: str) -> list[Note]:
    notes = []
    if text.strip()[:1] in ("'", '"'):
        unquoted = text.strip().strip("'\"")
        return [
            Note(
                "bad",
                "the quotes are part of the value, so torch does not know the first key",
                f"set it without quotes: {unquoted}",
            )
        ]
    parts = _parts(text)
    for key, value in parts:
        check = _OPTIONS.get(key)
        if check is None:
            notes.append(Note("bad", *_unknown_key(key, value)))
        elif problem := check(value):
            runs = not check(_read_of(key, value))
            notes.append(Note("warn" if runs else "bad", *_bad_value(key, value, problem)))
    keys = [key for key, _ in parts]
    for key in dict.fromkeys(keys):
        if keys.count(key) > 1:
            notes.append(Note("warn", f"{key} is given twice; the last one counts", "keep one"))
    return notes


def _unknown_key(key: str, value: str) -> tuple[str, str]:
    if "=" in key:
        name, _, setting = key.partition("=")
        return f"{key!r} is written with =", f"write {name}:{setting}"
    import difflib

    close = [name for name in _OPTIONS if len(key) > 3 and name.startswith(key)]
    close = close or difflib.get_close_matches(key, _OPTIONS, 1, 0.7)
    text = f"torch has no allocator option {key!r} and a CUDA build stops at it"
    return text, f"write {close[0]}:{value}" if close else f"remove {key!r}"


def _bad_value(key: str, value: str, problem: str) -> tuple[str, str]:
    text = f"{key}:{value} {problem}" if value else f"{key} has no value"
    if value.lower() in ("true", "false", "1", "0", "on", "off") and _OPTIONS[key] is _boolean:
        right = "True" if value.lower() in ("true", "1", "on") else "False"
        return f"{text}; torch stops with an error", f"write {key}:{right}"
    if inner := re.match(r"(True|False|[0-9]+)[;|:]?([a-z_0-9]+:.*)", value):
        return f"{text}; options are separated by commas", f"write {key}:{inner[1]},{inner[2]}"
    if not _OPTIONS[key](read := _read_of(key, value)):
        return f"{text}; torch reads {read} and drops the rest", f"write {key}:{read}"
    return text, f"correct or remove {key}"


def _read_of(key: str, value: str) -> str:
    """Return the number that a value begins with: torch reads that and drops the rest."""
    number = r"[0-9]*(?:\.[0-9]*)?" if key in _FRACTIONS else "[0-9]*"
    return re.sub(f"^({number}).*", r"\1", value)


def _lint_meaning(options: dict[str, str], torch: tuple[int, int] | None, wsl: bool) -> list[Note]:
    notes = []
    expandable = options.get("expandable_segments") == "True"
    split = "max_split_size_mb" in options
    collects = "garbage_collection_threshold" in options
    if expandable and wsl:
        notes.append(
            Note(
                "bad",
                "expandable_segments is reported to fail under WSL2 with "
                "`CUDA driver error` at the first allocation (pytorch#192330)",
                "set expandable_segments:False",
            )
        )
    if expandable and (split or collects):
        other = "max_split_size_mb" if split else "garbage_collection_threshold"
        old = torch is not None and torch < (2, 5)
        effect = (
            "stops with an internal assertion when memory is short (pytorch#119452, fixed by "
            "pytorch#134338)"
            if old
            else "lets reserved memory grow without bound (pytorch#123548)"
            if split
            else "has no effect on the expandable segments"
        )
        notes.append(
            Note(
                "bad" if old else "warn",
                f"{other} with expandable_segments {effect}",
                f"remove {other}",
            )
        )
    if collects and "per_process_memory_fraction" not in options:
        notes.append(
            Note(
                "warn",
                "garbage_collection_threshold does nothing unless a memory fraction is set too",
                "add per_process_memory_fraction or call set_per_process_memory_fraction",
            )
        )
    if split and not expandable:
        advice = (
            "it splits memory into segments that are given back and fetched again, at a cost in "
            "speed; PyTorch recommends it last (pytorch#113481)"
        )
        notes.append(
            Note(
                "warn",
                f"max_split_size_mb: {advice}",
                "remove it" if wsl else "try expandable_segments:True instead",
            )
        )
    if options.get("backend", "native") != "native":
        ignored = sorted(set(options) & _NATIVE_ONLY)
        if ignored:
            notes.append(
                Note(
                    "warn",
                    f"backend:{options['backend']} ignores {', '.join(ignored)}",
                    f"remove {', '.join(ignored)}",
                )
            )
    return notes


_NATIVE_ONLY = {
    "expandable_segments",
    "garbage_collection_threshold",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
}


def find_allocator_variable(
    environ: Mapping[str, str], torch: tuple[int, int] | None = None
) -> tuple[str | None, str, tuple[Note, ...]]:
    """Return the variable that torch reads, its value, and what is wrong with the choice.

    Parameters
    ----------
    environ : mapping
        The environment.
    torch : tuple of int, optional
        (major, minor) of the torch that will read it, a recent one when unknown.

    Returns
    -------
    tuple
        Name (None when no variable counts), value ("" when none counts), notes.
    """
    given = {name: environ[name] for name in (CUDA_NAME, HIP_NAME, NEW_NAME) if name in environ}
    notes: list[Note] = []
    release = torch or (2, 13)
    read = [CUDA_NAME, HIP_NAME, NEW_NAME]
    if release < (2, 9):
        read = [CUDA_NAME, HIP_NAME]
    elif release < (2, 11):
        read = [NEW_NAME, CUDA_NAME, HIP_NAME]
    if NEW_NAME in given and NEW_NAME not in read:
        notes.append(
            Note(
                "bad",
                f"torch {release[0]}.{release[1]} does not read {NEW_NAME}",
                f"set {CUDA_NAME}",
            )
        )
    if (
        release == (2, 9)
        and list(given) == [NEW_NAME]
        and "expandable_segments" in parse_allocator_conf(given[NEW_NAME])
    ):
        notes.append(
            Note(
                "bad",
                f"torch 2.9 is reported to ignore expandable_segments in {NEW_NAME} "
                "(pytorch#183387)",
                f"set {CUDA_NAME} instead",
            )
        )
    name = next((name for name in read if name in given), None)
    if name is None:
        return None, "", tuple(notes)
    differing = [
        other
        for other in given
        if parse_allocator_conf(given[other]) != parse_allocator_conf(given[name])
    ]
    if differing:
        notes.append(
            Note(
                "warn",
                f"{', '.join(differing)} says something else than {name}, which counts",
                f"set {CUDA_NAME} alone",
            )
        )
    return name, given[name], tuple(notes)


# --- Set ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllocatorSettings:
    """What `configure_allocator` did.

    Attributes
    ----------
    variable : str
        The environment variable that was set.
    asked : str
        The settings string it holds now: what was there before, overridden by what was asked.
    in_effect : str
        What torch says it uses; equal to `asked` before torch is imported.
    confirmed : bool
        Whether `in_effect` is torch's own answer.
    notes : tuple of Note
        What is known against these settings.
    """

    variable: str
    asked: str
    in_effect: str
    confirmed: bool
    notes: tuple[Note, ...] = ()

    def __str__(self) -> str:
        by = "confirmed by torch" if self.confirmed else "read by torch at its first use"
        lines = [f"{self.variable}={self.in_effect} ({by})"]
        lines += [f"{note.verdict}: {note.text}; {note.fix}" for note in self.notes]
        return "\n".join(lines)


def configure_allocator(
    conf: str | None = None, **options: bool | int | float | str
) -> AllocatorSettings:
    """Set the options of PyTorch's CUDA allocator while they can still take effect.

    Call it before the first CUDA tensor, best before `import torch`. Options that an environment
    variable already holds are kept unless they are given again. Processes started later inherit
    the settings.

    Parameters
    ----------
    conf : str, optional
        A settings string, "key:value,key:value".
    **options
        Single options, such as ``expandable_segments=True`` or ``max_split_size_mb=256``; they
        win over `conf`.

    Returns
    -------
    AllocatorSettings
        The value set and the value in effect.

    Raises
    ------
    ValueError
        An option that torch does not have, a value it does not take, or an environment variable
        that already holds such a thing.
    OffloadError
        The allocator is already in use with other settings, or torch is imported and the backend
        would change.

    Examples
    --------
    >>> import oracle_offload
    >>> oracle_offload.diagnose.configure_allocator(expandable_segments=True)  # doctest: +SKIP
    """
    wanted = parse_allocator_conf(conf) if conf else {}
    wanted.update({key: str(value) for key, value in options.items()})
    for note in _lint_syntax(format_allocator_conf(wanted)):
        raise ValueError(f"configure_allocator: {note.text}; {note.fix}")
    torch = sys.modules.get("torch")
    if torch is None:
        from .torch_build import find_torch

        release = find_torch().release
        merged = _environment_options(os.environ, release) | wanted
        in_effect = format_allocator_conf(merged)
    else:
        from .torch_build import parse_release

        release = parse_release(str(getattr(torch, "__version__", "")))
        merged = _apply(torch, wanted, release)
        in_effect = _settings_of(torch) or format_allocator_conf(merged)
    asked = format_allocator_conf(merged)
    if asked:
        _set_variables(os.environ, asked)
    notes = lint_allocator_conf(asked, torch=release, wsl=_on_wsl())
    for note in notes:
        _log.warning("configure_allocator: %s; %s", note.text, note.fix)
    return AllocatorSettings(CUDA_NAME, asked, in_effect, torch is not None, notes)


def _environment_options(
    environ: Mapping[str, str], release: tuple[int, int] | None
) -> dict[str, str]:
    name, value, _ = find_allocator_variable(environ, release)
    for note in _lint_syntax(value):
        if note.verdict == "bad":
            raise ValueError(
                f"configure_allocator: {name} is already set, and {note.text}; "
                f"{note.fix}, or unset {name}"
            )
    return parse_allocator_conf(value)


# What torch's parser raises: a bad value, a missing one (an internal assertion), one too large.
_REFUSALS = (ValueError, RuntimeError, IndexError)


def _apply(torch: Any, wanted: dict[str, str], release: tuple[int, int] | None) -> dict[str, str]:
    """Hand the options to an imported torch and return all that are now set."""
    try:
        current = _settings_of(torch)
    except _REFUSALS as error:
        raise ValueError(
            f"configure_allocator: torch refuses the settings in the environment ({error}); "
            f"unset {CUDA_NAME} and start again"
        ) from error
    now = (
        parse_allocator_conf(current)
        if current is not None
        else _environment_options(os.environ, release)
    )
    merged = now | wanted
    if merged == now:
        return merged
    if torch.cuda.is_initialized():
        raise OffloadError(
            "configure_allocator: the CUDA allocator is already in use with "
            f"{format_allocator_conf(now) or 'default settings'!r} and cannot change to "
            f"{format_allocator_conf(merged)!r}; call it before the first CUDA tensor, best "
            f"before `import torch`, or set {CUDA_NAME} in the shell"
        )
    if merged.get("backend", "native") != now.get("backend", "native"):
        raise OffloadError(
            f"configure_allocator: backend:{merged.get('backend')} is chosen when torch is "
            "imported, and torch already is; call it before `import torch`"
        )
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch.cuda.memory, "_set_allocator_settings", None
    )
    if setter is None:
        raise OffloadError(
            f"configure_allocator: torch {torch.__version__} takes no settings once imported; "
            "call it before `import torch`"
        )
    try:
        setter(format_allocator_conf(merged))
    except _REFUSALS as error:
        raise ValueError(
            f"configure_allocator: torch {torch.__version__} refuses "
            f"{format_allocator_conf(merged)!r}: {str(error).splitlines()[0]}"
        ) from error
    return merged


def _settings_of(torch: Any) -> str | None:
    """Return the settings string an imported torch has in effect, None if it cannot say."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if read is None else str(read())


def _set_variables(environ: MutableMapping[str, str], value: str) -> None:
    # The other names are kept in step, so that no release sees two answers.
    for name in (CUDA_NAME, HIP_NAME, NEW_NAME):
        if name == CUDA_NAME or name in environ:
            environ[name] = value


def _on_wsl() -> bool:
    from .system import System

    return System().wsl
