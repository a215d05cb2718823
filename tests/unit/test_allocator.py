"""Allocator settings: parsed and linted as torch does, and set in time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle_offload.diagnose.doctor.allocator import (
    _OPTIONS,
    configure_allocator,
    find_allocator_variable,
    format_allocator_conf,
    lint_allocator_conf,
    parse_allocator_conf,
)
from oracle_offload.errors import OffloadError

ROOT = Path(__file__).parent.parent.parent
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def bad(text: str, **context: object) -> list[str]:
    notes = lint_allocator_conf(text, **context)  # type: ignore[arg-type]
    return [note.text for note in notes if note.verdict == "bad"]


def warned(text: str, **context: object) -> list[str]:
    notes = lint_allocator_conf(text, **context)  # type: ignore[arg-type]
    return [note.text for note in notes if note.verdict == "warn"]


# --- Parse -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        (",,", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (
            " max_split_size_mb : 64 ,\n backend:native,",
            {"max_split_size_mb": "64", "backend": "native"},
        ),
        (
            "roundup_power2_divisions:[256:1,>:8],max_split_size_mb:64",
            {"roundup_power2_divisions": "[256:1,>:8]", "max_split_size_mb": "64"},
        ),
        ("roundup_power2_divisions:[256:1", {"roundup_power2_divisions": "[256:1"}),
        ("max_split_size_mb", {"max_split_size_mb": ""}),
        ("max_split_size_mb:64,max_split_size_mb:128", {"max_split_size_mb": "128"}),
    ],
)
def test_parse(text: str, options: dict[str, str]) -> None:
    assert parse_allocator_conf(text) == options


@given(st.text(max_size=200))
@settings(max_examples=500)
def test_any_text_is_parsed_and_linted_without_raising(text: str) -> None:
    options = parse_allocator_conf(text)
    assert parse_allocator_conf(format_allocator_conf(options)).keys() <= {*options, ""}
    lint_allocator_conf(text)


# --- Lint against torch's own parser -----------------------------------------------------------

CASES = [
    "expandable_segments:True",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments:True;max_split_size_mb:64",
    "expandable_segments:True max_split_size_mb:64",
    "max_split_size_mb:20",
    "max_split_size_mb:19",
    "max_split_size_mb:0",
    "max_split_size_mb:abc",
    "max_split_size_mb:²",
    "max_split_size_mb:" + "9" * 5000,
    "max_split_size_mb:1.5",
    "max_split_size_mb:128MB",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_non_split_rounding_mb:20",
    "max_non_split_rounding_mb:19",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:80",
    "garbage_collection_threshold:1.5",
    "garbage_collection_threshold:0.5x",
    "max_split_size_mb:64.5",
    "max_split_size_mb:5MB",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[256:0,>:4]",
    "roundup_power2_divisions:[256:1,512:2",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[100:4]",
    "pinned_use_background_threads:True",
    "pinned_use_background_threads:yes",
    "pinned_use_background_threads:1x",
    "pinned_max_round_threshold_mb:64",
    "pinned_max_cached_size_mb:0",
]


def test_bad_is_exactly_what_the_installed_torch_refuses() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} has no parser that can be called without a card")
    before = torch._C._accelerator_getAllocatorSettings()
    disagreed = []
    try:
        for text in CASES:
            try:
                torch._C._accelerator_setAllocatorSettings(text)
                refused = False
            except (ValueError, RuntimeError, IndexError):
                refused = True
            if refused != bool(bad(text)):
                disagreed.append((text, refused, lint_allocator_conf(text)))
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
    assert disagreed == []


def cuda_keys(torch_directory: Path) -> set[str]:
    """Keys of the CUDA allocator, from the header that torch installs."""
    header = torch_directory / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
    if not header.exists():
        pytest.skip("this torch installs no CUDAAllocatorConfig.h")
    text = re.search(r"> keys\{(.*?)\};", header.read_text(), re.DOTALL)
    if text is None:
        pytest.skip("this torch's header lists no keys")
    literals = re.sub(r"//[^\n]*", "", text[1])
    # Neighbouring literals are one key, split so that the ROCm build does not rename it.
    return {"".join(re.findall(r'"(.*?)"', item)) for item in literals.split(",")}


def test_no_key_of_the_installed_torch_is_unknown_to_the_linter() -> None:
    torch = pytest.importorskip("torch")
    keys = cuda_keys(Path(torch.__file__).parent)
    assert "backend" in keys
    assert keys - set(_OPTIONS) == set()


def test_every_other_key_is_one_that_torchs_common_parser_knows() -> None:
    torch = pytest.importorskip("torch")
    common = set(_OPTIONS) - cuda_keys(Path(torch.__file__).parent)
    before = torch._C._accelerator_getAllocatorSettings()
    unknown = []
    try:
        for key in sorted(common):
            try:  # an unknown key is skipped without a look at its value
                torch._C._accelerator_setAllocatorSettings(f"{key}:nonsense")
                unknown.append(key)
            except (ValueError, RuntimeError):
                pass
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
    assert unknown == [] and len(common) == 9


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("expandable_segments:true", "write expandable_segments:True"),
        ("expandable_segments:0", "write expandable_segments:False"),
        ("expandable_segment:True", "write expandable_segments:True"),
        ("max_split_size_mb=128", "write max_split_size_mb:128"),
        ("max_split_size:128", "write max_split_size_mb:128"),
        (
            "expandable_segments:True;max_split_size_mb:64",
            "write expandable_segments:True,max_split_size_mb:64",
        ),
        ('"expandable_segments:True"', "set it without quotes: expandable_segments:True"),
        ("max_split_size_mb:128MB", "write max_split_size_mb:128"),
    ],
)
def test_slips_come_with_the_text_to_write(text: str, fix: str) -> None:
    assert fix in [note.fix for note in lint_allocator_conf(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max:1", "bad: torch has no allocator option 'max' and a CUDA build stops at it; remove "
         "'max'"),
        ("thro:True", "bad: torch has no allocator option 'thro' and a CUDA build stops at it; "
         "write throw_on_cudamalloc_oom:True"),
        ("expandible_segments:True", "bad: torch has no allocator option 'expandible_segments' "
         "and a CUDA build stops at it; write expandable_segments:True"),
        ("expandable_segments:ON", "bad: expandable_segments:ON must be True or False, spelled so; "
         "torch stops with an error; write expandable_segments:True"),
        ("expandable_segments:1x", "bad: expandable_segments:1x must be True or False, spelled so; "
         "correct or remove expandable_segments"),
        ("backend:on", "bad: backend:on must be native or cudaMallocAsync; correct or remove "
         "backend"),
        ("large_segment_size_mb:64.5", "warn: large_segment_size_mb:64.5 must be a whole number "
         "without a unit; torch reads 64 and drops the rest; write large_segment_size_mb:64"),
        ("large_segment_size_mb:5MB", "bad: large_segment_size_mb:5MB must be a whole number "
         "without a unit; correct or remove large_segment_size_mb"),
        ("per_process_memory_fraction:1.5", "bad: per_process_memory_fraction:1.5 must be a "
         "fraction between 0 and 1; correct or remove per_process_memory_fraction"),
        ("per_process_memory_fraction:0.5x", "warn: per_process_memory_fraction:0.5x must be a "
         "number between 0 and 1; torch reads 0.5 and drops the rest; write "
         "per_process_memory_fraction:0.5"),
        ("roundup_power2_divisions:4x,roundup_power2_divisions:8",
         "warn: roundup_power2_divisions:4x must be a power of 2, or a list such as "
         "[256:1,512:2,>:8]; torch reads 4 and drops the rest; write roundup_power2_divisions:4\n"
         "warn: roundup_power2_divisions is given twice; the last one counts; keep one"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_value_that_torch_reads_otherwise_or_not_at_all(
    text: str, expected: str
) -> None:
    said = [f"{note.verdict}: {note.text}; {note.fix}" for note in lint_allocator_conf(text)]
    assert "\n".join(said) == expected


def test_options_that_do_not_go_together_are_named_with_the_one_to_remove() -> None:
    def said(text: str, torch: tuple[int, int] | None = None) -> list[tuple[str, str]]:
        return [(note.verdict, note.fix) for note in lint_allocator_conf(text, torch=torch)]

    split = "expandable_segments:True,max_split_size_mb:512"
    collects = (
        "expandable_segments:True,garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"
    )
    assert said(split) == said(split, (2, 5)) == [("warn", "remove max_split_size_mb")]
    assert said(split, (2, 4)) == [("bad", "remove max_split_size_mb")]
    assert said(collects) == [("warn", "remove garbage_collection_threshold")]
    assert said(collects, (2, 4)) == [("bad", "remove garbage_collection_threshold")]
    assert warned(collects)[0].endswith("has no effect on the expandable segments")


def test_expandable_segments_with_split_size_asserts_in_old_torch_and_grows_in_new() -> None:
    text = "expandable_segments:True,max_split_size_mb:512"
    assert "internal assertion" in bad(text, torch=(2, 4))[0]
    assert bad(text, torch=(2, 5)) == []
    assert "grow without bound" in warned(text, torch=(2, 13))[0]
    assert warned("expandable_segments:False,max_split_size_mb:512")[0].startswith("max_split")


def test_an_option_that_is_given_twice_is_named_once() -> None:
    text = "max_split_size_mb:64,max_split_size_mb:128,max_split_size_mb:256"
    said = "max_split_size_mb is given twice; the last one counts"
    assert [note.text for note in lint_allocator_conf(text) if "twice" in note.text] == [said]


def test_expandable_segments_is_bad_under_wsl_only() -> None:
    assert "WSL2" in bad("expandable_segments:True", wsl=True)[0]
    assert lint_allocator_conf("expandable_segments:True") == ()
    assert lint_allocator_conf("expandable_segments:False", wsl=True) == ()


def test_collection_threshold_needs_a_memory_fraction() -> None:
    assert "does nothing" in warned("garbage_collection_threshold:0.8")[0]
    both = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"
    assert lint_allocator_conf(both) == ()


def test_async_backend_names_what_it_ignores() -> None:
    note = warned("backend:cudaMallocAsync,roundup_power2_divisions:4")[0]
    assert "ignores roundup_power2_divisions" in note
    assert lint_allocator_conf("backend:cudaMallocAsync") == ()


# --- Which variable counts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "counts"),
    [
        ((2, 8), "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 9), "PYTORCH_ALLOC_CONF"),
        ((2, 10), "PYTORCH_ALLOC_CONF"),
        ((2, 11), "PYTORCH_CUDA_ALLOC_CONF"),
        ((2, 13), "PYTORCH_CUDA_ALLOC_CONF"),
        (None, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_variable_that_counts(torch: tuple[int, int] | None, counts: str) -> None:
    environ = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
    }
    name, value, notes = find_allocator_variable(environ, torch)
    assert (name, value) == (counts, environ[counts])
    assert any("something else" in note.text for note in notes)


def test_new_name_is_not_read_before_2_9_and_partly_in_2_9() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    name, _, notes = find_allocator_variable(environ, (2, 8))
    assert name is None and notes[0].verdict == "bad"
    name, _, notes = find_allocator_variable(environ, (2, 9))
    assert name == "PYTORCH_ALLOC_CONF" and "183387" in notes[0].text
    assert find_allocator_variable(environ, (2, 13))[2] == ()
    environ["PYTORCH_CUDA_ALLOC_CONF"] = environ["PYTORCH_ALLOC_CONF"]
    assert find_allocator_variable(environ, (2, 9))[2] == ()
    assert find_allocator_variable({"PYTORCH_ALLOC_CONF": "backend:native"}, (2, 9))[2] == ()


def test_order_of_names_is_that_of_the_installed_torch() -> None:
    """The table in allocator.py, checked where it was measured."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip(f"torch {torch.__version__} cannot say its settings without a card")
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    values = {name: f"max_split_size_mb:{64 + i}" for i, name in enumerate(NAMES)}
    environs = [
        {name: text for name, text in values.items() if name != left_out}
        for left_out in (None, *NAMES)
    ]
    # torch reads them when it first needs them, once: in a process for each, forked before that.
    said = run_python(f"""
import os, torch
for environ in {environs}:
    child = os.fork()
    if not child:
        os.environ.update(environ)
        print(torch._C._accelerator_getAllocatorSettings(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
""")
    found = [find_allocator_variable(environ, release) for environ in environs]  # type: ignore[arg-type]
    assert said.splitlines() == [expected for _, expected, _ in found]
    assert len(set(said.splitlines())) > 1


