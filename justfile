# `just NAME` runs the Makefile's target of that name; the Makefile says what each does.
default:
    @make help

setup:
    @make setup
demo:
    @make demo
demo-smollm2:
    @make demo-smollm2
test:
    @make test
test-gpu:
    @make test-gpu
fmt:
    @make fmt
lint:
    @make lint
types:
    @make types
arch:
    @make arch
docs:
    @make docs
bench:
    @make bench
