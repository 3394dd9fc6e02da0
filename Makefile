# Thin: every target creates .venv if it is missing. A torch that python3 already has is used.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUTPUTS ?= outputs/demo

.PHONY: demo test lint format clean

demo: $(VENV)/installed
	$(BIN)/python -m recipes.grpo -m sweep=demo outputs=$(OUTPUTS)
	$(BIN)/python -m recipes.compare $(OUTPUTS)/tiny-llama

test: $(VENV)/installed
	$(BIN)/python -m pytest -q -n auto

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/installed: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/install
	touch $@
