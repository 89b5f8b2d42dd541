# Everything here makes its own virtual environment: only Python 3.11+, make and pip are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?= results
MINUTES ?= 15  # of the stress tests
TRIALS ?= inf  # of each suite of the stress tests
SEED ?= 0
export PYTHONDONTWRITEBYTECODE =  # the tests start many processes, each of which would compile the library anew

.PHONY: demo test test-slow test-gpu test-lowest coverage docs docs-quick lint bench stress clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'flowbnn needs Python 3.11 or newer, this is ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)  ## run two studies and write the report
	$(BIN)/flowbnn demo --out $(OUT)

lint: $(STAMP)  ## run the linter and the type checker
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy

test: $(STAMP)  ## run the linter, the type checker beside the tests, and the doctests
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n 2 --dist worksteal; tests=$$?; wait $$types && exit $$tests

test-slow: $(STAMP)  ## run the tests that make test leaves out: the same assertions on more cases
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

test-gpu: $(STAMP)  ## run the tests that need a CUDA device, in six processes, and record the result in docs/devices.md
	$(BIN)/python tests/gpu_suite.py

test-lowest:  ## run the tests with the lowest supported versions of the dependencies, in .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) tests/lowest_versions.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-lowest/constraints.txt \
		-e ".[studies,tensorboard,export,huggingface,lightning,graphs,playground]" "pandas==2.2.*" pytest pytest-timeout pytest-xdist
	.venv-lowest/bin/python -m pytest -n 2 --dist worksteal -m ""

coverage: $(STAMP)  ## run the tests, and write the lines that none of them reaches to htmlcov/index.html
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "" --cov=flowbnn --cov-report=term --cov-report=html

docs: $(STAMP)  ## build the site into build/docs, execute the gallery, and check links and public names
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs
	$(BIN)/python docs/_ext/check_site.py build/docs

docs-quick: export FLOWBNN_DOCS_SKIP_GALLERY = 1
docs-quick: docs  ## build the site without executing the gallery

bench: $(STAMP)  ## measure speed, memory, defaults and threads, and count the structure of the code
	$(BIN)/python benchmarks/training_step.py --out $(OUT)
	$(BIN)/python benchmarks/prediction.py --out $(OUT)
	$(BIN)/python benchmarks/adaptive.py --out $(OUT)
	$(BIN)/python benchmarks/training_step.py --each --rounds 20 --out $(OUT)
	$(BIN)/python benchmarks/memory.py --out $(OUT)
	$(BIN)/python benchmarks/scaling.py --out $(OUT)
	$(BIN)/python benchmarks/methods.py --rounds 20 --out $(OUT)
	$(BIN)/python benchmarks/calibrate.py
	$(BIN)/python benchmarks/laplace.py --batch 250 --rounds 7 --out $(OUT)
	$(BIN)/python benchmarks/defaults.py --sets digits breast_cancer wine --out $(OUT)
	$(BIN)/python benchmarks/threads.py
	$(BIN)/python benchmarks/structure.py --out $(OUT)

stress: $(STAMP)  ## run the stress tests for 15 minutes (MINUTES=, TRIALS=, SEED=); fails on any wrong answer
	$(BIN)/python -m tests.stress --minutes $(MINUTES) --trials $(TRIALS) --seed $(SEED)

clean:
	rm -rf $(VENV) .venv-lowest htmlcov .coverage docs/generated $(OUT) build dist *.egg-info src/*.egg-info
