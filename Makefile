# Everything a developer does. `make demo` and `make test` need git, make, a C compiler and Python
# >= 3.11; they create .venv with pinned dependencies, build in place and run.
#
#   PYTHON=/path/to/python   use that environment (with its torch) as it is, and no .venv
#   ARGS="-k name -x"        more arguments for pytest, the demo or the benchmarks

.DEFAULT_GOAL := help
.PHONY: help build demo test test-all test-bill ci-bill test-shuffled device-type lint format bench ctest asan-check asan-python tsan-check \
        windows-check analyze compile_commands.json \
        proof mutation mutation-near mutation-python mutation-python-all coverage fuzz conformance screenshots \
        cuda-environment cuda-build cuda-core cuda-check oldest-torch newest-torch \
        site aitoolkit-environment aitoolkit-check wheel wheels wheels-environment gpu-wheels gpu-rivals gpu-check gpu-rehearsal \
        gpu-import environment clean

ifdef PYTHON
# sys.executable, not the name: `python3` may be a shell shim, which sanitizers cannot live in.
PY := $(shell "$(PYTHON)" -c "import sys; print(sys.executable)")
ifeq ($(PY),)
$(error PYTHON=$(PYTHON) does not run)
endif
# The environment belongs to someone: say what it lacks, install nothing.
ready = check-$(1)
else
PY := .venv/bin/python
ready = .venv/installed-$(1)
endif

help:
	@echo "make demo          train a Flux transformer with 91% of it offloaded, next to the resident one"
	@echo "make test          build in place and run what a change breaks most often: minutes"
	@echo "make test-all      every behaviour once, as .ci/run has it"
	@echo "make test-bill     the same, and what each test costs into docs/development.md"
	@echo "make ci-bill       what each part of .ci/run took when it ran last, and the dearest tests"
	@echo "make test-shuffled test-all in another order, of files and of the tests in each: SEED=1"
	@echo "make device-type   the tests that take a device, on a device type that is not cpu"
	@echo "make cuda-check    PyTorch's CUDA build over the simulated driver, in .venv-cuda (6.5 GB)"
	@echo "make cuda-core     the part of it that a change breaks most often: minutes"
	@echo "make oldest-torch  layers and private names with the oldest torch, in .venv-oldest (4.5 GB)"
	@echo "make newest-torch  the same with the newest, in .venv-cuda (6.5 GB)"
	@echo "make lint          style, types, compiler warnings"
	@echo "make format        apply the formatters"
	@echo "make bench         measure (DEVICE=cuda on a GPU)"
	@echo "make ctest         the C programs of tests/c alone"
	@echo "make asan-check    the C programs under AddressSanitizer and UBSan, with leak check"
	@echo "make asan-python   the Python tests without torch, over a sanitized build; leak check of the binding"
	@echo "make tsan-check    the C programs under ThreadSanitizer"
	@echo "make windows-check cross-compile the C sources for Windows; run them where Wine is"
	@echo "make analyze       clang-tidy and cppcheck"
	@echo "make compile_commands.json  how each C source is compiled, for editors"
	@echo "make proof         every proof of order and of behaviour under faults, with figures"
	@echo "make mutation      the mutation gate of the engine alone"
	@echo "make mutation-near those of its mutants near the last change, and a sample"
	@echo "make mutation-python      that of the Python layer and the binding, a sample of 40"
	@echo "make mutation-python-all  every mutant of them, hours; goes on where it was stopped"
	@echo "make coverage      branches of the core that the C programs take"
	@echo "make fuzz          random plans and random lives of an engine, FUZZ_S=30 seconds each"
	@echo "make conformance   the simulator against recordings of real drivers"
	@echo "make site          the pages of docs/, and the API from docstrings, as HTML: out/site"
	@echo "make screenshots   the pictures of docs/images that a browser takes"
	@echo "make aitoolkit-check  the drop-in over AI-Toolkit's own code and pins, in .venv-aitoolkit (6 GB)"
	@echo "make wheel         dist/*.whl and dist/*.tar.gz, for this machine"
	@echo "make wheels        those of a release: an sdist, a wheel for Linux, one for Windows"
	@echo "make gpu-wheels    fetch the wheels that a GPU machine without network lacks"
	@echo "make gpu-rivals    collect the rivals that gpu-check measures"
	@echo "make gpu-check     GPU tests and measurements [WHEELS=dir] [RESULTS=dir] [COMMIT=id] [RESUME=file]"
	@echo "make gpu-rehearsal all of gpu-check on the simulator, and how it bears crashes and kills"
	@echo "make gpu-import    file its results: FILE=results.json"
	@echo "PYTHON=/path/to/python uses that environment instead of .venv"

