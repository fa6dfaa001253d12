// Collision search for the checksum: families of structured variants of a base tensor, colliding
// pairs counted by the birthday method (N checksums sorted, equal neighbours counted: N(N-1)/2
// pairs).
//
//   g++ -O3 -march=native -std=c++17 -pthread -I csrc bench/collisions.cpp -o collisions
//   ./collisions [--quick] [--only FAMILY] [--json FILE]
//
// Exit status 1 when a family has a 64-bit collision, fewer than 10^8 pairs, or a 32-bit half off
// the random rate.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <thread>

#include "collision_families.h"

struct Tally {
  u64 variants = 0, tensors = 0, both = 0, a = 0, b = 0;
  double pairs = 0, worst_sigma = -1e9;
  std::string worst_case;
};

template <class T>
static u64 equal_pairs(std::vector<T>& v) {
  std::sort(v.begin(), v.end());
  u64 pairs = 0, run = 1;
  for (size_t i = 1; i <= v.size(); ++i) {
    if (i < v.size() && v[i] == v[i - 1]) {
      ++run;
    } else {
      pairs += run * (run - 1) / 2;
      run = 1;
    }
  }
  return pairs;
}

// How far a Poisson count is above its mean, in standard deviations (Anscombe's transform).
static double sigma_above(u64 seen, double mean) {
  return 2 * (std::sqrt(double(seen) + 0.375) - std::sqrt(mean + 0.375));
}

struct Job {
  std::string family;
  Case c;
};

static std::vector<Job> make_jobs(const std::map<std::string, Family>& table,
                                  const std::string& only, u64 count) {
  // Families whose sizes are their own need one numel only.
  const std::vector<std::string> own_size = {"tiles permuted", "runs permuted", "lanes permuted",
                                             "lengths (prefixes of a long tensor)"};
  std::vector<Job> jobs;
  for (const auto& entry : table) {
    if (entry.first.find(only) == std::string::npos) continue;
    const bool one_size =
        std::find(own_size.begin(), own_size.end(), entry.first) != own_size.end();
    for (const char* kind : {"normal", "constant", "smallint", "zeros", "arange"}) {
      for (size_t numel : {64, 320, 1024, 4096, 65536}) {
        for (int itemsize : {1, 2, 4, 8}) {
          if (!one_size || numel == 64)
            jobs.push_back({entry.first, {kind, numel, itemsize, count}});
        }
      }
    }
  }
  return jobs;
}

static void count_collisions(const Job& job, Found& found, Tally& t) {
  auto& v = found.item;
  std::sort(v.begin(), v.end());
  v.erase(std::unique(v.begin(), v.end(), [](auto& x, auto& y) { return x.first == y.first; }),
          v.end());
  if (v.size() < 2) return;
  std::vector<u32> a, b;
  std::vector<u64> whole;
  for (auto& x : v)
    a.push_back(u32(x.second)), b.push_back(u32(x.second >> 32)), whole.push_back(x.second);
  const double n = double(v.size()), pairs = n * (n - 1) / 2, mean = pairs / 4294967296.0;
  const u64 in_a = equal_pairs(a), in_b = equal_pairs(b);
  t.variants += v.size(), t.tensors += 1, t.pairs += pairs;
  t.both += equal_pairs(whole), t.a += in_a, t.b += in_b;
  const double sigma = std::max(sigma_above(in_a, mean), sigma_above(in_b, mean));
  if (sigma > t.worst_sigma) {
    char text[160];
    std::snprintf(text, sizeof text, "%s, %zu x %d B: a %llu, b %llu of %.2f (%+.1f sigma)",
                  job.c.kind.c_str(), job.c.numel, job.c.itemsize, (unsigned long long)in_a,
                  (unsigned long long)in_b, mean, sigma);
    t.worst_sigma = sigma, t.worst_case = text;
  }
}

