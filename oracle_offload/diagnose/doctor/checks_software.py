"""Checks of the software: torch, its allocator, switches left on, AI-Toolkit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from .allocator import find_allocator_variable, lint_allocator_conf, parse_allocator_conf
from .checks_gpu import cards_installed, driver_version
from .finding import Finding, worst
from .system import System
from .torch_build import parse_release

# The oldest driver branch that runs programs built with a CUDA major version: NVIDIA, "CUDA
# Compatibility", minor version compatibility, table 1.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def check_torch(system: System) -> Finding:
    """The torch build against the driver."""
    torch = system.torch
    facts: dict[str, object] = {
        "version": torch.version,
        "cuda": torch.cuda,
        "hip": torch.hip,
    }
    if torch.version is None:
        return Finding("torch", "unknown", "not found", torch.why, facts=facts)
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    text = f"{torch.version} ({built})"
    if torch.import_error:
        why = f"`import torch` fails: {torch.import_error}"
        return Finding("torch", "bad", text, why, "reinstall torch for this Python", facts)
    if torch.hip:
        why = "weights are streamed through the CUDA driver, which ROCm is not"
        return Finding("torch", "warn", text, why, "use a CUDA build on an NVIDIA card", facts)
    if torch.cuda is None:
        if cards_installed(system):
            why = "this build cannot use the card that is installed"
            return Finding("torch", "bad", text, why, "install a CUDA build of torch", facts)
        return Finding("torch", "ok", text, "no card is visible that it could miss", facts=facts)
    needs, driver = parse_release(torch.cuda), driver_version(system)
    oldest = _OLDEST_DRIVER.get(needs[0]) if needs else None
    have = parse_release(driver)
    if have is None:
        why = f"whether the driver is new enough is not visible: {system.gpus.why}"
        return Finding("torch", "unknown", text, why, facts=facts)
    facts["oldest_driver"] = oldest
    if oldest is not None and have[0] < oldest:
        why = f"CUDA {torch.cuda} needs driver {oldest} or newer, this is {driver}"
        fix = f"update the driver, or install a torch built for CUDA {(needs or (12, 0))[0] - 1}"
        return Finding("torch", "bad", text, why, fix, facts)
    supports = system.gpus.cuda_version
    if needs and supports and supports < needs:
        why = (
            f"the driver was made for CUDA {supports[0]}.{supports[1]} and runs {torch.cuda} by "
            "minor version compatibility, with some features off"
        )
        return Finding("torch", "ok", text, why, facts=facts)
    return Finding("torch", "ok", text, facts=facts)


def check_allocator(system: System) -> Finding:
    """The allocator settings asked for, and those in effect."""
    torch = system.torch
    name, value, notes = find_allocator_variable(system.environ, torch.release)
    notes += lint_allocator_conf(value, torch=torch.release, wsl=system.wsl)
    facts = {"variable": name, "asked": value, "in_effect": torch.settings}
    text = f"{name}={value}" if name else "defaults"
    verdict = worst("ok", *(note.verdict for note in notes))
    reasons = [note.text for note in notes]
    fixes = list(dict.fromkeys(note.fix for note in notes))
    if torch.settings_error:
        verdict = "bad"
        reasons.insert(0, f"torch refuses it: {torch.settings_error}")
        fixes = fixes or [f"correct or unset {name}"]
    elif torch.settings is None:
        if name:
            unseen = torch.why or torch.import_error or "torch was not asked"
            reasons.append(f"not confirmed to be in effect: {unseen}")
    elif parse_allocator_conf(torch.settings) != parse_allocator_conf(value):
        verdict = "bad"
        text += f"; in effect: {torch.settings or 'defaults'}"
        reasons.append("torch does not use what was asked")
        fixes.append("set PYTORCH_CUDA_ALLOC_CONF, which every release reads")
    elif name:
        text += " (in effect)"
    return Finding("allocator", verdict, text, "; ".join(reasons), "; ".join(fixes), facts)


def _always(value: str) -> bool:
    return True


# Variable, which values matter, verdict (the bad first), what it does, what to do. The last two are
# advice found in guides that does nothing.
_SWITCHES: tuple[tuple[str, Callable[[str], bool], str, str, str], ...] = (
    (
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _always,
        "bad",
        "turns the caching allocator off, so every tensor waits for the driver",
        "unset it",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "1".__eq__,
        "bad",
        "every launch waits for its end, so copies and computation cannot overlap",
        "unset it after debugging",
    ),
    (
        "CUDA_VISIBLE_DEVICES",
        ("", "-1").__contains__,
        "bad",
        "hides every card from CUDA",
        "unset it, or name a card: CUDA_VISIBLE_DEVICES=0",
    ),
    (
        "CUDA_MODULE_LOADING",
        "EAGER".__eq__,
        "warn",
        "loads every kernel of every library at the start, into memory that training lacks then",
        "unset it: LAZY is the default from CUDA 12.2 on Linux and 12.3 on Windows",
    ),
    (
        "CUDA_MODULE_LOADING",
        lambda value: value not in ("DEFAULT", "LAZY", "EAGER"),
        "warn",
        "CUDA knows DEFAULT, LAZY and EAGER",
        "unset it, or write LAZY",
    ),
    (
        "PYTORCH_CUDA_MEMCHECK",
        _always,
        "warn",
        "only skips some of PyTorch's own tests; no effect on training",
        "remove it",
    ),
    (
        "TORCH_USE_CUDA_DSA",
        _always,
        "warn",
        "a choice made when torch is compiled; no effect as a variable (pytorch#121894)",
        "remove it",
    ),
)


def check_switches(system: System) -> Finding:
    """Environment variables that slow training down, or that do nothing."""
    found = [
        (name, system.environ[name], *rest)
        for name, matters, *rest in _SWITCHES
        if name in system.environ and matters(system.environ[name].strip())
    ]
    if not found:
        return Finding("switches", "ok", "none set that hurts")
    return Finding(
        "switches",
        worst(*(row[2] for row in found)),
        ", ".join(f"{row[0]}={row[1]}" for row in found),
        "; ".join(f"{row[0]}: {row[3]}" for row in found),
        "; ".join(dict.fromkeys(row[4] for row in found)),
        {"variables": {row[0]: row[1] for row in found}},
    )


def check_aitoolkit(system: System) -> Finding:
    """An AI-Toolkit checkout: its version, and whether it has the classes that we replace."""
    name, path = "AI-Toolkit", system.aitoolkit
    if path is None:
        return Finding(name, "unknown", "not looked for", "give --aitoolkit PATH to examine one")
    if not os.path.isdir(path):
        return Finding(name, "bad", path, "no such directory", "give the path of the checkout")
    version_text = _text_of(os.path.join(path, "version.py"))
    match = re.search(r"^VERSION\s*=\s*['\"]([^'\"]+)", version_text or "", re.MULTILINE)
    version, commit = (match[1] if match else None), _git_commit(path)
    facts = {"path": path, "version": version, "commit": commit}
    text = f"{version or 'version unknown'}" + (f", commit {commit[:8]}" if commit else "")
    manager = _text_of(os.path.join(path, "toolkit", "memory_management", "manager.py"))
    if manager is None or "class MemoryManager" not in manager:
        if not os.path.isdir(os.path.join(path, "toolkit")):
            why, fix = "there is no toolkit/ in it", "give the path of an AI-Toolkit checkout"
        else:
            why = "it has no toolkit/memory_management/manager.py with a MemoryManager"
            fix = "update it: git pull"
        return Finding(name, "bad", text, why, fix, facts)
    package = _text_of(os.path.join(path, "toolkit", "memory_management", "__init__.py")) or ""
    if "sync_grad_transfers" not in package:
        why = "its memory management is older than sync_grad_transfers, which trainers call now"
        return Finding(name, "warn", text, why, "update it: git pull", facts)
    if version is None:
        why = "version.py has no VERSION"
        return Finding(name, "warn", text, why, "check that it is AI-Toolkit itself", facts)
    return Finding(name, "ok", text, facts=facts)


def _text_of(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return None


def _git_commit(path: str) -> str | None:
    """Return the commit of a checkout, read from its files: git may not be installed."""
    git = os.path.join(path, ".git")
    if (pointer := _text_of(git)) and pointer.startswith("gitdir:"):  # a worktree or submodule
        git = os.path.join(path, pointer.partition(":")[2].strip())
    head = (_text_of(os.path.join(git, "HEAD")) or "").strip()
    if head.startswith("ref:"):
        name = head.partition(":")[2].strip()
        common = (_text_of(os.path.join(git, "commondir")) or "").strip()
        shared = os.path.join(git, common) if common else git
        loose = _text_of(os.path.join(shared, name))
        packed = _text_of(os.path.join(shared, "packed-refs")) or ""
        listed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(name)}$", packed, re.MULTILINE)
        head = loose.strip() if loose else listed[1] if listed else ""
    return head if re.fullmatch(r"[0-9a-f]{40}", head) else None
