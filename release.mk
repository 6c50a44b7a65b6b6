# Targets for releases; the Makefile includes them.

CARGO_DEB_VERSION := 3.8.0
CARGO_CYCLONEDX_VERSION := 0.5.9
CARGO_DENY_VERSION := 0.20.2
VERSION = $(shell sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$$/\1/p' Cargo.toml)
RELEASE_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
DIST = $(TARGET_DIR)/dist
ARCHIVE = diesel-outbox-$(VERSION)-$(STATIC_TARGET)
SBOM = $(TARGET_DIR)/sbom/$(ARCHIVE).cdx.json
MANUAL = $(TARGET_DIR)/manual
# Files of the Debian package that are not in the repository as they are installed.
DEB_FILES = $(dir $(STATIC_PROGRAM))debian-files
DEB = $(TARGET_DIR)/debian/diesel-outbox_$(VERSION)-1_$(if $(filter aarch64-%,$(STATIC_TARGET)),arm64,amd64).deb
# The time in packages is the time of the commit, so that two builds give the same bytes.
COMMIT_TIME = $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct))

.PHONY: manual deb check-deb check-arm sbom publish-check advisories dist archive macos version

manual: bootstrap ## Write manual pages and shell completions to target/manual
	rm -rf $(MANUAL)
	$(CARGO) run --quiet --package lab -- manual $(MANUAL)

deb: static manual ## Build the Debian package from the static executable
	@$(CARGO) deb --version 2>/dev/null | grep -qx '$(CARGO_DEB_VERSION)' || $(CARGO) install --locked cargo-deb@$(CARGO_DEB_VERSION)
	rm -rf $(DEB_FILES)
	cp -R $(MANUAL) $(DEB_FILES)
	gzip -9n $(DEB_FILES)/*.1
	sed -f deploy/debian/unit.sed deploy/systemd/diesel-outbox.service >$(DEB_FILES)/diesel-outbox.service
	SOURCE_DATE_EPOCH=$(COMMIT_TIME) scripts/debian-changelog | gzip -9n >$(DEB_FILES)/changelog.Debian.gz
	SOURCE_DATE_EPOCH=$(COMMIT_TIME) $(CARGO) deb --no-build --no-strip --package diesel-outbox-cli --profile static \
		--target $(STATIC_TARGET) --output $(DEB)

check-deb: deb ## Install, run and purge the Debian package in a copy of this system (as root, not in a plain container)
	@[ -x /lib/systemd/systemd ] || scripts/install-package systemd
	@command -v psql >/dev/null || scripts/install-package psql
	scripts/with-postgres scripts/with-nginx true
	scripts/with-systemd scripts/with-postgres scripts/with-nginx scripts/check-deb $(DEB)

check-arm: ## Build the static executable for arm64, and run it under QEMU against a throwaway PostgreSQL
	$(MAKE) static STATIC_TARGET=aarch64-unknown-linux-gnu
	@command -v psql >/dev/null || scripts/install-package psql
	scripts/with-postgres scripts/with-nginx scripts/check-drain \
		qemu-aarch64-static $(TARGET_DIR)/aarch64-unknown-linux-gnu/static/diesel-outbox

sbom: ## Write a bill of materials of the static executable (CycloneDX) to target/sbom
	@$(CARGO) cyclonedx --version 2>/dev/null | grep -qF ' $(CARGO_CYCLONEDX_VERSION)' || \
		$(CARGO) install --locked cargo-cyclonedx@$(CARGO_CYCLONEDX_VERSION)
	mkdir -p $(dir $(SBOM))
	SOURCE_DATE_EPOCH=$(COMMIT_TIME) $(CARGO) cyclonedx --quiet --manifest-path cli/Cargo.toml --describe binaries --format json \
		--spec-version 1.5 --target $(STATIC_TARGET) --features bundled
	sed 's,file://$(CURDIR),file:///diesel-outbox,g' cli/diesel-outbox_bin.cdx.json >$(SBOM)
	rm cli/diesel-outbox_bin.cdx.json

publish-check: ## Package the published crates and compile the packages, as `cargo publish` does
	$(CARGO) publish --workspace --dry-run --locked

advisories: ## Look for security advisories about dependencies, and check their licences and sources
	@$(CARGO) deny --version 2>/dev/null | grep -qx 'cargo-deny $(CARGO_DENY_VERSION)' || \
		$(CARGO) install --locked cargo-deny@$(CARGO_DENY_VERSION)
	$(CARGO) deny --all-features check

dist: ## Build the files of a release in target/dist: archives, Debian packages, bills of materials, checksums
	rm -rf $(DIST)
	mkdir -p $(DIST)
	@for target in $(RELEASE_TARGETS); do $(MAKE) deb sbom archive STATIC_TARGET=$$target || exit 1; done
	cd $(DIST) && sha256sum diesel-outbox* >SHA256SUMS

# One archive for `make dist`.
archive:
	rm -rf $(TARGET_DIR)/$(ARCHIVE)
	cp -R $(MANUAL) $(TARGET_DIR)/$(ARCHIVE)
	cp $(STATIC_PROGRAM) README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT $(TARGET_DIR)/$(ARCHIVE)
	tar -C $(TARGET_DIR) --sort=name --mtime=@$(COMMIT_TIME) --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw \
		-c $(ARCHIVE) | gzip -9n >$(DIST)/$(ARCHIVE).tar.gz
	cp $(DEB) $(SBOM) $(DIST)

macos: manual ## Build the archive of a release for macOS in target/dist, on macOS (libpq and OpenSSL compiled in)
	$(CARGO) build --profile static --locked --package diesel-outbox-cli --features bundled --target $(HOST)
	mkdir -p $(DIST) $(TARGET_DIR)/$(ARCHIVE)
	cp -R $(MANUAL)/. $(TARGET_DIR)/$(HOST)/static/diesel-outbox README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT $(TARGET_DIR)/$(ARCHIVE)
	tar -C $(TARGET_DIR) -czf $(DIST)/$(ARCHIVE).tar.gz $(ARCHIVE)

version:
	@echo $(VERSION)