int main(int argc, char** argv) {
  u64 count = 400000;
  const char* json = nullptr;
  std::string only;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--quick")
      count = 100000;
    else if (arg == "--json" && i + 1 < argc)
      json = argv[++i];
    else if (arg == "--only" && i + 1 < argc)
      only = argv[++i];
    else
      return std::fprintf(stderr, "usage: collisions [--quick] [--only FAMILY] [--json FILE]\n"), 2;
  }
  const auto table = families();
  const std::vector<Job> jobs = make_jobs(table, only, count);
  std::map<std::string, Tally> tally;
  std::mutex lock;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t j; (j = next++) < jobs.size();) {
      Found found;
      table.at(jobs[j].family)(found, jobs[j].c);
      Tally part;
      count_collisions(jobs[j], found, part);
      std::lock_guard<std::mutex> guard(lock);
      Tally& t = tally[jobs[j].family];
      t.variants += part.variants, t.tensors += part.tensors, t.pairs += part.pairs;
      t.both += part.both, t.a += part.a, t.b += part.b;
      if (part.worst_sigma > t.worst_sigma)
        t.worst_sigma = part.worst_sigma, t.worst_case = part.worst_case;
    }
  };
  std::thread second(work);
  work();
  second.join();

  bool good = true;
  std::string rows;
  std::printf(
      "| family | tensors | variants | pairs | 64-bit | random rate, a half | half a | ratio "
      "(95%%) | half b | ratio (95%%) | worst tensor |\n");
  std::printf("|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const auto& [name, t] : tally) {
    const double mean = t.pairs / 4294967296.0;
    // 4 sigma for a family's sum, 6 for the worst of its tensors: there are two thousand of these.
    // Too few to judge: below 1.
    const bool ok = t.both == 0 && t.pairs > 1e8 && sigma_above(t.a, mean) < 4 &&
                    sigma_above(t.b, mean) < 4 && t.worst_sigma < 6;
    good &= ok;
    const auto ratio = [&](u64 seen) {
      char text[64];
      const double root = std::sqrt(double(seen) + 0.375), low = std::max(0.0, root - 0.98);
      if (mean < 1) return std::string("(mean below 1)");
      std::snprintf(text, sizeof text, "%.2f (%.2f-%.2f)", double(seen) / mean,
                    std::max(0.0, low * low - 0.375) / mean,
                    ((root + 0.98) * (root + 0.98) - 0.375) / mean);
      return std::string(text);
    };
    std::printf("| %s%s | %llu | %.2e | %.2e | %llu | %.1f | %llu | %s | %llu | %s | %s |\n",
                ok ? "" : "FAIL ", name.c_str(), (unsigned long long)t.tensors, double(t.variants),
                t.pairs, (unsigned long long)t.both, mean, (unsigned long long)t.a,
                ratio(t.a).c_str(), (unsigned long long)t.b, ratio(t.b).c_str(),
                t.worst_case.c_str());
    char row[400];
    std::snprintf(
        row, sizeof row,
        "%s\n    {\"family\": \"%s\", \"tensors\": %llu, \"variants\": %llu, \"pairs\": %.0f, "
        "\"collisions_64\": %llu, "
        "\"collisions_a\": %llu, \"collisions_b\": %llu, \"random_rate_half\": %.4f, \"ok\": %s}",
        rows.empty() ? "" : ",", name.c_str(), (unsigned long long)t.tensors,
        (unsigned long long)t.variants, t.pairs, (unsigned long long)t.both,
        (unsigned long long)t.a, (unsigned long long)t.b, mean, ok ? "true" : "false");
    rows += row;
  }
  if (FILE* out = json ? std::fopen(json, "w") : nullptr) {
    std::fprintf(out,
                 "{\n  \"bench\": \"collisions\",\n  \"ok\": %s,\n  \"families\": [%s\n  ]\n}\n",
                 good ? "true" : "false", rows.c_str());
    std::fclose(out);
  }
  return good ? 0 : 1;
}
