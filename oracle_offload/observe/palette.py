"""The colours of every page and picture, each for a light and for a dark background.

Colours that are next to each other differ in how light they are, and not in hue alone: half of
them are strong, half are as faint as text may be. A notebook has a theme of its own, which
outweighs that of the system.
"""

from __future__ import annotations

from collections.abc import Iterable

GROUND = ("#ffffff", "#111418")
_TEXT = {
    "ground": GROUND,
    "ink": ("#1d2329", "#e4e8ec"),
    "faint": ("#5b6570", "#9aa4ae"),
    "bad": ("#c62828", "#f0716b"),
    "warn": ("#8a5200", "#e0a040"),
    "ok": ("#2e7d32", "#5cb860"),
    "unknown": ("#67737e", "#8a96a2"),
}
# Who holds memory: the parts of bars.
_PARTS = {
    "weights": ("#1873db", "#237fe7"),
    "tensors": ("#112562", "#d6e0fb"),
    "other-tensors": ("#0f8379", "#108f84"),
    "gradients": ("#ca33a4", "#d148af"),
    "optimizer-state": ("#093110", "#92f6a2"),
    "activations": ("#0f8379", "#108f84"),
    "not-distinguished": ("#6c757f", "#76808b"),
    "arena": ("#0b2563", "#d4e1fe"),
    "page-locked": ("#0b2563", "#d4e1fe"),
    "pageable": ("#1873db", "#237fe7"),
    "cached": ("#9455d4", "#9e64d8"),
    "page-cache": ("#09311d", "#8af5c0"),
    "other-processes": ("#51170c", "#fdd7d0"),
    "outside": ("#6c757f", "#76808b"),
    "everything-else": ("#6c757f", "#76808b"),
}
# A step: what its lanes show, and the blocks in the arena, of which neighbours differ most.
_STEP = {
    "compute": ("#1873db", "#237fe7"),
    "stall": ("#e02929", "#e44545"),
    "rest": ("#a86500", "#b66d00"),
    "h2d": ("#22872a", "#25922e"),
    "decode": ("#d92973", "#de4384"),
    "d2h": ("#9455d4", "#9e64d8"),
    "arena-0": ("#138282", "#148e8e"),
    "arena-1": ("#3f2410", "#f6dbc8"),
    "arena-2": ("#8f6e4d", "#9c7854"),
    "arena-3": ("#0a2f36", "#a9ebf8"),
    "arena-4": ("#667e1f", "#6f8822"),
    "arena-5": ("#421c42", "#f4e0f4"),
}
COLOURS: dict[str, tuple[str, str]] = {**_TEXT, **_PARTS, **_STEP}
PAGE = [name for name in (*_TEXT, *_PARTS, "compute") if name not in ("ground", "ink")]


def themed(selectors: Iterable[str], names: Iterable[str]) -> str:
    """Return the style that gives elements the colours `names`, as variables of the theme shown."""
    selectors, names = list(selectors), list(names)

    def rule(before: str, dark: bool) -> str:
        where = ",".join(
            f"{theme} {selector}".strip() for theme in before.split(",") for selector in selectors
        )
        told = ";".join(f"--oo-{name}:{COLOURS[name][dark]}" for name in names)
        return f"{where}{{{told}}}"

    return (
        f"{rule('', False)}\n@media (prefers-color-scheme:dark){{{rule('', True)}}}\n"
        f"{rule('[data-jp-theme-light=true],.vscode-light', False)}\n"
        f"{rule('[data-jp-theme-light=false],.vscode-dark', True)}\n"
    )