# --- Set ---------------------------------------------------------------------------------------


def run_python(code: str, environ: dict[str, str] | None = None) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REPORT = """
import json, os
def report(said):
    print(json.dumps({"variable": said.variable, "asked": said.asked, "effect": said.in_effect,
                      "confirmed": said.confirmed, "environ": os.environ.get(said.variable),
                      "new": os.environ.get("PYTORCH_ALLOC_CONF"), "text": str(said)}))
"""


def test_set_before_import_is_what_torch_then_uses() -> None:
    pytest.importorskip("torch")
    out = run_python(
        REPORT
        + "import sys, oracle_offload\n"
        + "said = oracle_offload.diagnose.configure_allocator(expandable_segments=True)\n"
        + "assert 'torch' not in sys.modules\n"
        + "report(said)\n"
        + "import torch\n"
        + "read = getattr(torch._C, '_accelerator_getAllocatorSettings', None)\n"
        + "print(read() if read else said.asked)\n"
    )
    said, effect = out.splitlines()
    report = json.loads(said)
    assert report["variable"] == "PYTORCH_CUDA_ALLOC_CONF"
    assert report["asked"] == report["effect"] == report["environ"] == effect
    assert effect == "expandable_segments:True"
    assert report["confirmed"] is False
    assert "read by torch at its first use" in report["text"]


