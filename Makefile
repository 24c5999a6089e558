# make            ds4, optimised for every instruction set it knows, chosen at run time
# make demo       a chat with the small model in tests/data (no download)
# make test       all tests; ends with "N passed, M failed"
# make asan tsan  the tests under AddressSanitizer + UBSan, or ThreadSanitizer
# make fuzz       every fuzz target for FUZZ_SECONDS (needs clang's libFuzzer)
# make bench      speed of this machine's memory, the kernels, the sampler and the tokenizer
# make bench-peers PEER=DIR MODEL=FILE   ours beside llama.cpp (see README, "On a server: memory and speed")
# make arm        cross build for ARM and its tests under qemu
# make format     clang-format on the lines changed since the last commit
# make install clean
CXX ?= g++
CXXFLAGS ?= -O2
PREFIX ?= /usr/local
BUILD ?= build
FUZZ_SECONDS ?= 30
WERROR =
FLAGS = -std=c++17 -ffp-contract=off -pthread -Wall -Wextra -Wshadow -Wpedantic $(WERROR)
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null)
DEFINES = $(if $(COMMIT),-DDS4_COMMIT='"$(COMMIT)"')
PYTHON ?= python3
GTEST = -lgtest
TESTS = $(wildcard tests/*.cpp tests/*.h)
NANO = tests/data/nano.gguf
JOBS = $(if $(filter -j%,$(MAKEFLAGS)),,-j2)
# Directories with a build of everything; all but the first have their own compiler or flags.
BUILDS = $(BUILD) build/clang build/asan build/tsan build/arm

all: ds4

ds4: ds4.cpp Makefile
	$(CXX) $(FLAGS) $(CXXFLAGS) $(DEFINES) $(LDFLAGS) ds4.cpp -o $@

$(BUILDS:%=%/ds4): ds4.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) $(CXXFLAGS) $(DEFINES) $(LDFLAGS) ds4.cpp -o $@

$(BUILDS:%=%/make_model): tools/make_model.cpp
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -O2 $(LDFLAGS) $< -o $@

$(BUILDS:%=%/tests): $(TESTS) ds4.cpp Makefile
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) $(CXXFLAGS) $(LDFLAGS) tests/all.cpp $(GTEST) -o $@

demo: ds4                        # without a terminal one question, and nothing read from stdin
	@if [ -t 0 ] && [ -t 1 ]; then set -x; ./ds4 --demo --model $(NANO); \
	else set -x; ./ds4 --demo --model $(NANO) -p "What is 12 + 7?"; fi

test:
	$(MAKE) $(JOBS) $(BUILD)/tests ds4 $(BUILD)/make_model
	$(PYTHON) tests/run.py --build $(BUILD)

build/clang/%: override CXX = clang++

SANITIZE = -O1 -g1 -fno-omit-frame-pointer
# Without the checks of every pointer: they triple the time to compile the kernels, and ASan sees what matters of them.
CHECKS = address,undefined -fno-sanitize=null,alignment,object-size,pointer-overflow,vptr -fno-sanitize-recover=all
build/asan/%: override CXXFLAGS = $(SANITIZE) -DDS4_SCALAR_ONLY -fsanitize=$(CHECKS) -D_GLIBCXX_ASSERTIONS
build/tsan/%: override CXXFLAGS = $(SANITIZE) -DDS4_SCALAR_ONLY -fsanitize=thread

# Instrumented scalar kernels are slow: the whole forward pass, the kernel and the distribution tests take ten minutes
# (FILTER='*' runs them too).
asan: FILTER ?= *-Models/Forward*:Isa/*:Sampler*
asan: build/asan/tests build/asan/make_model
	$(PYTHON) tests/run.py --build build/asan --unit-only --filter '$(FILTER)'

tsan: build/tsan/tests build/tsan/make_model
	$(PYTHON) tests/run.py --build build/tsan --unit-only --filter '*hread*:*orward*'

FUZZ = chat gguf tokenizer
build/fuzz/fuzz: $(wildcard tests/fuzz/*.cpp) ds4.cpp Makefile
	@mkdir -p $(@D)
	clang++ $(FLAGS) $(SANITIZE) -DDS4_SCALAR_ONLY -fsanitize=fuzzer,$(CHECKS) tests/fuzz/fuzz.cpp -o $@

build/fuzz/seeds/words: tests/fuzz/make_seeds.py $(BUILD)/make_model
	$(PYTHON) tests/fuzz/make_seeds.py $(BUILD)/make_model $(@D)

fuzz: $(FUZZ:%=fuzz-%)

$(FUZZ:%=fuzz-%): fuzz-%: build/fuzz/fuzz build/fuzz/seeds/words
	@mkdir -p build/fuzz/corpus/$*
	@DS4_FUZZ=$* DS4_FUZZ_MODEL=$(NANO) build/fuzz/fuzz -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 -dict=build/fuzz/seeds/words -verbosity=0 \
	  -artifact_prefix=build/fuzz/$*- build/fuzz/corpus/$* build/fuzz/seeds/$* >build/fuzz/$*.log 2>&1 \
	  && echo "fuzz $*: clean for $(FUZZ_SECONDS) s" || { tail -n 40 build/fuzz/$*.log; exit 1; }

bench: ds4
	for w in memory kernels sampler tokenizer; do ./ds4 --bench $$w --model $(NANO) >/dev/null || exit 1; done

bench-peers: ds4
	$(PYTHON) tools/bench_peers.py --ds4 ./ds4 --peer $(PEER) --model $(MODEL)

# Needs g++-aarch64-linux-gnu, qemu-user and googletest's sources.
ARM_CXX ?= aarch64-linux-gnu-g++
GTEST_SOURCE ?= /usr/src/googletest/googletest
build/arm/%: override CXX = $(ARM_CXX)
build/arm/%: override LDFLAGS = -static
build/arm/tests: override GTEST = -I$(GTEST_SOURCE)/include build/arm/gtest.o
build/arm/tests: build/arm/gtest.o
build/arm/gtest.o:
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -w -c -I$(GTEST_SOURCE)/include -I$(GTEST_SOURCE) $(GTEST_SOURCE)/src/gtest-all.cc -o $@

# Slow: emulation takes a hundred times as long. All kernels on NEON and scalar, the bits of eight models as on x86, the short
# regression files. Left out: chunkings, threads and rewinding of the slower models, the sampler's distributions (FILTER='*'
# runs them, CI=true the rest of the regression files). CXXFLAGS='-O2 -march=armv8.2-a+dotprod' after `rm -r build/arm` has
# the other way to multiply bytes.
EMULATOR ?= qemu-aarch64
arm: FILTER ?= *-Sampler.Distributions*:*EveryChunking*/tiny_f32:*EveryChunking*/tiny_mxfp4:*SameBits*/micro*:*SameBits*/tiny_ds4:*Rewinding*/micro*:*Rewinding*/tiny_ds4
arm: build/arm/ds4 build/arm/tests build/arm/make_model
	$(PYTHON) tests/run.py --build build/arm --run '$(EMULATOR)' --filter '$(FILTER)'

format:                          # not the whole file: clang-format takes the columns out of tables and trailing comments
	git clang-format --extensions cpp,h HEAD || true

install: ds4
	install -D -m 755 ds4 $(DESTDIR)$(PREFIX)/bin/ds4

clean:
	rm -rf ds4 build

.PHONY: all demo test asan tsan fuzz $(FUZZ:%=fuzz-%) bench bench-peers arm format install clean
