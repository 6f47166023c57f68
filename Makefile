# Two commands to know: `make demo` and `make test`; for daily work `make check`. Each sets up .venv first (once).
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

MINUTES := 20
SEEDS := 500
STATES := 1000000

.PHONY: demo check test test-long models pythons compose-test lint docs site bench soak storms hostile fuzz links harm pairwise results late thousand evidence reproduce reproduce-full clean

demo: $(STAMP)
	$(BIN)/p2ptrain demo $(ARGS)

# For daily work: lint, types, and the tests that start no process and are quick.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not processes and not slow and not long" $(ARGS)

# First those that start no peers, then the files of those that do, two at a time; with ARGS, what they name.
# With bytecode kept, whatever the environment says: else each of the hundred peers compiles the package anew.
test soak: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not peers and not long"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "peers and not long"
endif

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long $(ARGS)

# Two peers with each module of torch, 129 architectures of transformers, and adapters of peft; ends with a table.
models: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long tests/models $(ARGS)

# A smoke test under each Python from 3.11 to 3.14 that is here: two peers, installed anew, commit a round of both.
pythons:
	$(PYTHON) -m tests.pythons

lint: $(STAMP)
	$(BIN)/ruff check p2ptrain tests examples benchmarks docs/pictures docs/build_site.py docs/message_tables.py
	$(BIN)/ruff format --check p2ptrain tests examples benchmarks docs/pictures docs/build_site.py docs/message_tables.py
	$(BIN)/mypy

# What is made of the code: the page of settings, the tables of messages and the pictures.
docs: $(STAMP)
	$(BIN)/p2ptrain config reference > docs/use/configuration.md
	$(BIN)/python docs/message_tables.py
	$(BIN)/python docs/pictures/draw.py

# The pages as a site with search, in site/. A link to nowhere ends it.
site: $(STAMP)
	$(BIN)/python docs/build_site.py

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

# Real peers under a random storm of kills, pauses, restarts and joins, and of partitions where it runs as root on Linux;
# ends with a table.
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) $(ARGS)

# The protocol under hundreds of random storms, in virtual time, and a million states of a round's consensus.
storms: $(STAMP)
	OMP_NUM_THREADS=1 STORMS=$(SEEDS) STATES=$(STATES) $(BIN)/python -m pytest -n 2 tests/protocol/test_storm.py tests/protocol/rounds/deciding/test_consensus.py $(ARGS)

# A liar among real peers on this machine, attack by attack: six minutes, ends with a table.
hostile: $(STAMP)
	$(BIN)/python -m tests.hostile $(ARGS)

# A million random frames after a valid Hello, on the memory network: half an hour of a core.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile.fuzz $(ARGS)

# Real peers on slow and broken links, in network namespaces: 20 minutes, as root.
links: $(STAMP)
	$(BIN)/python -m tests.links $(ARGS)

# What the size of a swarm costs a peer: 16 to 1000 real nodes in virtual time, an hour of a core.
thousand: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.thousand $(ARGS)

# What lying members cost: 156 simulated runs of 20 s of a core each, of which those done are kept, and
# docs/understand/security.md.
harm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.harm $(ARGS)
	$(BIN)/python -m benchmarks.harm --report

# Random pairs (NoLoCo) against rounds at the same bytes, 8 and 64 simulated peers: 20 minutes of a core; runs that are
# done are kept. ARGS="--peers 256": hours.
pairwise: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.pairwise $(ARGS)

# nanoGPT's shakespeare_char by one peer, four peers and data parallel, a larger model, and docs/evidence/results.md:
# hours of two cores; runs that are done are kept. ARGS="--text input.txt", or ARGS=--report for the page only.
results: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.shakespeare $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.larger $(filter --report,$(ARGS))

# What rounds that land late cost by landing rule, and `--grid bytes`: sparse rounds. 2900 simulated runs of a minute of
# a core, of which those done are kept; the first hundred say most. ARGS="--text input.txt"; --report for the tables.
late: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.late $(ARGS)

# The compose demo, built, started, scaled, broken and stopped: needs Docker and Compose, and nothing else.
compose-test:
	$(PYTHON) -m tests.compose

# All long runs that have not passed at this commit, one after the other, and docs/evidence/runs.md: some 8 hours.
evidence: $(STAMP)
	$(BIN)/python -m benchmarks.evidence $(ARGS)

# The papers' experiments, one after the other; -full repeats the headline ones with three seeds.
reproduce: $(STAMP)
	$(BIN)/p2ptrain reproduce $(ARGS)

reproduce-full: $(STAMP)
	$(BIN)/p2ptrain reproduce --out p2ptrain-reproduction
	$(BIN)/p2ptrain reproduce --headline --seeds 3 --out p2ptrain-reproduction-seeds

$(STAMP): setup.cfg setup.py pyproject.toml constraints.txt p2ptrain/algorithms/kernels/kernels.c
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "p2ptrain needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	@echo "installing into $(VENV); 2 GB, some minutes without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
