# Thin: every target creates .venv if it is missing, the demo with what it needs alone. A torch that
# python3 already has is used.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUTPUTS ?= outputs/demo
BENCH ?= outputs/bench
ROOT ?= /tmp/fp8-nemo-container
# Python keeps what it has compiled, also where images tell it not to: the tests start it often.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slurm test-container test-long test-browser bench notebooks lint format clean

demo: $(VENV)/demo
	$(BIN)/python -m recipes.grpo -m sweep=demo outputs=$(OUTPUTS)
	$(BIN)/python -m recipes.compare $(OUTPUTS)/tiny-llama

test: $(VENV)/installed
	$(BIN)/python -m pytest -q -n $$(( $$(nproc) + 1 )) --dist worksteal

# Installs Slurm (Debian's packages, as root), starts one on this machine and stops it.
test-slurm: $(VENV)/installed
	sh .ci/install-slurm
	$(BIN)/python -m pytest -q tests/slurm --slurm

# NeMo RL's container layout without a GPU: builds it (as root; 18 GB, 41 minutes once) of the clone in
# NEMO_RL_ROOT, and runs jobs of two nodes in it until they ask for a GPU. ROOT stays: remove it.
test-container: $(VENV)/installed
	sh .ci/install-slurm
	command -v mmdebstrap >/dev/null || apt-get install -y -qq mmdebstrap
	bash slurm/container/build.sh $(ROOT) $(NEMO_RL_ROOT)
	NEMO_RL_ROOT=$(NEMO_RL_ROOT) $(BIN)/python -m pytest -q tests/slurm/test_container.py --slurm --container $(ROOT)

# The tests that take minutes each, on a real Slurm and elsewhere.
test-long: $(VENV)/installed
	sh .ci/install-slurm
	$(BIN)/python -m pytest -q --slurm --long -m long

# Installs Chromium (Debian's, as root) and looks at the HTML report in it.
test-browser: $(VENV)/installed
	sh .ci/install-chromium
	$(BIN)/python -m pytest -q tests/report/test_html.py

# On a GPU, where NeMo RL's packages are (docs/nemo.md); Llama 3.1 8B's shape, random weights.
bench: $(VENV)/installed
	mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks.speed.quantize --out $(BENCH)/quantize.json
	$(BIN)/python -m benchmarks.speed.refit --out $(BENCH)/refit.json
	$(BIN)/python -m benchmarks.speed.train --out $(BENCH)/train-8b.json
	$(BIN)/python -m benchmarks.speed.rollout --out $(BENCH)/rollout-8b.json

# Executes every notebook where it lies, so that what it stores is what the code says now.
notebooks: $(VENV)/installed
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False notebooks/*.ipynb
	$(BIN)/python -m benchmarks.small_figures notebooks/*.ipynb

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/shellcheck --severity=warning --shell=bash slurm/*.sbatch slurm/*.sh slurm/container/*.sh benchmarks/glue/*.sh

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/installed: $(VENV)/demo
	$(BIN)/pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[local,slurm,report,dev]'
	touch $@

$(VENV)/demo: pyproject.toml constraints.txt
	PYTHON=$(PYTHON) VENV=$(VENV) sh .ci/install
	touch $@
