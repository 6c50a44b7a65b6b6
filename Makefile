# `make` lists the targets. Each one installs what it needs beyond a Rust toolchain and a C compiler.

CARGO ?= cargo
TEST_FEATURES := tracing
# What applications may leave out.
LEAN := '' relay relay,file,tracing http,aws-lc-rs
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
POSTGRES_VERSIONS := 13 14 15 16 17 18
# All but those in Python.
SHELL_SCRIPTS = $(filter-out scripts/public-api %.py,$(wildcard scripts/*)) .ci/run
# What `make semver` compares with: a revision.
BASE ?= origin/main
# Projects of their own, for what they bring is not for this one's tree: examples, and what only tests need.
PROJECTS := examples/shop examples/webhooks examples/rocket-shop examples/async-shop tests/applications/enqueuer tests/applications/handlers-only tests/applications/own-provider tests/interleavings
# Tests wait more than they compute.
export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(getconf _NPROCESSORS_ONLN))
# Given to the program or to the tests: make test ARGS=--test=relay, make bench ARGS=latency
ARGS ?=
# Of `make static`: `bundled,laboratory` adds the commands `demo` and `bench`.
STATIC_FEATURES ?= bundled
STATIC_MEGABYTES ?= 11
STATIC_PROGRAM = $(TARGET_DIR)/$(HOST)/static/diesel-outbox
# Relocations in a tenth of the space. A static program reads them so from glibc 2.36 on, and does not start before.
PACKED = $(shell printf '2.36\n%s\n' "$$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)" | sort -CV && echo -C link-arg=-Wl,-z,pack-relative-relocs)
# No panic goes through C: it needs no tables to be unwound by.
C_OF_STATIC = -fno-asynchronous-unwind-tables
# Of `make simulate`: the first seed, and how many histories, or for how long.
SEED ?= 1
HISTORIES ?=
MINUTES ?= $(if $(HISTORIES),,1)

.DEFAULT_GOAL := help
.PHONY: help demo test simulate screenshots examples test-matrix check api semver compile-time bench bench-nginx compare static check-static bootstrap clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

demo: bootstrap ## Show the outbox at work, on a throwaway PostgreSQL
	$(CARGO) build
	scripts/with-postgres $(CARGO) run --quiet -- demo $(ARGS)

test: bootstrap ## Run the tests on a throwaway PostgreSQL (PG_VERSION=13 to 18 chooses which)
	scripts/install-receivers
	scripts/install-browser
	@scripts/install-locked python tests/prometheus/requirements.txt prometheus/venv >/dev/null
	@command -v promtool >/dev/null || scripts/install-package prometheus
	@command -v openssl >/dev/null || scripts/install-package openssl
	@command -v psql >/dev/null || scripts/install-package psql
	@PATH="$$PATH:/usr/sbin"; command -v pgbouncer >/dev/null || scripts/install-package pgbouncer
	$(CARGO) test --no-run --features $(TEST_FEATURES)
	scripts/with-postgres $(CARGO) test --features $(TEST_FEATURES) $(ARGS)

simulate: bootstrap ## Play histories of relays in a simulated world (SEED=, HISTORIES=, MINUTES=)
	$(CARGO) test --release --no-run --lib --features $(TEST_FEATURES)
	SEED=$(SEED) HISTORIES=$(HISTORIES) MINUTES=$(MINUTES) \
		$(CARGO) test --release --lib --features $(TEST_FEATURES) simulation::the_promises -- --nocapture

screenshots: bootstrap ## Write the README's images of the admin page, docs/images
	scripts/install-browser
	$(CARGO) test --no-run --features $(TEST_FEATURES) --test browser
	scripts/with-postgres $(CARGO) test --features $(TEST_FEATURES) --test browser -- --ignored screenshots

examples: bootstrap ## Test what is a project of its own: shops on rouille, Rocket and diesel-async, and other applications
	@for project in $(PROJECTS); do \
		set -- --manifest-path $$project/Cargo.toml; \
		export CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/applications CARGO_PROFILE_DEV_DEBUG=0; \
		echo "== $$project"; \
		$(CARGO) test --no-run "$$@" && scripts/with-postgres $(CARGO) test "$$@" || exit 1; \
	done

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
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --package diesel-outbox --features $(TEST_FEATURES)
	scripts/check-dependencies
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	scripts/public-api
	scripts/requirements.py
	scripts/imports.py
	benchmarks/compare.py --check
	@if command -v shellcheck >/dev/null; then \
		echo shellcheck $(SHELL_SCRIPTS); \
		shellcheck $(SHELL_SCRIPTS); \
	else \
		echo "shellcheck is not installed: the scripts were not checked"; \
	fi
	scripts/check-deploy

api: bootstrap ## Write the public API down in public-api.txt, which `make check` compares it with
	@command -v python3 >/dev/null || scripts/install-package python3-venv
	scripts/public-api --write

semver: bootstrap ## Look for changes since BASE (a revision) that break whoever uses the library
	@$(CARGO) semver-checks --version >/dev/null 2>&1 || $(CARGO) install --locked cargo-semver-checks
	$(CARGO) semver-checks --package diesel-outbox --baseline-rev $(BASE) --only-explicit-features --features tracing

compile-time: bootstrap ## Measure what the library adds to the clean build of an application
	scripts/compile-time

bench: bootstrap ## Measure messages per second on a throwaway PostgreSQL (ARGS=ordered: a scenario; ARGS=--help)
	$(CARGO) build --release
	scripts/with-postgres $(TARGET_DIR)/release/diesel-outbox bench $(ARGS)

bench-nginx: bootstrap ## The same with nginx as the receiver, which costs the machine less
	$(CARGO) build --release
	scripts/with-postgres scripts/with-nginx $(TARGET_DIR)/release/diesel-outbox bench $(ARGS)

compare: bootstrap ## Measure pg-boss, graphile-worker, awa and outbox-pattern-processor beside this (ARGS=--write: into the documents)
	@command -v npm >/dev/null || scripts/install-package npm
	@command -v psql >/dev/null || scripts/install-package psql
	cd benchmarks/peers/node && npm ci --no-audit --no-fund
	CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/peers $(CARGO) build --release --locked --manifest-path benchmarks/peers/rust/Cargo.toml
	$(CARGO) build --release
	scripts/with-postgres scripts/with-nginx benchmarks/compare.py --ours $(abspath $(TARGET_DIR))/release/diesel-outbox \
		--peers $(abspath $(TARGET_DIR))/peers/release $(ARGS)

static: ## Build one small static executable, libpq and OpenSSL compiled in (Linux)
	@perl -MFindBin -MIPC::Cmd -e 1 2>/dev/null || scripts/install-package perl
	CFLAGS="$(CFLAGS) $(C_OF_STATIC)" OPENSSL_SRC_PERL="$(abspath scripts/openssl-perl)" RUSTFLAGS="-C target-feature=+crt-static $(PACKED)" \
		$(CARGO) build --profile static --package diesel-outbox-cli --no-default-features --features $(STATIC_FEATURES) --target $(HOST)
	scripts/check-static $(STATIC_PROGRAM) $(STATIC_MEGABYTES)

check-static: static ## Try the static executable over TLS to a throwaway PostgreSQL
	@command -v openssl >/dev/null || scripts/install-package openssl
	@command -v psql >/dev/null || scripts/install-package psql
	scripts/with-postgres scripts/with-nginx scripts/check-postgres-tls $(STATIC_PROGRAM)

bootstrap: ## Install the libpq headers where they are missing
	@scripts/install-libpq

clean: ## Remove what was built
	$(CARGO) clean
