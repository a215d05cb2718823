"""Reading cards through the real nvidia-ml-py, over a stand-in for the driver's library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import c_build
import pytest

from oracle_offload.host.gpus import CLOCK_REASONS, Gpu, GpuProcess, GpuView, read_gpus

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "tests" / "data" / "systems" / "nvml_stand_in.c"

READ = (
    "from oracle_offload.host.gpus import Gpu, GpuProcess, GpuView, read_gpus\n"
    "print(repr(read_gpus()))"
)


def said_over(library: Path, code: str, *arguments: str, **environ: str) -> str:
    """Run a process that finds `library` where the driver's would be; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_over(library: Path, **environ: str) -> GpuView:
    """Call `read_gpus` over a library."""
    names = {"Gpu": Gpu, "GpuProcess": GpuProcess, "GpuView": GpuView}
    said = said_over(library, READ, **environ)  # the repr of our own dataclasses
    view = eval(said, {"__builtins__": {}}, names)
    assert isinstance(view, GpuView)
    return view


def compile_stand_in(folder: Path, *flags: str) -> Path:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    target = folder / "libnvidia-ml.so.1"
    command = [*c_build.c_compiler(), "-shared", "-fPIC", "-Wall", "-Werror", *flags, str(SOURCE)]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=60)
    return folder


def test_a_card_that_answers_is_read_whole(tmp_path: Path) -> None:
    view = read_over(compile_stand_in(tmp_path))
    assert (view.driver_version, view.cuda_version, view.why) == ("580.65.06", (12, 8), "")
    assert view.gpus[0] == Gpu(
        index=0,
        name="Stand-in 4090",
        bus_id="00000000:01:00.0",
        total_bytes=24 << 30,
        used_bytes=5 << 30,
        link_generation=3,
        link_width=8,
        max_link_generation=4,
        card_link_generation=5,
        max_link_width=16,
        performance_state=2,
        clock_reasons=0x44,
        # In order, each once; None where the driver does not say.
        processes=(
            GpuProcess(77, None),
            GpuProcess(900, 256 << 20),
            GpuProcess(4242, 4 << 30),
        ),
    )


def test_a_card_that_refuses_keeps_its_name_and_the_reasons(tmp_path: Path) -> None:
    card = read_over(compile_stand_in(tmp_path)).gpus[1]
    assert card.name == "Stand-in slice"
    assert (card.total_bytes, card.link_width, card.clock_reasons) == (None, None, None)
    assert card.processes is None, "not listed is not the same as none"
    expected = {"memory", "bus", "link", "performance state", "clock reasons", "processes"}
    assert card.missing == dict.fromkeys(expected, "Not Supported")


def test_a_driver_that_knows_old_names_only_is_asked_by_them(tmp_path: Path) -> None:
    card = read_over(compile_stand_in(tmp_path, "-DOO_OLD_NAMES")).gpus[0]
    assert card.clock_reasons == 0x44 and card.link_width == 8


@pytest.mark.parametrize(
    ("flag", "field", "missing", "said"),
    [
        ("OO_TOTAL=0", "total_bytes", "memory", "0"),
        ("OO_TOTAL=~0ULL", "total_bytes", "memory", str(2**64 - 1)),
        ("OO_TOTAL=(1ULL<<62)", "total_bytes", "memory", str(2**62)),
        ("OO_USED=~0ULL", "used_bytes", "memory", str(2**64 - 1)),
        ("OO_USED=25769803777", "used_bytes", "memory", "25769803777"),
        ("OO_WIDTH=0", "link_width", "link", "0"),
        ("OO_WIDTH=255", "link_width", "link", "255"),
        ("OO_STATE=32", "performance_state", "performance state", "32"),  # NVML_PSTATE_UNKNOWN
    ],
)
def test_a_number_that_cannot_be_is_not_shown_as_an_answer(
    tmp_path: Path, flag: str, field: str, missing: str, said: str
) -> None:
    card = read_over(compile_stand_in(tmp_path, f"-D{flag}")).gpus[0]
    assert getattr(card, field) is None
    assert card.missing == {missing: f"the driver says {said}, which cannot be"}


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("OO_TOTAL=(1ULL<<62)-1", "total_bytes", (1 << 62) - 1),
        ("OO_USED=0", "used_bytes", 0),
        ("OO_USED=OO_TOTAL", "used_bytes", 24 << 30),
        ("OO_WIDTH=1", "link_width", 1),
        ("OO_WIDTH=63", "link_width", 63),
        ("OO_GENERATION=1", "link_generation", 1),
        ("OO_GENERATION=15", "link_generation", 15),
        ("OO_GENERATION=16", "link_generation", None),
        ("OO_GENERATION=0", "link_generation", None),
        ("OO_STATE=0", "performance_state", 0),
        ("OO_STATE=15", "performance_state", 15),
        ("OO_STATE=16", "performance_state", None),
    ],
)
def test_numbers_at_the_ends_of_what_can_be(
    tmp_path: Path, flag: str, field: str, value: int | None
) -> None:
    card = read_over(compile_stand_in(tmp_path, f"-D{flag}")).gpus[0]
    assert getattr(card, field) == value


