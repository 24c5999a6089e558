// THREADS: every chunk once, whatever the sizes and the load; core counting.
#include "ds4_test.h"
#include "gguf_writer.h"

#include <numeric>

namespace threads_test {

using ds4::ThreadPool;

TEST(ThreadPool, EveryChunkOnce) {
  for (int n_threads : {-1, 0, 1, 2, 3, 7}) {
    ThreadPool pool(n_threads);
    EXPECT_EQ(pool.size(), std::max(1, n_threads));
    for (size_t n : {0, 1, 2, 3, 8, 41, 1000}) {
      std::vector<int> count(n);                 // a chunk belongs to one thread: no atomics needed
      std::atomic<bool> thread_ok{true};
      pool.run(n, [&](size_t chunk, int thread) {
        count[chunk]++;
        if (thread < 0 || thread >= pool.size()) thread_ok = false;
      });
      EXPECT_TRUE(thread_ok);
      EXPECT_EQ(count, std::vector<int>(n, 1)) << n_threads << " threads";
    }
  }
}

// What one run wrote, all threads see in the next.
TEST(ThreadPool, RunsAreOrdered) {
  for (int n_threads : {1, 2, 5}) {
    ThreadPool pool(n_threads);
    std::vector<uint64_t> a(64, 1), b(64);
    for (int round = 0; round < 2000; round++) {
      const uint64_t sum = std::accumulate(a.begin(), a.end(), uint64_t(0)) % 1000003;
      pool.run(64, [&](size_t c, int) { b[c] = (sum + a[63 - c] * (c + 1)) % 1000003; });
      std::swap(a, b);
      if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));      // workers fall asleep
    }
    static std::vector<uint64_t> first;
    if (first.empty()) first = a;
    EXPECT_EQ(a, first);
  }
}

TEST(ThreadPool, ComesAndGoes) {
  for (int i = 0; i < 50; i++) {
    ThreadPool pool(1 + i % 4);
    std::atomic<int> n{0};
    for (int r = 0; r < i % 3; r++) pool.run(5, [&](size_t, int) { n++; });
    EXPECT_EQ(n, i % 3 * 5);
  }
}

// A worker that is held up with a chunk in hand is left out for a while, and called back.
TEST(ThreadPool, LateWorkerIsBenchedAndCalledBack) {
  ThreadPool pool(2);
  const auto chunk_time = std::chrono::microseconds(200);
  bool worker_late = false;
  for (int i = 0; i < 200 && !worker_late; i++) {
    std::atomic<bool> late{false};
    pool.run(8, [&](size_t, int thread) {
      std::this_thread::sleep_for(thread == 0 ? chunk_time : std::chrono::milliseconds(20));
      if (thread != 0) late = true;
    });
    worker_late = late;
  }
  ASSERT_TRUE(worker_late);
  std::atomic<int> by_worker{0};
  const double benched_at = ds4::now_seconds();
  pool.run(8, [&](size_t, int thread) { by_worker += thread != 0; });
  if (ds4::now_seconds() - benched_at < 5e-3) { EXPECT_EQ(by_worker, 0); }
  while (by_worker == 0 && ds4::now_seconds() - benched_at < 10) {
    pool.run(8, [&](size_t, int thread) {
      std::this_thread::sleep_for(chunk_time);
      by_worker += thread != 0;
    });
  }
  EXPECT_GT(by_worker, 0);
}

// Where most threads have nothing to do, those that work are not late.
TEST(ThreadPool, FewerChunksThanThreadsBenchNobody) {
  ThreadPool pool(8);
  for (int i = 0; i < 20; i++) pool.run(3, [&](size_t, int) { std::this_thread::sleep_for(std::chrono::milliseconds(3)); });
  std::atomic<int> seen{0};
  pool.run(8, [&](size_t, int thread) {
    seen |= 1 << thread;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  });
  EXPECT_EQ(seen, 255);
}

TEST(Cores, AtLeastOneAndWithinTheMask) {
  cpu_set_t old, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof old, &old), 0);
  EXPECT_GE(ds4::physical_cores(), 1);
  EXPECT_LE(ds4::physical_cores(), CPU_COUNT(&old));
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
    if (CPU_ISSET(cpu, &old)) CPU_SET(cpu, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(ds4::physical_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof old, &old), 0);
}

// A tree of control groups in a directory.
struct Groups {
  TempDir dir;
  std::vector<std::string> made;
  ~Groups() {
    for (auto it = made.rbegin(); it != made.rend(); ++it) {
      for (const char* f : {"/cpu.max", "/cpu.cfs_quota_us", "/cpu.cfs_period_us"}) std::remove((*it + f).c_str());
      rmdir(it->c_str());
    }
  }
  void put(const std::string& group, const std::string& file, const std::string& text) {
    std::string at = dir.dir();
    for (size_t from = 0; from < group.size();) {
      const size_t slash = group.find('/', from + 1);
      at += group.substr(from, slash - from);
      if (mkdir(at.c_str(), 0700) == 0) made.push_back(at);
      from = slash == std::string::npos ? group.size() : slash;
    }
    std::ofstream(at + "/" + file) << text;
  }
  double limit(const std::string& self) { return ds4::cgroup_cpu_limit(dir.write("self", self), dir.dir()); }
};

TEST(Cores, ControlGroupQuota) {
  Groups g;
  EXPECT_EQ(g.limit("0::/a/b\n"), HUGE_VAL);
  EXPECT_EQ(g.limit(""), HUGE_VAL);
  EXPECT_EQ(g.limit("nonsense\n"), HUGE_VAL);
  g.put("/a/b", "cpu.max", "max 100000\n");
  EXPECT_EQ(g.limit("0::/a/b\n"), HUGE_VAL);
  g.put("/a", "cpu.max", "350000 100000\n");
  EXPECT_EQ(g.limit("0::/a/b\n"), 3.5);
  g.put("/a/b", "cpu.max", "150000 100000\n");
  EXPECT_EQ(g.limit("0::/a/b\n"), 1.5);
  EXPECT_EQ(g.limit("0::/elsewhere\n"), HUGE_VAL);
  g.put("/cpu", "cpu.cfs_quota_us", "-1\n");
  g.put("/cpu", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(g.limit("9:memory:/x\n1:cpu,cpuacct:/x/y\n"), HUGE_VAL);
  g.put("/cpu", "cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(g.limit("9:memory:/x\n1:cpuacct,cpu:/x/y\n"), 2.0);
  g.put("/cpu/x", "cpu.cfs_quota_us", "50000\n");
  g.put("/cpu/x", "cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(g.limit("1:cpu:/x/y\n0::/\n"), 0.5);
}

}  // namespace threads_test
