# The same commands serve people, pre-commit and CI. Each is safe to run twice.
CODE = src tests scripts benchmarks training

.PHONY: help setup setup-dev demo demo-smollm2 test test-fast test-gpu fmt lint types arch docs docs-check bench clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## environment, torch, requirements, the C++ extension
	@bash scripts/setup.sh

setup-dev:  ## the same with the tools for tests
	@bash scripts/setup.sh --dev

demo:  ## set up, run the built-in mixture, show what an expert cache would hit
	@bash scripts/demo.sh

demo-smollm2:  ## set up, fetch SmolLM2 (93 MB), answer a question
	@bash scripts/demo.sh smollm2

test:  ## everything CI checks; pytest last
	@bash scripts/check.sh

test-fast: setup-dev  ## unit and property tests only
	@PYTHONPATH=src "$$(bash scripts/find_python.sh)" -m pytest tests/unit tests/property -q

test-gpu: setup-dev  ## tests that need a CUDA device
	@PYTHONPATH=src "$$(bash scripts/find_python.sh)" -m pytest -m gpu

fmt: setup-dev  ## format
	@bin="$$(dirname "$$(bash scripts/find_python.sh)")"; "$$bin/ruff" format $(CODE) && "$$bin/ruff" check --fix $(CODE)

lint: setup-dev  ## ruff
	@bin="$$(dirname "$$(bash scripts/find_python.sh)")"; "$$bin/ruff" check $(CODE) && "$$bin/ruff" format --check $(CODE)

types: setup-dev  ## pyright, strict
	@bash scripts/types.sh

arch: setup-dev  ## import contracts
	@PYTHONPATH=src "$$(dirname "$$(bash scripts/find_python.sh)")/lint-imports" importlinter.toml

docs: setup-dev  ## write the generated reference pages
	@PYTHONPATH=src "$$(bash scripts/find_python.sh)" scripts/gen_docs.py

docs-check: setup-dev  ## fail when they are stale
	@PYTHONPATH=src "$$(bash scripts/find_python.sh)" scripts/gen_docs.py --check

bench:  ## measure the bars beside llama.cpp, renew the README's table
	@bash scripts/bench.sh

clean:  ## remove what was built here (not .venv)
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find src -name '*.so' -delete