@pytest.mark.parametrize(
    ("number", "version", "why"),
    [
        (1000, (1, 0), ""),
        (11040, (11, 4), ""),
        (99_999, (99, 99), ""),
        (999, None, "CUDA version: the driver says 999, which cannot be"),
        (100_000, None, "CUDA version: the driver says 100000, which cannot be"),
    ],
)
def test_the_cuda_version_of_the_driver(
    tmp_path: Path, number: int, version: tuple[int, int] | None, why: str
) -> None:
    view = read_over(compile_stand_in(tmp_path, f"-DOO_CUDA={number}"))
    assert (view.cuda_version, view.why, len(view.gpus)) == (version, why, 2)


def test_a_number_of_cards_that_cannot_be_leaves_the_version(tmp_path: Path) -> None:
    view = read_over(compile_stand_in(tmp_path, "-DOO_COUNT=1025"))
    assert (view.gpus, view.driver_version) == ((), "580.65.06")
    assert view.why == "count: the driver says 1025, which cannot be"


def test_a_card_of_which_there_is_no_handle_says_so(tmp_path: Path) -> None:
    card = read_over(compile_stand_in(tmp_path, "-DOO_NO_CARD")).gpus[1]
    assert card == Gpu(1, missing={"handle": "Not Supported"})


def test_processes_that_only_compute_are_listed_with_what_they_hold(tmp_path: Path) -> None:
    folder = compile_stand_in(tmp_path, "-DOO_NO_GRAPHICS", "-DOO_HELD=(1ULL<<62)-1")
    held = (GpuProcess(77, (1 << 62) - 1), GpuProcess(4242, 4 << 30))
    assert read_over(folder).gpus[0].processes == held


def test_an_nvidia_ml_py_that_is_absent_or_broken_is_told_apart(tmp_path: Path) -> None:
    module = tmp_path / "pynvml.py"
    for text, why in (
        ("raise ImportError", "nvidia-ml-py is not installed (pip install nvidia-ml-py)"),
        ("raise OSError('cut short')", "nvidia-ml-py could not be imported: cut short"),
        ("def nvmlInit(): raise OSError('no')", "the NVIDIA driver does not answer: no"),
    ):
        module.write_text(text, encoding="utf-8")
        assert read_over(tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}") == GpuView(why=why)


def test_a_driver_that_answers_nothing_is_let_go_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def let_go() -> None:
        calls.append("shutdown")
        raise OSError("gone already")

    def refuse() -> None:
        raise KeyError

    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=let_go,
        nvmlSystemGetDriverVersion=lambda: b"470.57.02",  # of an old nvidia-ml-py
        nvmlSystemGetCudaDriverVersion_v2=refuse,
        nvmlDeviceGetCount=lambda: 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    expected = GpuView(driver_version="470.57.02", why="CUDA version: KeyError")
    assert read_gpus() == expected and calls == ["init", "shutdown"]


@pytest.mark.parametrize(("number", "model"), [(0, "WDDM"), (1, "TCC"), (2, "MCDM"), (3, None)])
def test_the_driver_model_of_windows_has_a_name(
    monkeypatch: pytest.MonkeyPatch, number: int, model: str | None
) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: f"card {index}",
        nvmlDeviceGetCurrentDriverModel={"card 0": number}.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (card,) = read_gpus().gpus
    assert (card.driver_model, card.name) == (model, "unknown GPU")
    assert {"memory", "name", "link", "clock reasons"} <= card.missing.keys()
    assert "Throttle" not in card.missing["clock reasons"], "the newer name is the one missed"


def test_a_driver_that_is_not_loaded_is_quoted(tmp_path: Path) -> None:
    view = read_over(compile_stand_in(tmp_path), OO_NVML_INIT="9")
    assert view == GpuView(why="the NVIDIA driver does not answer: Driver Not Loaded")


def test_no_driver_library_is_quoted() -> None:
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    if read_gpus().gpus:
        pytest.skip("there is a driver here")
    assert read_gpus().why == "the NVIDIA driver does not answer: NVML Shared Library Not Found"


def test_clock_reasons_are_those_of_nvidia_ml_py() -> None:
    nvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    theirs = {
        "idle": nvml.nvmlClocksEventReasonGpuIdle,
        "application clocks set": nvml.nvmlClocksEventReasonApplicationsClocksSetting,
        "power limit": nvml.nvmlClocksEventReasonSwPowerCap,
        "hardware slowdown": nvml.nvmlClocksEventReasonHwSlowdown,
        "sync boost": nvml.nvmlClocksEventReasonSyncBoost,
        "software thermal slowdown": nvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware thermal slowdown": nvml.nvmlClocksEventReasonHwThermalSlowdown,
        "power brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "display clocks": nvml.nvmlClocksEventReasonDisplayClockSetting,
    }
    assert {words: bit for bit, words in CLOCK_REASONS.items()} == theirs


@pytest.mark.gpu
def test_a_real_card_is_the_one_torch_sees() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    view = read_gpus()
    properties = torch.cuda.get_device_properties(0)
    assert properties.name in [card.name for card in view.gpus]
    card = view.gpus[0]
    assert view.driver_version and view.cuda_version
    # torch counts what is left of the memory after the driver's own part.
    assert 0.9 * card.total_bytes <= properties.total_memory <= card.total_bytes
    if card.link_width is None or card.performance_state is None:
        pytest.skip(f"this machine hides them: {card.missing}")
    assert card.link_width in (1, 2, 4, 8, 16)
