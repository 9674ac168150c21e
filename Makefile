# `make demo` and `make test` work from nothing: they make .venv and install the pinned set first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
TORCH := $(shell grep '^torch==' constraints.txt)
TRL := $(shell grep '^trl==' constraints.txt)
export HF_HUB_OFFLINE := 1
# macOS ends a forked process that calls its frameworks, unless this is set: tests fork (tests/forked.py).
export OBJC_DISABLE_INITIALIZE_FORK_SAFETY := YES
MKDOCS := .venv-site/bin/mkdocs
CYCLONEDX := .venv-sbom/bin/cyclonedx-py
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

.PHONY: setup lock audit sbom site page page-pictures demo up test test-fast test-others families recipes wheel test-wheel setup-trl test-trl setup-verifiers test-verifiers bench-trl fuzz soak model mutants celery-defaults chaos lint types style imports bench setup-vllm demo-vllm test-vllm test-gpu

setup: $(COMPILED)

# Modules of packages that compileall leaves out: tests, and what is large and nothing of ours imports, or a few modules
# of it. Python compiles one of these when it is imported first.
UNCOMPILED := /(tests?|fontTools|moto|networkx|nltk|peft|pip|pygments|setuptools|tensorboard)/|/openai/types/|/torch/(_inductor|testing)/|/transformers/models/(?!auto/)

# Each package by its pin and its hash, but torch: its wheels, and so their hashes, differ by build. One pip takes what
# tests need and another one all else, because each uses one core; the two lists have no package in common. A package
# that comes as source is built apart (PEP 517): the other pip may just be replacing setuptools.
INSTALL := $(BIN)/python -m pip install -q --no-compile --use-pep517

$(STAMP): pyproject.toml constraints.txt requirements/core.txt requirements/dev.txt
	$(PYTHON) -c 'import sys; sys.exit("Onbeat needs Python 3.11 or newer: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --no-deps --require-hashes --log $(VENV)/pip-dev.log -r requirements/dev.txt & \
		$(INSTALL) --no-deps --require-hashes --log $(VENV)/pip-core.log -r requirements/core.txt \
		&& $(INSTALL) --no-warn-conflicts -c constraints.txt $(TORCH); \
		status=$$?; wait $$! && exit $$status
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $(STAMP)

# pip would compile twenty thousand modules one after the other, compileall does it on all cores, and `make lint` beside
# the types; some, as templates, are no Python.
$(COMPILED): $(STAMP)
	$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib || true
	touch $(COMPILED)

# Tools with environments of their own.
$(MKDOCS):
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install -q --no-compile mkdocs==1.6.1 mkdocs-material==9.8.2

$(CYCLONEDX):
	$(PYTHON) -m venv .venv-sbom
	.venv-sbom/bin/python -m pip install -q --no-compile cyclonedx-bom==7.5.0

# After a change of constraints.txt or pyproject.toml's packages; needs `uv`.
lock:
	sh deploy/lock.sh

# The bill of materials of what the images install, with its hashes, as CycloneDX: build/sbom.json.
sbom: $(CYCLONEDX)
	mkdir -p build
	cat requirements/core.txt requirements/lora.txt requirements/reasoning-gym.txt > build/requirements.txt
	$(CYCLONEDX) requirements build/requirements.txt -o build/sbom.json

# Whether a publisher has withdrawn a version that is pinned: pip said so as it installed it.
audit: $(STAMP)
	test -f $(VENV)/pip-core.log || (echo "make audit: $(VENV) has no log of pip: remove it, and run make setup" && false)
	! grep -A 1 'is a yanked version' $(VENV)/pip-*.log

# README and docs/ as a site that needs no network, in build/site; a link that leads nowhere, or what a
# page would fetch from elsewhere, fails it.
site: $(STAMP) $(MKDOCS)
	rm -rf build/pages
	$(BIN)/python -m docs.make_site build/pages
	NO_MKDOCS_2_WARNING=1 $(MKDOCS) build --quiet --strict
	! grep -rlE '<(script|img|link|iframe)[^>]* (src|href)="https?://' build/site --include='*.html'

# The page of the gateway, from page/ into gateway/page/static/; needs Node 20 or newer. The types of what the gateway
# answers come from contracts/.
page: $(STAMP)
	$(BIN)/python -m page.make_types
	cd page && npm ci --silent && npm run build --silent

# The pictures of docs/page.md, from a stack of its own; needs chromium.
page-pictures: $(STAMP)
	$(BIN)/python -m page.pictures

