# Targets for releases; the Makefile includes them.

MANUAL = $(TARGET_DIR)/manual

.PHONY: manual check-arm

manual: bootstrap ## Write manual pages and shell completions to target/manual
	rm -rf $(MANUAL)
	MANUAL="$(abspath $(MANUAL))" $(CARGO) test --quiet --package diesel-outbox-cli --no-default-features --bin diesel-outbox -- \
		--ignored --exact manual::write_manual

check-arm: ## Build the static executable for arm64, and run it under QEMU against a throwaway PostgreSQL
	$(MAKE) static STATIC_TARGET=aarch64-unknown-linux-gnu
	@command -v psql >/dev/null || scripts/install-package psql
	scripts/with-postgres scripts/with-nginx scripts/check-drain \
		qemu-aarch64-static $(TARGET_DIR)/aarch64-unknown-linux-gnu/static/diesel-outbox