# ---- the environment ----

.venv/bin/python:
	@python=$$(sh tools/find_python.sh) && echo "creating .venv with $$python" && "$$python" -m venv .venv

.venv/installed-torch: tools/requirements-torch.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.venv/installed-%: tools/requirements-%.txt .venv/installed-torch
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Other versions of libraries than those above: each is imported by a process of its own.
.venv/installed-beside: tools/requirements-beside.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .venv/beside -r $<
	@touch $@

.venv/installed-test: .venv/installed-beside

.PHONY: check-test check-site check-lint check-analysis
check-%:
	@"$(PY)" tools/check_environment.py $*

environment: $(call ready,test)

# PyTorch's CUDA build has an environment of its own: 6.5 GB. It may be another Python than PYTHON.
cuda_py := .venv-cuda/bin/python
.venv-cuda/bin/python:
	@python=$$(sh tools/find_python.sh $(CUDA_PYTHON)) && echo "creating .venv-cuda with $$python" \
		&& "$$python" -m venv .venv-cuda

# torch brings an nvrtc of its own: two pins would not agree.
.venv-cuda/installed: tools/requirements-cuda.txt tools/requirements-test.txt \
		tools/requirements-beside.txt | .venv-cuda/bin/python
	sed -e '/^-r/d' -e '/^nvidia-cuda-nvrtc/d' tools/requirements-test.txt > .venv-cuda/tests.txt
	$(cuda_py) tools/install.py --gb 6.5 -r $< -r .venv-cuda/tests.txt
	$(cuda_py) tools/install.py --gb 0 --no-deps --upgrade --target .venv-cuda/beside \
		-r tools/requirements-beside.txt
	@touch $@

cuda-environment: .venv-cuda/installed

# zig, what makes the wheels of a release, and what looks at them, have an environment, too.
.venv-wheels/installed: tools/requirements-wheels.txt
	@python=$$(sh tools/find_python.sh) && echo "creating .venv-wheels with $$python" \
		&& "$$python" -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

wheels-environment: .venv-wheels/installed

# The oldest torch that is supported: with NVIDIA's libraries 4.5 GB.
.venv-oldest/installed: tools/requirements-oldest.txt
	@python=$$(sh tools/find_python.sh) && echo "creating .venv-oldest with $$python" \
		&& "$$python" -m venv .venv-oldest
	.venv-oldest/bin/python tools/install.py --gb 4.5 -r $<
	@touch $@

# What AI-Toolkit pins: with NVIDIA's libraries 6 GB. pip is not to bring what the list leaves out.
aitoolkit_py := .venv-aitoolkit/bin/python
.venv-aitoolkit/installed: tools/requirements-aitoolkit.txt
	@python=$$(sh tools/find_python.sh) && echo "creating .venv-aitoolkit with $$python" \
		&& "$$python" -m venv .venv-aitoolkit
	$(aitoolkit_py) tools/install.py --gb 6 --no-deps -r $<
	@touch $@

# Its source at the commit that is known, from its own repository or from MIRROR, a clone of it.
MIRROR ?=
.venv-aitoolkit/source/run.py: tools/rivals.py | .venv-aitoolkit/installed
	$(aitoolkit_py) tools/rivals.py --checkout ai-toolkit --into $(@D) \
		$(if $(MIRROR),--mirror "ai-toolkit=$(MIRROR)")
	@touch $@