def test_earlier_settings_are_kept_and_other_names_follow() -> None:
    out = run_python(
        REPORT
        + "import oracle_offload\n"
        + "report(oracle_offload.diagnose.configure_allocator('max_split_size_mb:64', "
        + "expandable_segments=False))\n",
        {"PYTORCH_ALLOC_CONF": "pinned_use_background_threads:True,max_split_size_mb:32"},
    )
    report = json.loads(out)
    assert parse_allocator_conf(report["environ"]) == {
        "pinned_use_background_threads": "True",
        "max_split_size_mb": "64",
        "expandable_segments": "False",
    }
    assert report["new"] == report["environ"]


def test_set_after_import_reports_torchs_own_answer() -> None:
    pytest.importorskip("torch")
    out = run_python(
        REPORT
        + "import torch, oracle_offload\n"
        + "report(oracle_offload.diagnose.configure_allocator(max_split_size_mb=256))\n"
        + "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    said, effect = out.splitlines()
    assert json.loads(said)["effect"] == effect == "max_split_size_mb:256"
    assert json.loads(said)["confirmed"] is True


REFUSED = """
import os, oracle_offload
try:
    oracle_offload.diagnose.configure_allocator({arguments})
except {error} as error:
    print(error)
else:
    raise SystemExit("no error")
assert {value!r} == os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "the environment was changed"
"""


def test_initialised_allocator_is_refused_unless_nothing_changes() -> None:
    pytest.importorskip("torch")
    # No card is needed to be "initialised": the flag is what torch.cuda itself looks at.
    start = "import torch; torch.cuda._initialized = True\n"
    error = "oracle_offload.OffloadError"
    value = "max_split_size_mb:64"
    code = REFUSED.format(arguments="max_split_size_mb=128", error=error, value=value)
    message = run_python(start + code, {"PYTORCH_CUDA_ALLOC_CONF": value})
    assert "already in use with 'max_split_size_mb:64'" in message
    assert "before `import torch`" in message
    same = "from oracle_offload.diagnose import configure_allocator as call; "
    same += "print(call(max_split_size_mb=64))"
    assert value in run_python(start + same, {"PYTORCH_CUDA_ALLOC_CONF": value})


def test_backend_cannot_change_after_import() -> None:
    pytest.importorskip("torch")
    code = REFUSED.format(
        arguments="backend='cudaMallocAsync'", error="oracle_offload.OffloadError", value=None
    )
    assert "chosen when torch is imported" in run_python("import torch\n" + code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("expandable_segments='yes'", "must be True or False"),
        ("max_split_size_mb=5", "at least 20"),
        ("max_split=64", "write max_split_size_mb:64"),
        ("'max_split_size_mb=64'", "write max_split_size_mb:64"),
        ("garbage_collection_threshold=80", "fraction between 0 and 1"),
        ("max_split_size_mb='64MB'", "write max_split_size_mb:64"),
    ],
)
def test_wrong_options_are_refused_with_the_right_one(arguments: str, words: str) -> None:
    code = REFUSED.format(arguments=arguments, error="ValueError", value=None)
    assert words in run_python(code)


