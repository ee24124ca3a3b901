# The two commands of the README. Each installs first what the machine lacks.
.PHONY: all prepare build test demo bench clean

all: build

prepare:
	scripts/prepare

build: prepare
	cargo build --release --locked

test: prepare
	cargo xtask ci

demo: build
	target/release/lockstep demo

clean:
	cargo clean