demo: $(COMPILED)
	$(BIN)/onbeat demo

up: $(COMPILED)
	$(BIN)/onbeat up

# The rules of the house, the documents, the page's files and the golden bytes: a wrong word shows in seconds.
FAST := tests/unit/test_house.py tests/unit/docs tests/unit/gateway/page tests/page/test_logic.py tests/contract/test_golden_bytes.py

test-fast: $(COMPILED)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --forks 2 $(FAST)

# The fast tests run while the others are collected, which takes one core.
test: $(COMPILED)
	$(MAKE) -j 2 test-fast test-others

# Six modules at a time, also on two cores: half of what they do is to wait. The processes are forked from the one that
# has collected the tests (tests/forked_workers.py); each has a Redis of its own.
test-others: $(COMPILED)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --forks 6 $(addprefix --ignore=,$(FAST))

# Every family of models, tried: some minutes. docs/models.md is made of the results, and the exit status is 1 where one
# is red. `python -m tests.family_runs FAMILY …` tries some.
families: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.family_runs; status=$$?; \
		$(BIN)/python -m docs.make_models > docs/models.md && exit $$status

# A tiny twin of the model of each recipe in configs/recipes/, by the recipe's own keys: a stack and an iteration each.
# It writes tests/recipe_results.json, whose table docs/recipes.md has: `.venv/bin/python -m tests.recipe_runs --table`.
recipes: $(STAMP)
	$(BIN)/python -m tests.recipe_runs

# The wheel and the source distribution, in dist/.
wheel: $(STAMP)
	PYTHON=$(BIN)/python sh deploy/build-wheel.sh

# The wheel, installed by pip into an empty environment, and what a reader does first with it, in an empty folder: some
# minutes, of which most are pip's. `make test` runs the demo from the unpacked wheel.
test-wheel: $(STAMP)
	OMP_NUM_THREADS=1 TEST_WHEEL=1 $(BIN)/python -m pytest tests/e2e/test_wheel.py

# TRL, in an environment of its own that sees the packages of the first: it is no dependency.
setup-trl: $(STAMP)
	test -x .venv-trl/bin/python || $(BIN)/python -m venv .venv-trl
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-trl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/onbeat.pth"
	.venv-trl/bin/python -m pip install -q -c constraints.txt '$(TRL)' bitsandbytes

# The losses against TRL's, whether it is given our jobs as they are, and rows of the packages that it brings.
test-trl: setup-trl
	OMP_NUM_THREADS=1 PYTHONPATH=. .venv-trl/bin/python -m pytest tests/contract/test_trl.py \
		tests/contract/test_trl_options.py tests/contract/test_trl_trajectories.py tests/contract/test_trl_job.py \
		tests/contract/test_trl_given.py tests/contract/test_trl_run.py tests/rooms/runs/test_inputs.py

# verifiers, whose pins (openai, mcp) are others than ours, in an environment of its own before the packages of the first.
setup-verifiers: $(STAMP) constraints-verifiers.txt
	test -x .venv-verifiers/bin/python || $(BIN)/python -m venv .venv-verifiers
	$(BIN)/python -c 'import os, sysconfig; print(os.getcwd(), sysconfig.get_path("purelib"), sep="\n")' \
		> "$$(.venv-verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/onbeat.pth"
	.venv-verifiers/bin/python -m pip install -q --no-deps -r constraints-verifiers.txt

# A whole environment of verifiers, played in a job, and its client for training at the door.
test-verifiers: setup-verifiers
	OMP_NUM_THREADS=1 PYTHONPATH=. .venv-verifiers/bin/python -m pytest tests/rooms/environments/test_verifiers.py \
		tests/rooms/environments/test_token_clients.py

# The same jobs by Onbeat and by TRL, in turns: a quarter of an hour of a machine that does nothing else.
bench-trl: setup-trl
	$(BIN)/python -m benchmarks trl