@pytest.mark.parametrize(
    "broken", ["max_split_size_mb:5", "max_split_size_mb", "roundup_power2_divisions:["]
)
def test_broken_variable_is_named_after_import_too(broken: str) -> None:
    pytest.importorskip("torch")
    code = REFUSED.format(arguments="expandable_segments=True", error="ValueError", value=broken)
    message = run_python("import torch\n" + code, {"PYTORCH_CUDA_ALLOC_CONF": broken})
    assert "torch refuses the settings in the environment" in message


def test_broken_variable_is_named() -> None:
    code = REFUSED.format(
        arguments="expandable_segments=True", error="ValueError", value="max_split_size_mb:5"
    )
    message = run_python(code, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:5"})
    assert "PYTORCH_CUDA_ALLOC_CONF is already set" in message


def test_without_arguments_it_reports_and_changes_nothing() -> None:
    out = run_python(
        "import os, oracle_offload\n"
        "said = oracle_offload.diagnose.configure_allocator()\n"
        "print(repr(said.in_effect), 'PYTORCH_CUDA_ALLOC_CONF' in os.environ)"
    )
    assert out == "'' False"


class OldTorch:
    """A release that cannot say its settings, and takes them through torch.cuda alone."""

    def __init__(self, release: str = "2.7.1", *, takes: object = None) -> None:
        self.__version__ = release
        self.taken: list[str] = []
        memory = SimpleNamespace()
        if takes is not None:
            memory._set_allocator_settings = self.taken.append if takes == "all" else takes
        self._C = SimpleNamespace()
        self.cuda = SimpleNamespace(is_initialized=lambda: False, memory=memory)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment without allocator settings."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", clean)
    return clean


