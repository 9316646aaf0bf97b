# What a person needs: `make run`, `make test`. Everything else is in `make help`.

PYTHON ?= python3
# Installed before the rest and pinned, so that every checkout runs the same release. Index servers often carry it with several
# gigabytes of CUDA libraries, which nothing here needs yet; point pip at a CPU build, or name another release: make TORCH=...
TORCH ?= torch==2.13.0
ARGS ?=
EXPLORE_S ?= 3600

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq

.DEFAULT_GOAL := help
.PHONY: run test golden test-ranks test-gpu test-sglang test-sglang-0523 soak-sglang coverage coverage-sglang mutate planted check diagrams explore simulate bench bench-peer plots soak clean help

run: $(STAMP)  ## serve a trace, back up and restore it, verify every byte   (ARGS="--cp-size 4 ...")
	@$(BIN)/cphicache run $(ARGS)

simulate: $(STAMP)  ## run the worlds of seeds 1..1000 on the classes that serve, with faults, checked from outside   (minutes; ARGS)
	@$(BIN)/cphicache simulate --seeds 1..1000 --jobs 2 $(ARGS)

test: $(STAMP)  ## run the tests   (ARGS="-k ledger ...")
	@$(BIN)/python -m pytest -n 2 -m "not soak" $(ARGS)

golden: $(STAMP)  ## write the golden stories and logs of tests/golden and tests/engine anew; read the difference before you keep it
	@$(BIN)/python -m pytest tests/golden tests/engine/test_log.py --rewrite-golden $(ARGS)

coverage: $(STAMP)  ## run the tests, and fail below 95 % branch coverage   (minutes; ARGS as for test)
	@$(BIN)/python -m tests.measure_coverage $(ARGS)

coverage-sglang: .venv-sglang/.set-up .venv-sglang-0523/.set-up  ## measure the tests inside SGLang, both versions, for the next `make coverage`
	@.venv-sglang/bin/python -m tests.measure_coverage --sglang $(ARGS)
	@.venv-sglang-0523/bin/python -m tests.measure_coverage --sglang $(ARGS)

mutate: $(STAMP)  ## change one thing at a time in what decides, and see whether a test notices   (an hour; goes on where it was; ARGS="ledger")
	@$(BIN)/python -m tests.mutation $(ARGS)

planted: $(STAMP)  ## plant twenty bugs, see each caught, and put the table into docs/testing.md   (minutes)
	@$(BIN)/python -m tests.planted --docs docs/testing.md $(ARGS)

test-gpu: $(STAMP)  ## run the tests that need an NVIDIA GPU; they skip, and say so, without one   (docs/gpu.md)
	@$(BIN)/python -m pytest -m gpu -rs $(ARGS)

test-ranks: $(STAMP)  ## faults, delays and sizes over rank processes   (minutes; ARGS as for test)
	@$(BIN)/python -m pytest -n 2 -m soak tests/ranks $(ARGS)

test-sglang: .venv-sglang/.set-up  ## run the tests inside the real SGLang 0.5.20, on the CPU, and the rows against its caches   (minutes, 2 GB; ARGS as for test)
	@.venv-sglang/bin/python -m pytest -n 2 --dist loadfile -m "not soak" tests/sglang tests/bench/test_bench.py $(ARGS)

test-sglang-0523: .venv-sglang-0523/.set-up  ## the same inside SGLang 0.5.23   (minutes, 2 GB)
	@.venv-sglang-0523/bin/python -m pytest -n 2 --dist loadfile -m "not soak" tests/sglang $(ARGS)

soak-sglang: .venv-sglang/.set-up  ## 300 random requests in every combination, and the table against SGLang's own cache   (long; ARGS="--only soak")
	@.venv-sglang/bin/python -m pytest -m soak tests/sglang
	@.venv-sglang/bin/python tests/sglang/soak.py --docs docs/sglang.md $(ARGS)

check: $(STAMP)  ## format, lint, types, import rules, generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m cphicache.run.diagrams --check

diagrams: $(STAMP)  ## write fsm_diagrams/ and the generated parts of README and docs   (needs graphviz)
	@$(BIN)/python -m cphicache.run.diagrams

explore: $(STAMP)  ## try every order of events of all small worlds   (EXPLORE_S=3600: CPU seconds for each; ARGS="split --max-faults 1")
	@$(BIN)/cphicache explore --max-seconds $(EXPLORE_S) $(ARGS)

bench: $(STAMP)  ## measure ratios and put them into docs/performance.md   (minutes; ARGS="d2h --rounds 3")
	@$(BIN)/cphicache bench --docs docs/performance.md $(ARGS)

bench-peer: .venv-peer/.set-up  ## the same, with the rows against SGLang's own radix cache   (its wheel only, in .venv-peer)
	@.venv-peer/bin/python -m cphicache.run.cli bench --docs docs/performance.md $(ARGS)

plots: $(STAMP)  ## draw what bench and study have written to out/ into docs/plots/
	@$(BIN)/cphicache study overlap --out out/study-overlap.json
	@$(BIN)/cphicache plots $(ARGS)

soak: $(STAMP)  ## run the whole acceptance table   (long; ARGS as of tests/soak.py)
	@$(BIN)/python tests/soak.py $(ARGS)

clean:  ## remove .venv and everything else that can be made again
	@rm -rf $(VENV) .venv-peer .venv-sglang .venv-sglang-0523 .sglang build dist out ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find cphicache tests -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## say what there is to make
	@sed -n 's/^\([a-z0-9-]*\):.*  ## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name what; do printf '%-23s %s\n' "$$name" "$$what"; done

# -- set-up, once, and again when the dependencies change ------------------------------------------------------------------------
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || { echo "error: $(PYTHON) is not there or older than Python 3.11: name another with make PYTHON=python3.12" >&2; exit 2; }
	@echo "setting up $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv $(VENV) \
	    || { echo "error: $(PYTHON) cannot make a virtual environment: install its venv module (apt install python3-venv)" >&2; exit 2; }
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[dev]'
	@touch $@

# SGLang's wheel without what it depends on: the rows import its radix cache alone (cphicache/bench/peer.py).
.venv-peer/.set-up: pyproject.toml
	@echo "setting up .venv-peer (once, some minutes)"
	@$(PYTHON) -m venv .venv-peer
	@.venv-peer/bin/python -m pip --disable-pip-version-check install -qq $(TORCH)
	@.venv-peer/bin/python -m pip --disable-pip-version-check install -qq -e .
	@.venv-peer/bin/python -m pip --disable-pip-version-check install -qq --no-deps sglang==0.5.20
	@touch $@

.venv-sglang/.set-up: SGLANG := 0.5.20
.venv-sglang-0523/.set-up: SGLANG := 0.5.23
.venv-sglang/.set-up .venv-sglang-0523/.set-up: tests/sglang/setup.sh tests/sglang/requirements.txt tests/sglang/pins-0.5.20.txt \
    tests/sglang/pins-0.5.23.txt pyproject.toml
	@echo "setting up $(@D) (once, some minutes)"
	@PYTHON=$(PYTHON) TORCH=$(TORCH) tests/sglang/setup.sh $(@D) $(SGLANG)
	@touch $@