cuda-build: .venv-cuda/installed
	$(cuda_py) setup.py --quiet build_ext --inplace
	$(cuda_py) tests/cuda/build_driver.py .venv-cuda

build: $(call ready,test)
	"$(PY)" setup.py --quiet build_ext --inplace

# ---- what people run ----

demo: build
	"$(PY)" -m oracle_offload demo $(ARGS)

# A file's tests stay in one process, which has its own simulated driver.
side_by_side = -n auto --maxprocesses 4 --dist loadfile
# Three tiers, by two markers: tools/tiers.py.
test: build
	"$(PY)" -m pytest $(side_by_side) -m "not gpu and not slow and not ci" $(ARGS)

# Of a test that takes a device one case: device-type has them all.
all := not gpu and not slow and not (ci and elsewhere) and not again
test-all: build
	"$(PY)" -m pytest $(side_by_side) -m "$(all)" $(ARGS)

# The files in another order, and the tests of each: the seed names it.
SEED ?= 1
test-shuffled: build
	"$(PY)" -m pytest $(side_by_side) --random-order-bucket=module --random-order-seed=$(SEED) \
		-m "$(all)" $(ARGS)

test-bill: build
	"$(PY)" -m pytest $(side_by_side) -m "$(all)" -p bill --bill out/bill.json $(ARGS)
	"$(PY)" -m pytest $(side_by_side) tests/training tests/clients --device simgpu \
		-p bill --bill out/bill-simgpu.json $(ARGS)
	"$(PY)" tools/bill.py out/bill.json out/bill-simgpu.json --write

# What a run of .ci/run took. With ARGS=--write into docs/development.md and tests/dear.txt.
ci-bill: $(call ready,test)
	"$(PY)" tools/bill.py --parts out/ci.txt out/bill.json out/bill-simgpu.json $(ARGS)

# The tests that take a device, on one whose type is not "cpu". In processes of their own.
device-type: build
	"$(PY)" -m pytest $(side_by_side) tests/training tests/clients --device simgpu $(ARGS)

# Everything about torch.cuda that can be run without a GPU: docs/simulator.md says what that proves.
cuda-check: cuda-build
	$(cuda_py) tools/cuda_check.py $(ARGS)

cuda-core: cuda-build
	$(cuda_py) tools/cuda_check.py core $(ARGS)

# Every kind of layer, and each private name that is read. What needs other libraries is not there.
core := matrix convolutions embedding contract handle autocast exceptions
beside_torch = tools/private_names.py --check && $(1) -m pytest $(side_by_side) \
	$(core:%=tests/training/test_%.py) -m "not gpu and not slow and not ci" $(ARGS)
oldest-torch: .venv-oldest/installed build
	.venv-oldest/bin/python $(call beside_torch,.venv-oldest/bin/python)

# The newest is that of cuda-check, here on "cpu" alone.
newest-torch: export CUDA_SIM := 0
newest-torch: cuda-build
	$(cuda_py) $(call beside_torch,$(cuda_py))

DEVICE ?= cpu
bench: build
	"$(PY)" benchmarks/run.py --device $(DEVICE) $(ARGS)

ctest: $(call ready,test)
	"$(PY)" tools/c_programs.py run $(ARGS)

# Sweeps of faults would take most of the time: of these a part here, and all in `make proof`.
asan-check: export ORACLE_OFFLOAD_TEST_FAULT_STRIDE ?= 3
asan-check: $(call ready,test)
	"$(PY)" tools/c_programs.py run --sanitize address,undefined $(ARGS)

asan-python: $(call ready,test)
	"$(PY)" tools/sanitized_python.py $(ARGS)

# Races hardly depend on which call fails.
tsan-check: export ORACLE_OFFLOAD_TEST_FAULT_STRIDE ?= 7
tsan-check: $(call ready,test)
	"$(PY)" tools/c_programs.py run --sanitize thread $(ARGS)

windows-check: $(call ready,test) .venv-wheels/installed
	"$(PY)" tools/c_programs.py run --windows $(ARGS)

lint: $(call ready,lint) build
	"$(PY)" tools/lint.py

