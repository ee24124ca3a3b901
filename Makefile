# The two commands of the README. Each installs first what the machine lacks.
.PHONY: all prepare build test test-guest demo deb bench clean soak soak-proxy

all: build

prepare:
	scripts/prepare

build: prepare
	cargo build --release --locked

test: prepare
	cargo xtask ci

# Tests against real kernels in emulated machines; `make test` runs them too.
test-guest: build
	LOCKSTEP_BIN=$(CURDIR)/target/release/lockstep \
	    cargo test -p lockstep-e2e --locked --test 'guest_*' -- --test-threads=1

demo: build
	target/release/lockstep demo

# Random worlds of the simulator on all cores until stopped (docs/testing.md).
soak:
	cargo run --release --locked -p lockstep-sim -- soak $(SOAK)

# Worlds of the WAN proxy's simulation: SEEDS is FROM..TO. First random troubles, then a crash of
# either proxy at every event of a world.
SEEDS ?= 0..1000
soak-proxy:
	LOCKSTEP_PROXY_SEEDS=$(SEEDS) cargo test --release --locked -p lockstep-proxy --lib soak_ -- \
	    --nocapture --test-threads=1

# The Debian package, in target/.
deb: build
	packaging/build-deb target/release/lockstep target

clean:
	cargo clean
