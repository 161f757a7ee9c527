# Every entry point. `make demo` and `make test` set up everything on a fresh machine.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# Profile of cargo, and features of the extension module: `checked` and `one-build` in tests.
PROFILE := release
EXTENSION := pyo3/extension-module
# What builds the binary. Empty if it was built already, as it is with the tests.
BINARY := binary
# Python tests at a time.
SESSIONS := 3
# Python that ruff checks.
PYTHON := examples figures harness python
# Rust that cargo tests: the extension module is tested from Python.
WORKSPACE := --workspace --exclude everstep-python
export GLOO_SOCKET_IFNAME ?= lo

# What `make check` runs, each a target of its own: `make check-types`. Figure house-checks plants what each must find.
CHECKS := format clippy doc msrv deny python types spelling links counts wrap

.PHONY: help setup build binary demo test check $(addprefix check-,$(CHECKS)) figures figure soak papers sim fuzz miri s3s nft schema fmt clean

help:
	@echo "make demo            the main job on real text, with real kills"
	@echo "make test            everything that CI runs"
	@echo "make figure NAME=x   one measured claim; make figures: all, into docs/figures.md"
	@echo "make soak NAME=x     the same with the full counts"
	@echo "make papers          the tables of the papers, into docs/benchmarks"
	@echo "make sim SEED=n      replay one simulated cluster exactly"
	@echo "make fuzz SECONDS=n  fuzz every parser for n seconds each"
	@echo "make miri            the slot protocol under Miri (installs a nightly compiler)"
	@echo "make schema          write docs/schema from the types of what --json prints"
	@echo "make check           formatting, lints, types, licences, spelling, links, counts, wrapping; make fmt: format"

# The virtual environment: torch and what tests need, from PyPI.
$(VENV)/ready: python/requirements.txt
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r python/requirements.txt
	touch $@

setup: $(VENV)/ready build

binary:
	cargo build -q --profile $(PROFILE) -p everstep

# The binary travels in the wheel as a script: one pip install brings all.
build: $(VENV)/ready $(BINARY)
	mkdir -p python/everstep.data/scripts
	install -m 755 target/$(PROFILE)/everstep python/everstep.data/scripts/everstep
	cd python && VIRTUAL_ENV=$(CURDIR)/$(VENV) ../$(VENV)/bin/maturin build -q --profile $(PROFILE) --features $(EXTENSION) -o ../target/wheels
	$(PY) -m pip install -q --force-reinstall --no-deps target/wheels/everstep-*.whl
	echo $(PROFILE) > $(VENV)/profile

demo: setup
	$(PY) examples/gpt/demo.py

check: $(addprefix check-,$(CHECKS))

check-format:
	cargo fmt --check

# In the profile of the tests, which then find the macros of others compiled.
check-clippy:
	cargo clippy -q --profile checked --workspace --all-targets -- -D warnings

# Private items are documented too, so links to them are in order.
check-doc:
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc -q --profile checked --no-deps --workspace --document-private-items

# The oldest compiler that is promised. Clippy has compiled everything if that is the one in use.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
check-msrv:
	case "$$(rustc --version)" in \
	"rustc $(MSRV)"*) echo "make check-msrv: all else is compiled with $(MSRV) as well";; \
	*) rustup run --install $(MSRV) cargo check -q --workspace --all-targets;; \
	esac

# Advisories are in a database on the network.
DENY := PATH=$(CURDIR)/target/tools/bin:$$PATH cargo deny --log-level error
check-deny: target/tools/bin/cargo-deny
	$(DENY) check bans licenses sources
	@if timeout 60 $(DENY) fetch db 2> /dev/null; then $(DENY) check --disable-fetch advisories; \
	else echo "make check-deny: the database of advisories cannot be reached, so these are not checked"; fi

target/tools/bin/cargo-deny:
	CARGO_PROFILE_DEV_DEBUG=0 cargo install -q cargo-deny --version 0.20.2 --locked --debug --root target/tools

check-python: $(VENV)/ready
	$(VENV)/bin/ruff check -q $(PYTHON)
	$(VENV)/bin/ruff format -q --check $(PYTHON)

check-types: $(VENV)/ready
	cd python && ../$(VENV)/bin/mypy

check-spelling: $(VENV)/ready
	$(VENV)/bin/typos

check-links: $(VENV)/ready
	$(VENV)/bin/lychee -q --offline --include-fragments '*.md' 'docs/**/*.md'

# Numbers of things in prose, such as "16 invariants", are those of the source.
check-counts:
	python3 -m harness.counts

# Prose in Markdown, comments and docstrings is wrapped at 100 columns.
check-wrap:
	python3 -m harness.wrap

# Writes docs/schema from the types; a test compares the two.
schema:
	EVERSTEP_WRITE_SCHEMAS=1 cargo test -q -p everstep-wire --test schema

# Selecting the whole workspace keeps the features of dependencies the same, so cargo does not rebuild them.
TESTED := cargo test -q --profile checked
# A crate that is built once more, with another feature and for a single test, is hardly optimized.
QUICKLY = --config profile.checked.package.everstep-$(1).opt-level=1
test:
	$(MAKE) -j 3 -O check
	$(TESTED) $(WORKSPACE)
	cargo build -q --profile checked $(call QUICKLY,checkpoint) $(WORKSPACE) --features everstep-checkpoint/faults --example foreign_directories
	target/checked/examples/foreign_directories 2000 $$(date +%s)
	$(MAKE) -j 2 -O miri fuzz SECONDS=10 SEED=1
	$(TESTED) $(WORKSPACE) --test simulation --test replay --test fleet -- --nocapture
	$(TESTED) $(call QUICKLY,core) $(call QUICKLY,sim) $(WORKSPACE) --features everstep-sim/planted --test planted -- --nocapture
	$(MAKE) setup PROFILE=checked BINARY= EXTENSION=$(EXTENSION),one-build
	$(PY) -m pytest -q -n $(SESSIONS) --dist worksteal --durations=15 --durations-min=5 python/tests

# A second server of the S3 protocol, for figure s3-faults.
target/s3s/bin/s3s-fs:
	cargo install -q s3s-fs --version 0.14.1 --features binary --locked --root target/s3s

s3s: target/s3s/bin/s3s-fs

# Drops packets, for figure hostile-environment. Without root's rights it does without these cases, and says so.
nft:
	command -v nft > /dev/null || { apt-get update -qq && apt-get install -qq -y nftables > /dev/null; } || true

# What some figures need beyond the virtual environment.
NEEDED := $(if $(filter s3-faults,$(NAME)),s3s) $(if $(filter hostile-environment,$(NAME)),nft)

figure: setup $(NEEDED)
	$(PY) figures/run.py $(NAME)

soak: setup $(NEEDED)
	$(PY) figures/run.py --soak $(NAME)

figures: setup s3s nft
	$(PY) figures/run.py --all

# Tables of the papers, into docs/benchmarks.
papers:
	cargo run -q --release -p everstep-replay --example papers -- docs/benchmarks 200 > /dev/null

sim:
	cargo run -q --release -p everstep-sim -- $(SEED)

# Needs neither the virtual environment nor a nightly compiler. A finding fails it. In tests, the seed is always the same: a
# change is to blame for what it finds. Without one, it looks for more than any run before.
SECONDS := 60
SEED := 0
fuzz:
	python3 -m harness.fuzz $(SECONDS) --seed $(SEED)

# Orders of the threads to try.
ORDERS := 4
miri:
	python3 -m harness.miri $(ORDERS)

fmt: $(VENV)/ready
	cargo fmt
	$(VENV)/bin/ruff format -q $(PYTHON)

clean:
	rm -rf target $(VENV) python/everstep.data