# Requests against a real gateway by schemathesis, which has an environment of its own, texts whose cost is not their length, and damaged bytes against every
# decoder: about ten minutes.
fuzz: $(STAMP)
	test -x .venv-fuzz/bin/python || $(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install -q 'schemathesis==4.32.5'
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz .venv-fuzz/bin/schemathesis

# The walks through the model on a real server (docs/fence.md), 2,000 new ones instead of the fixed 120 of `make test`.
soak: $(STAMP)
	SOAK_EXAMPLES=$${SOAK_EXAMPLES:-2000} $(BIN)/python -m pytest --timeout 0 tests/model/test_model_and_scripts.py

# The fence's protocol to the last reachable state, then without each of its checks: some minutes (docs/fence.md).
model: $(STAMP)
	$(BIN)/python -m tests.model

# The traps of Celery with Redis, by Celery's own worker and its defaults: each scenario must fail there. Six minutes.
celery-defaults: $(STAMP)
	OMP_NUM_THREADS=1 CELERY_DEFAULTS=1 $(BIN)/python -m pytest --timeout 0 tests/rooms/tasks/test_traps.py -k Defaults

# Leaves out each guard once, of the modules that tests/mutants/sources.py lists and of the scripts: a test must notice.
# Half an hour of two quiet cores; `.venv/bin/python -m tests.mutants broker/scripts/generator` takes those that begin so.
mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

# Every long variant of a test, and longer outages and more examples where a test has them; then random kills and pauses
# on a real stack: some hours. `onbeat chaos --spec FILE` does the second with a job of your own.
WIDENED := tests/chaos tests/hosts tests/integration/test_hostile_roles.py tests/contract/test_trajectories.py \
	tests/contract/test_streamed_losses.py tests/rooms/tasks tests/unit/onbeat/data/rendering \
	tests/integration/test_gateway_memory.py tests/unit/onbeat/scoring/test_patterns.py \
	tests/unit/reward_service/scoring/test_turns.py tests/rooms/ranks/test_rank_options.py

chaos: $(STAMP)
	OMP_NUM_THREADS=1 CHAOS_LONG=1 $(BIN)/python -m pytest $(WIDENED)
	OMP_NUM_THREADS=1 CHAOS_LONG=1 $(BIN)/python -m pytest -m long_variant $(addprefix --ignore=,$(WIDENED))
	$(BIN)/onbeat chaos --rounds 100
	$(BIN)/onbeat chaos --rounds 50 --schedule delayed --max-policy-lag 1 --correction tis
	$(BIN)/onbeat chaos --rounds 50 --schedule delayed --max-policy-lag 2 --correction tis --generators 3
	$(BIN)/onbeat chaos --rounds 30 --spec configs/chaos-stages.toml
	$(BIN)/onbeat chaos --rounds 30 --tasks

# vLLM for a CPU has an environment of its own; so has that for a GPU here, although it can stand in the trainer's, too
# (docs/engines.md).
setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt constraints.txt $(STAMP)
	$(BIN)/onbeat setup vllm
	touch $(VLLM_STAMP)

# The demo, sampled by vLLM on the CPU.
demo-vllm: $(STAMP) $(VLLM_STAMP)
	$(BIN)/onbeat demo --profile configs/stacks/vllm.toml --set deterministic=false

# What every engine promises, with vLLM in the process and behind its server; families, and several workers; then
# jobs of a vLLM and a transformers generator, one whose engine core is killed, and jobs of two parts, two copies and a
# server of one's own. Minutes.
test-vllm: $(STAMP) $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/contract/test_engines.py tests/rooms/engines/test_vllm_engine.py \
		tests/rooms/engines/test_vllm_reload.py tests/rooms/engines/test_vllm_families.py tests/rooms/engines/test_vllm_workers.py \
		tests/rooms/engines/test_vllm_proofs.py \
		-k "vllm or openai"
	OMP_NUM_THREADS=1 TEST_VLLM=1 $(BIN)/python -m pytest tests/e2e/test_vllm_stack.py

# The promises of engines, passes and schedules, on a GPU that torch sees. Minutes: kernels are compiled.
test-gpu: $(STAMP)
	OMP_NUM_THREADS=1 TEST_DEVICE=cuda $(BIN)/python -m pytest -n 4 --dist loadfile tests/contract/test_on_cuda.py \
		tests/contract/test_engines.py tests/e2e/test_same_weights.py tests/e2e/test_colocated.py -k "not vllm and not openai"

LINTS := site sbom style imports audit

# Two at a time, since each uses one core: the types, which take a minute, and next to them all the rest with its
# environments; it ends with the modules that the tests import.
lint: $(STAMP)
	$(MAKE) -j 2 --output-sync=target types $(LINTS) $(COMPILED)
	$(BIN)/python -m tests.sizes

types: $(STAMP)
	$(BIN)/pyright

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks broker
	$(BIN)/python -m benchmarks schedules
	$(BIN)/python -m benchmarks shared-prompt attention
	$(BIN)/python -m benchmarks trainer