format: $(call ready,lint)
	"$(PY)" tools/lint.py --fix

analyze: $(call ready,analysis)
	"$(PY)" tools/analyze.py

compile_commands.json: $(call ready,test)
	"$(PY)" tools/c_build.py

# The parts are listed by `python tools/proof.py --list`; each can be run alone.
proof: build cuda-build wheels-environment oldest-torch newest-torch aitoolkit-environment
	"$(PY)" tools/proof.py $(ARGS)

mutation: $(call ready,test)
	"$(PY)" tools/mutate.py $(ARGS)

mutation-near: $(call ready,test)
	"$(PY)" tools/mutate.py --near $(ARGS)

# The seed is fixed: a sample that changes with every commit would fail where nothing was done.
mutation-python: build
	"$(PY)" tools/mutate_python.py --seed gate --near $(ARGS)

mutation-python-all: build
	"$(PY)" tools/mutate_python.py --all --resume $(ARGS)

coverage: $(call ready,test)
	"$(PY)" tools/c_coverage.py $(ARGS)

# FUZZ_S: seconds for each target
FUZZ_S ?= 30
fuzz: $(call ready,test)
	"$(PY)" tools/fuzz.py --seconds $(FUZZ_S) $(ARGS)

conformance: $(call ready,test)
	"$(PY)" tools/conformance.py $(ARGS)

# TOOLKIT=path: another checkout than that of the known commit.
TOOLKIT ?= .venv-aitoolkit/source
aitoolkit-environment: .venv-aitoolkit/installed $(filter .venv-aitoolkit/source/run.py,$(TOOLKIT)/run.py)
	$(aitoolkit_py) setup.py --quiet build_ext --inplace
	$(aitoolkit_py) tests/cuda/build_driver.py .venv-aitoolkit

# On the simulated driver under CPU tensors; over PyTorch's CUDA build it is a part of cuda-check.
aitoolkit-check: aitoolkit-environment
	CUDA_SIM=0 TOOLKIT="$(TOOLKIT)" $(aitoolkit_py) -m pytest tests/toolkit $(ARGS)

# Whatever a page or a docstring names must be there. -E: what tools print has no date to go by.
site: $(call ready,site) build
	rm -rf out/site
	"$(PY)" -m sphinx -q -W -n -E --keep-going -b html -d out/site-read docs out/site $(ARGS)
	@echo "out/site/index.html"

screenshots: $(call ready,screenshots) build
	"$(PY)" tools/screenshots.py docs/images

wheel: $(call ready,test)
	"$(PY)" -m build --outdir dist

wheels: .venv-wheels/installed
	.venv-wheels/bin/python tools/wheels.py $(ARGS)

# ---- machines with a GPU ----

WHEELS ?= .whl
RESULTS ?= out/gpu-check
COMMIT ?=
# results.json of a run that was cut short: what is missing there runs
RESUME ?=
# The machine's own Python and torch: never .venv, which may hold a torch without CUDA.
GPU_PY = $(if $(PYTHON),$(PY),python3)

gpu-wheels: $(call ready,test)
	"$(PY)" tools/gpu_wheels.py --output "$(WHEELS)"

# What others' managers are measured from: into .rivals, ignored; it travels with the source tree.
gpu-rivals: $(call ready,test)
	"$(PY)" tools/rivals.py $(ARGS)

gpu-check:
	"$(GPU_PY)" tools/gpu_check.py --wheels "$(WHEELS)" --results "$(RESULTS)" --commit "$(COMMIT)" \
		--resume "$(RESUME)" $(ARGS)

gpu-rehearsal: build
	"$(PY)" -m pytest -q -m "slow and not proof" tests/unit/test_gpu_tools.py

gpu-import:
	@test -n "$(FILE)" || { echo "name the results: make gpu-import FILE=out/gpu-check/results.json"; exit 2; }
	"$(GPU_PY)" tools/gpu_import.py "$(FILE)"

clean:
	rm -rf build dist out oracle_offload.egg-info oracle_offload/*.so oracle_offload/_build_info.json