def import_torch(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]


def test_an_older_torch_is_given_the_settings_of_the_environment_and_the_new_ones(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    torch = OldTorch(takes="all")
    import_torch(monkeypatch, torch)
    environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    environ["PYTORCH_HIP_ALLOC_CONF"] = ""
    said = configure_allocator(garbage_collection_threshold=0.8)
    whole = "max_split_size_mb:64,garbage_collection_threshold:0.8"
    assert torch.taken == [whole] and said.in_effect == said.asked == whole
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == environ["PYTORCH_HIP_ALLOC_CONF"] == whole
    assert "PYTORCH_ALLOC_CONF" not in environ
    assert configure_allocator(max_split_size_mb=64).asked == whole and torch.taken == [whole]


def test_settings_that_an_imported_torch_does_not_take_change_nothing(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError(f"Unrecognized key in {settings}\nException raised from parseArgs")

    refused = (
        "torch 2.7.1 refuses 'max_split_size_mb:64': Unrecognized key in max_split_size_mb:64$"
    )
    for torch, error, words in (
        (OldTorch(takes=refuse), ValueError, refused),
        (OldTorch(), OffloadError, "torch 2.7.1 takes no settings once imported; call it before"),
    ):
        import_torch(monkeypatch, torch)
        with pytest.raises(error, match=words):
            configure_allocator(max_split_size_mb=64)
        assert not {*NAMES} & {*environ}


def test_the_newer_way_to_set_is_taken_where_a_torch_has_both(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    torch = OldTorch(takes="all")
    newer: list[str] = []
    torch._C._accelerator_setAllocatorSettings = newer.append
    torch._C._accelerator_getAllocatorSettings = lambda: newer[-1] if newer else ""
    import_torch(monkeypatch, torch)
    said = configure_allocator(max_split_size_mb=64)
    assert (newer, torch.taken, said.in_effect) == (["max_split_size_mb:64"], [], newer[0])
    assert said.confirmed and "confirmed by torch" in str(said)


def test_what_torch_says_it_uses_is_what_is_in_effect(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    torch = OldTorch(takes="all")
    torch._C._accelerator_getAllocatorSettings = lambda: "max_split_size_mb:64,backend:native"
    import_torch(monkeypatch, torch)
    said = configure_allocator(backend="native")
    assert (said.asked, said.in_effect) == (said.in_effect, "max_split_size_mb:64,backend:native")
    assert torch.taken == [] and environ["PYTORCH_CUDA_ALLOC_CONF"] == said.asked
    said = configure_allocator(max_split_size_mb=128)
    assert torch.taken == [said.asked] == ["max_split_size_mb:128,backend:native"]
    assert said.in_effect == "max_split_size_mb:64,backend:native", "it was not taken over"


def test_the_backend_may_be_named_again_but_not_changed(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    torch = OldTorch(takes="all")
    import_torch(monkeypatch, torch)
    configure_allocator(backend="native", max_split_size_mb=64)
    assert torch.taken == ["backend:native,max_split_size_mb:64"]
    environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    with pytest.raises(OffloadError, match="backend:native is chosen when torch is imported"):
        configure_allocator(backend="native")


def test_default_settings_in_use_are_called_so(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    torch = OldTorch(takes="all")
    torch.cuda.is_initialized = lambda: True
    import_torch(monkeypatch, torch)
    with pytest.raises(OffloadError, match=r"already in use with 'default settings' and cannot"):
        configure_allocator(max_split_size_mb=64)


def test_what_is_known_against_settings_is_said_and_logged(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    import_torch(monkeypatch, OldTorch(takes="all"))
    said = configure_allocator("max_split_size_mb:64", expandable_segments=True)
    asked = "max_split_size_mb:64,expandable_segments:True"
    assert said.notes and str(said).split("\n") == [
        f"PYTORCH_CUDA_ALLOC_CONF={asked} (confirmed by torch)",
        *(f"{note.verdict}: {note.text}; {note.fix}" for note in said.notes),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"configure_allocator: {note.text}; {note.fix}" for note in said.notes
    ]


def test_a_broken_variable_of_an_older_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    import_torch(monkeypatch, OldTorch(takes="all"))
    environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:5"
    words = "PYTORCH_CUDA_ALLOC_CONF is already set, and max_split_size_mb:5 must be at least 20"
    with pytest.raises(ValueError, match=f"{words}; .*, or unset PYTORCH_CUDA_ALLOC_CONF"):
        configure_allocator(expandable_segments=True)


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("pinned_num_register_threads:1", None),
        ("pinned_num_register_threads:128", None),
        ("pinned_num_register_threads:0", "at least 1 and at most 128"),
        ("pinned_num_register_threads:129", "at least 1 and at most 128"),
        ("pinned_num_register_threads:96", "must be a power of 2"),
        ("max_split_size_mb:20", None),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:" + "1" * 19, None),
        ("max_split_size_mb:" + "1" * 20, "whole number"),
        ("per_process_memory_fraction:0", None),
        ("per_process_memory_fraction:1.0", None),
        ("per_process_memory_fraction:2", "between 0 and 1"),
        ("per_process_memory_fraction:half", "must be a number between 0 and 1"),
        ("garbage_collection_threshold:0", "both excluded"),
        ("garbage_collection_threshold:1", "both excluded"),
        ("garbage_collection_threshold:0.99", None),
        ("roundup_power2_divisions:8", None),
        ("roundup_power2_divisions:6", "power of 2, or a list"),
        ("roundup_power2_divisions:[256:1,512:0,>:8]", None),
        ("roundup_power2_divisions:[256:1", "closing bracket"),
        ("roundup_power2_divisions:[255:1]", "interval '255'"),
        ("roundup_power2_divisions:[256:3]", "division '3'"),
    ],
)
def test_values_at_the_ends_of_what_an_option_takes(
    environ: dict[str, str], conf: str, words: str | None
) -> None:
    bad = [note for note in lint_allocator_conf(conf, torch=(2, 13)) if note.verdict == "bad"]
    assert [words in note.text for note in bad] == ([True] if words else []), bad


@pytest.mark.gpu
def test_on_a_card_the_first_tensor_closes_the_door() -> None:
    code = REFUSED.format(
        arguments="max_split_size_mb=128",
        error="oracle_offload.OffloadError",
        value="expandable_segments:True",
    )
    start = (
        "import oracle_offload\n"
        "oracle_offload.diagnose.configure_allocator(expandable_segments=True)\n"
        "import torch; torch.zeros(1, device='cuda')\n"
        "state = torch.cuda.memory._snapshot()['allocator_settings']\n"
        "assert state['expandable_segments'] is True, state\n"
    )
    assert "already in use" in run_python(start + code)
