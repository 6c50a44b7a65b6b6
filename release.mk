# Targets for releases; the Makefile includes them.

MANUAL = $(TARGET_DIR)/manual

.PHONY: manual

manual: bootstrap ## Write manual pages and shell completions to target/manual
	rm -rf $(MANUAL)
	MANUAL="$(abspath $(MANUAL))" $(CARGO) test --quiet --package diesel-outbox-cli --no-default-features --bin diesel-outbox -- \
		--ignored --exact manual::write_manual
