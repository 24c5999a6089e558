# make            ds4, optimised for every instruction set it knows, chosen at run time
# make demo       a chat with the small model in tests/data (no download)
# make test       all tests; ends with "N passed, M failed"
# make asan tsan  the tests under AddressSanitizer + UBSan, or ThreadSanitizer
# make fuzz       every fuzz target for FUZZ_SECONDS (needs clang's libFuzzer)
# make bench      speed of this machine's memory, the kernels, the sampler and the tokenizer
# make bench-peers PEER=DIR MODEL=FILE   ours beside llama.cpp (see README, "Speed")
# make arm        cross build for ARM and its tests under qemu
# make format lint install clean
CXX ?= g++
CXXFLAGS ?= -O2
PREFIX ?= /usr/local
BUILD ?= build
FUZZ_SECONDS ?= 30
FLAGS = -std=c++17 -ffp-contract=off -pthread -Wall -Wextra -Wshadow -Wpedantic
COMMIT := $(shell git rev-parse --short HEAD 2>/dev/null)
DEFINES = $(if $(COMMIT),-DDS4_COMMIT='"$(COMMIT)"')
PYTHON ?= python3
GTEST = -lgtest
TESTS = $(wildcard tests/*.cpp tests/*.h)
NANO = tests/data/nano.gguf
SANITIZE = -O1 -g -fno-omit-frame-pointer

all: ds4

ds4: ds4.cpp Makefile
	$(CXX) $(FLAGS) $(CXXFLAGS) $(DEFINES) $(LDFLAGS) ds4.cpp -o $@

$(BUILD):
	mkdir -p $@

$(BUILD)/make_model: tools/make_model.cpp | $(BUILD)
	$(CXX) $(FLAGS) -O2 $< -o $@

$(BUILD)/tests: $(TESTS) ds4.cpp Makefile | $(BUILD)
	$(CXX) $(FLAGS) $(CXXFLAGS) $(LDFLAGS) tests/all.cpp $(GTEST) -o $@

demo: ds4
	./ds4 --demo --model $(NANO)

test:
	$(MAKE) -j2 $(BUILD)/tests ds4 $(BUILD)/make_model
	$(PYTHON) tests/run.py --build $(BUILD)

asan:
	$(MAKE) BUILD=build/asan CXXFLAGS="$(SANITIZE) -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS" build/asan/tests build/asan/make_model
	$(PYTHON) tests/run.py --build build/asan --unit-only

tsan:
	$(MAKE) BUILD=build/tsan CXXFLAGS="$(SANITIZE) -fsanitize=thread" build/tsan/tests build/tsan/make_model
	$(PYTHON) tests/run.py --build build/tsan --unit-only --filter '*hread*:*orward*'

FUZZERS = $(patsubst tests/fuzz/%.cpp,$(BUILD)/fuzz/%,$(wildcard tests/fuzz/*_fuzz.cpp))
$(BUILD)/fuzz/%: tests/fuzz/%.cpp ds4.cpp
	mkdir -p $(BUILD)/fuzz
	clang++ $(FLAGS) -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $< -o $@

fuzz: $(FUZZERS)
	set -e; for f in $(FUZZERS); do n=$$(basename $$f); mkdir -p $(BUILD)/corpus/$$n; \
	  DS4_FUZZ_MODEL=$(NANO) $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=0 -verbosity=0 \
	    -artifact_prefix=$(BUILD)/ $(BUILD)/corpus/$$n $(wildcard tests/fuzz/seeds/*) >$(BUILD)/fuzz/$$n.log 2>&1 \
	    && echo "$$n: clean for $(FUZZ_SECONDS) s" || { tail -n 40 $(BUILD)/fuzz/$$n.log; exit 1; }; done

bench: ds4
	for w in memory kernels sampler tokenizer; do ./ds4 --bench $$w --model $(NANO) >/dev/null; done

bench-peers: ds4
	$(PYTHON) tools/bench_peers.py --ds4 ./ds4 --peer $(PEER) --model $(MODEL)

ARM_CXX ?= aarch64-linux-gnu-g++
GTEST_SOURCE ?= /usr/src/googletest/googletest
arm:                             # needs g++-aarch64-linux-gnu, qemu-user and googletest
	$(MAKE) CXX=$(ARM_CXX) BUILD=build/arm LDFLAGS=-static GTEST="-I$(GTEST_SOURCE) -w $(GTEST_SOURCE)/src/gtest-all.cc" build/arm/ds4 build/arm/tests build/arm/make_model
	$(PYTHON) tests/run.py --build build/arm --run qemu-aarch64 --unit-only

$(BUILD)/ds4: ds4.cpp Makefile | $(BUILD)
	$(CXX) $(FLAGS) $(CXXFLAGS) $(DEFINES) $(LDFLAGS) ds4.cpp -o $@

format:
	clang-format -i ds4.cpp tests/*.cpp tests/*.h tests/fuzz/*.cpp tools/*.cpp

install: ds4
	install -D -m 755 ds4 $(DESTDIR)$(PREFIX)/bin/ds4

clean:
	rm -rf ds4 build

.PHONY: all demo test asan tsan fuzz bench bench-peers arm format install clean
