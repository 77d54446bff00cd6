# On a machine with Python 3.11 and a C++ compiler, every target sets itself up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0
BUGS   ?= ../shared/bugs
CHECKOUTS ?= ../checkouts  # of public programs, `<owner>+<name>` each
JOBS   ?= 3  # tests at once, on two cores: many wait for processes of theirs; each of these gets one thread
# The environment is made again when what it is made from changes.
STAMP  := $(VENV)/.ready

.PHONY: gpu matrix docs check-docs setup demo test test-slow laws lint lines new-relation new-sink new-report new-integration new-sharding bench exam health mutants evaluation wild faults fuzz packs clean
setup: $(STAMP)

$(STAMP): pyproject.toml CMakeLists.txt native/CMakeLists.txt $(wildcard native/*.cpp native/*.h native/*/*.cpp native/*/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)" numpy
	$(BIN)/python -m pip install -q "scikit-build-core>=0.11" "pybind11>=3" ninja cmake
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo.py

test: setup
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: setup
	PROCTOR_SLOW=1 $(BIN)/python -m pytest -m slow

laws: setup
	PROCTOR_LAW_EXAMPLES=$(or $(EXAMPLES),25) $(BIN)/python -m pytest tests/property --hypothesis-profile=default

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Lines by room; REVISION=commit for those of another one. WITHOUT="oracle/fuzz oracle/prove" leaves rooms out.
lines: setup
	$(BIN)/python scripts/lines.py $(REVISION) $(if $(WITHOUT),--without $(WITHOUT))

# A part that runs, and its test: make new-relation NAME=monotone
new-relation new-sink new-report new-integration new-sharding: new-%: setup
	$(BIN)/python scripts/new_part.py $* $(or $(NAME),$(error say NAME=, the name of a Python module))

# The site into out/site; a page or an anchor that is not there is an error.
docs: setup
	$(BIN)/python -m pip install -q "mkdocs-material>=9.5,<10"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Environments of other versions of Python and torch, and the suite's fast half in each: docs/versions.md. ARGS=--write
matrix: setup
	$(BIN)/python benchmarks/matrix.py $(ARGS)

# Runs every command of README and docs that can run here; ARGS=docs/tutorial.md for one page, ARGS=--read to run nothing.
check-docs: setup
	$(BIN)/python docs/site/check_docs.py $(ARGS)

# On a machine with a CUDA device: its tests, then equality with the CPU, speed, and the cost of watching a GPT.
gpu: setup
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench: setup
	$(BIN)/python benchmarks/figures.py $(ARGS)

exam: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/exam.py $(BUGS)

health: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/health.py

mutants: setup
	$(BIN)/python -m benchmarks.mutants $(CHECKOUTS) --work out/mutants --sample $(or $(SAMPLE),80) --write

evaluation: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/evaluation.py --write

# WILD=folder of checkouts of public programs; ARGS="--half first --number 10 --write", ARGS=--suites and the like.
wild: setup
	$(BIN)/python -m benchmarks.wild $(or $(WILD),$(error say WILD=folder, where checkouts lie or are fetched to)) $(ARGS)

# Outside CI, an hour: ARGS="verifier-killed disk-full" for some of them. docs/reliability.md
faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults $(or $(ARGS),--write)

# MINUTES of each reader; ARGS=trace for one.
fuzz: setup
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m benchmarks.fuzz --minutes $(or $(MINUTES),10) $(ARGS)

packs: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/make_packs.py --checkouts $(CHECKOUTS)

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache
