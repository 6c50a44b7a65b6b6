# `make` lists the targets. Each target installs its needs beyond a Rust toolchain and a C compiler.

CARGO ?= cargo
TEST_FEATURES := schemars,tracing
# Combinations of features that applications may choose, checked without the default features.
LEAN := '' schemars relay endpoints operate relay,file,tracing http,aws-lc-rs http,endpoints
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
POSTGRES_VERSIONS := 13 14 15 16 17 18
# All scripts except those in Python.
SHELL_SCRIPTS = $(filter-out scripts/public-api %.py %.txt,$(wildcard scripts/*)) .ci/run
# Checks deny.toml. A debug build takes a minute and a half on two cores; an optimised one several minutes.
CARGO_DENY := 0.20.2
MDBOOK := 0.5.4
# The revision that `make semver` (default: origin/main) and `make check-upgrade` (default: the last tag) compare with.
BASE ?=
LAST_TAG = $(shell git describe --tags --abbrev=0 2>/dev/null)
# Separate projects, to keep their dependencies out of this one: examples, and applications that only tests need.
PROJECTS := examples/shop examples/webhooks examples/rocket-shop examples/async-shop examples/redis-streams examples/kafka tests/applications/enqueuer tests/applications/handlers-only tests/applications/own-provider tests/interleavings
# Tests mostly wait, so run more of them at once than there are cores.
export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))
# Arguments for the program or the tests: make test ARGS=--test=relay, make bench ARGS=latency
ARGS ?=
# Packages for `make static`. `diesel-outbox-cli lab` also builds `outbox-lab`, to measure the static program.
STATIC_PACKAGES ?= diesel-outbox-cli
STATIC_MEGABYTES ?= 14
STATIC_PROGRAM = $(TARGET_DIR)/$(STATIC_TARGET)/static/diesel-outbox
# No panic unwinds through C, so C code needs no unwind tables.
C_OF_STATIC = -fno-asynchronous-unwind-tables
# For `make simulate`: the first seed, and either the number of histories or the duration.
SEED ?= 1
HISTORIES ?=
MINUTES ?= $(if $(HISTORIES),,1)
# The platform of `make static`: that of this machine, or aarch64-unknown-linux-gnu.
STATIC_TARGET ?= $(HOST)
# Panics name sources of dependencies. The folders of this machine are no part of these names.
REMAP = --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo --remap-path-prefix=$(CURDIR)=/diesel-outbox
# For another platform: the prefix of the C compiler, the linker, and the program that runs executables.
CROSS = $(if $(filter-out $(HOST),$(STATIC_TARGET)),$(subst -unknown,,$(STATIC_TARGET)))
CROSS_LINKER = $(if $(CROSS),CARGO_TARGET_$(shell echo '$(STATIC_TARGET)' | tr a-z- A-Z_)_LINKER=$(CROSS)-gcc)
EMULATOR = $(if $(CROSS),qemu-$(firstword $(subst -, ,$(CROSS)))-static)

.DEFAULT_GOAL := help
include release.mk
.PHONY: help demo test simulate screenshots examples build-examples needs-of-examples test-matrix check api semver check-upgrade update compile-time book bench bench-nginx bench-all compare static check-static bootstrap clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: bootstrap ## Run a demonstration on a throwaway PostgreSQL
	$(CARGO) build
	scripts/with-postgres $(TARGET_DIR)/debug/diesel-outbox demo $(ARGS)

test: bootstrap ## Run the tests on a throwaway PostgreSQL (PG_VERSION=13 to 18 selects the version)
	scripts/install-receivers
	scripts/install-browser
	@scripts/install-locked python tests/prometheus/requirements.txt prometheus/venv >/dev/null
	@scripts/install-locked python tests/openapi/requirements.txt openapi/venv >/dev/null
	@command -v prometheus >/dev/null || scripts/install-package prometheus
	@command -v openssl >/dev/null || scripts/install-package openssl
	@command -v psql >/dev/null || scripts/install-package psql
	@PATH="$$PATH:/usr/sbin"; command -v pgbouncer >/dev/null || scripts/install-package pgbouncer
	@PATH="$$PATH:/usr/sbin"; command -v nginx >/dev/null || scripts/install-package nginx
	$(CARGO) test --no-run --features $(TEST_FEATURES)
ifneq ($(ARGS),)
	$(run-tests) $(ARGS)
else
	@# Two groups at once, each with a server: tests wait for half of their time, and those of chaos stop the server.
	@said=$$(mktemp) && ended=0; \
	$(run-tests) --test browser --test chaos --test newcomer >"$$said" 2>&1 & beside=$$!; \
	trap 'kill $$beside 2>/dev/null; rm -f "$$said"; exit 130' INT TERM; \
	$(run-tests) --lib --bins --test '[!bcn]*' || ended=$$?; \
	$(run-tests) --doc || ended=$$?; \
	wait $$beside || ended=$$?; cat "$$said"; rm -f "$$said"; exit $$ended
endif

run-tests = WITH_POSTGRES_IN_MEMORY=1 scripts/with-postgres $(CARGO) test --no-fail-fast --features $(TEST_FEATURES)

simulate: bootstrap ## Run histories of relays in a simulated world (SEED=, HISTORIES=, MINUTES=)
	$(CARGO) test --release --no-run --lib --features $(TEST_FEATURES)
	SEED=$(SEED) HISTORIES=$(HISTORIES) MINUTES=$(MINUTES) \
		$(CARGO) test --release --lib --features $(TEST_FEATURES) simulation::the_promises -- --nocapture

screenshots: bootstrap ## Write the images of the pages for the documents into docs/images
	scripts/install-browser
	$(CARGO) test --no-run --features $(TEST_FEATURES) --test browser
	scripts/with-postgres $(CARGO) test --features $(TEST_FEATURES) --test browser -- --ignored screenshots

examples: build-examples ## Test the separate projects: shops on rouille, Rocket and diesel-async, relays to Redis and Kafka, other applications
	@# Several at once: two of them wait for takeovers, and need no processor meanwhile.
	@$(for_projects) printf '%s\n' $(PROJECTS) | WITH_POSTGRES_IN_MEMORY=1 xargs -P $(RUST_TEST_THREADS) -I '{}' sh -c \
		'said=$$(scripts/with-postgres $(CARGO) test --manifest-path {}/Cargo.toml 2>&1) && ended=0 || ended=$$?; \
		printf "== %s\n%s\n" {} "$$said"; exit $$ended'

build-examples: needs-of-examples
	@$(for_projects) for project in $(PROJECTS); do \
		echo "== $$project"; \
		$(CARGO) test --no-run --manifest-path $$project/Cargo.toml || exit 1; \
	done

needs-of-examples: bootstrap
	@command -v curl >/dev/null || scripts/install-package curl
	@command -v redis-server >/dev/null || scripts/install-package redis
	@pkg-config --exists rdkafka 2>/dev/null || scripts/install-package librdkafka

for_projects = export CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/applications CARGO_PROFILE_DEV_DEBUG=0;

test-matrix: ## Run the tests on every supported version of PostgreSQL
	@for version in $(POSTGRES_VERSIONS); do \
		echo "== PostgreSQL $$version"; \
		PG_VERSION=$$version $(MAKE) test || exit 1; \
	done

check: bootstrap ## Check format, lints, documentation, dependencies, scripts and deployment files
	@$(CARGO) fmt --version >/dev/null 2>&1 && $(CARGO) clippy --version >/dev/null 2>&1 || \
		rustup component add rustfmt clippy
	$(CARGO) fmt --check
	@for project in $(PROJECTS); do \
		$(CARGO) fmt --check --manifest-path $$project/Cargo.toml || exit 1; \
	done
	$(CARGO) clippy --all-targets --features $(TEST_FEATURES) -- -D warnings
	@for features in $(LEAN); do \
		echo "$(CARGO) clippy --no-default-features --features '$$features'"; \
		$(CARGO) clippy --quiet --package diesel-outbox --lib --no-default-features --features "$$features" -- -D warnings || exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --package diesel-outbox --package diesel-outbox-pages --features $(TEST_FEATURES)
	@$(CARGO) deny --version >/dev/null 2>&1 || $(CARGO) install --quiet --debug --locked cargo-deny@$(CARGO_DENY)
	$(CARGO) deny check bans licenses sources
	scripts/check-dependencies
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	scripts/public-api
	scripts/requirements.py
	@checks=$$(scripts/install-locked python scripts/checks.txt checks/venv) && \
		echo scripts/imports.py && $$checks/bin/python scripts/imports.py
	scripts/references.py
	scripts/words.py
	benchmarks/compare.py --check
	benchmarks/all.py --check
	python3 -m unittest discover --quiet --start-directory benchmarks
	@if command -v shellcheck >/dev/null; then \
		echo shellcheck $(SHELL_SCRIPTS); \
		shellcheck $(SHELL_SCRIPTS); \
	else \
		echo "shellcheck is not installed: skipping the shell scripts"; \
	fi
	scripts/check-deploy

api: bootstrap ## Write the public API to public-api.txt, against which `make check` compares it
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	scripts/public-api --write

semver: bootstrap ## Find breaking changes of the library since BASE (a revision)
	@$(CARGO) semver-checks --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-semver-checks
	$(CARGO) semver-checks --package diesel-outbox --baseline-rev $(or $(BASE),origin/main) --only-explicit-features --features tracing

check-upgrade: bootstrap ## Test an upgrade from BASE (a revision; default: the last tag) and back
	@base='$(or $(BASE),$(LAST_TAG))'; \
	if [ -z "$$base" ]; then \
		echo "check-upgrade: no version is tagged yet, so there is nothing to upgrade from (BASE=<revision> names one)"; \
		exit 0; \
	fi; \
	set -e; \
	command -v psql >/dev/null || scripts/install-package psql; \
	echo "check-upgrade: from $$base"; \
	old=$$(scripts/build-revision "$$base" "$(TARGET_DIR)/upgrade"); \
	$(CARGO) build; \
	scripts/with-postgres scripts/with-nginx scripts/check-upgrade "$$old" "$(TARGET_DIR)/debug/diesel-outbox"

update: bootstrap ## Update dependencies, to the same versions in all projects: what they share is then built once
	$(CARGO) update
	@for project in $(PROJECTS); do \
		cp Cargo.lock $$project/Cargo.lock && $(CARGO) update --quiet --workspace --manifest-path $$project/Cargo.toml || exit 1; \
	done

compile-time: bootstrap ## Measure how much the library adds to the clean build of an application
	scripts/compile-time

book: ## Write the guide as a site with search to target/book
	@mdbook --version 2>/dev/null | grep -qF 'v$(MDBOOK)' || $(CARGO) install --quiet --locked mdbook@$(MDBOOK)
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	mdbook build

bench: bootstrap ## Measure messages per second on a throwaway PostgreSQL (ARGS=ordered for one scenario; ARGS=--help)
	$(CARGO) build --release
	scripts/with-postgres $(TARGET_DIR)/release/diesel-outbox bench $(ARGS)

bench-nginx: bootstrap ## The same with nginx as the receiver, which uses less CPU
	$(CARGO) build --release
	scripts/with-postgres scripts/with-nginx $(TARGET_DIR)/release/diesel-outbox bench $(ARGS)

bench-all: bootstrap ## Measure all numbers of the documents, in 25 minutes (ARGS=--write updates them; ARGS=--help)
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	$(CARGO) build --release
	scripts/with-postgres scripts/with-nginx benchmarks/all.py --ours $(abspath $(TARGET_DIR))/release/diesel-outbox $(ARGS)

compare: bootstrap ## Compare with pg-boss, graphile-worker, awa and outbox-pattern-processor (ARGS=--write updates the documents)
	@command -v npm >/dev/null || scripts/install-package npm
	@command -v psql >/dev/null || scripts/install-package psql
	cd benchmarks/peers/node && npm ci --no-audit --no-fund
	CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/peers $(CARGO) build --release --locked --manifest-path benchmarks/peers/rust/Cargo.toml
	$(CARGO) build --release
	scripts/with-postgres scripts/with-nginx benchmarks/compare.py --ours $(abspath $(TARGET_DIR))/release/diesel-outbox \
		--peers $(abspath $(TARGET_DIR))/peers/release $(ARGS)

static: ## Build one small static executable with libpq and OpenSSL compiled in (Linux)
	@perl -MFindBin -MIPC::Cmd -e 1 2>/dev/null || scripts/install-package perl
	@[ -z "$(CROSS)" ] || command -v $(CROSS)-gcc >/dev/null || scripts/install-package gcc-arm64
	@[ -z "$(EMULATOR)" ] || command -v $(EMULATOR) >/dev/null || scripts/install-package qemu
	@[ -z "$(CROSS)" ] || rustup target add $(STATIC_TARGET)
	$(CROSS_LINKER) CFLAGS="$(CFLAGS) $(C_OF_STATIC)" OPENSSL_SRC_PERL="$(abspath scripts/openssl-perl)" RUSTFLAGS="-C target-feature=+crt-static $(REMAP)" \
		$(CARGO) build --profile static $(addprefix --package=,$(STATIC_PACKAGES)) --features bundled --target $(STATIC_TARGET)
	scripts/check-static $(STATIC_PROGRAM) $(STATIC_MEGABYTES) $(EMULATOR)

check-static: static ## Test the static executable over TLS against a throwaway PostgreSQL
	@command -v openssl >/dev/null || scripts/install-package openssl
	@command -v psql >/dev/null || scripts/install-package psql
	scripts/with-postgres scripts/with-nginx scripts/check-postgres-tls $(STATIC_PROGRAM)

bootstrap: ## Install the libpq headers if they are missing
	@scripts/install-libpq

clean: ## Remove all build output
	$(CARGO) clean
