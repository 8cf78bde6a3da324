// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include "tests/gpu/work.h"

namespace work {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that works through a queue of functions.
class HostStream {
 public:
  HostStream() : thread_([this] { Run(); }) { thread_.detach(); }

  void Queue(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mu_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  bool Done() {
    const std::lock_guard<std::mutex> lock(mu_);
    return queue_.empty();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty(); });
      const std::function<void()>& work = queue_.front();
      lock.unlock();
      work();
      lock.lock();
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // the first function is running
  std::thread thread_;
};

HostStream& Of(Stream stream) {
  static auto* const standard = new HostStream();
  return stream == nullptr ? *standard : *static_cast<HostStream*>(stream);
}

}  // namespace

int UseDevice(const std::string& /*uuid*/) {
  return 0;
}

Stream NewStream() {
  return new HostStream();
}
bool Done(Stream stream) {
  return Of(stream).Done();
}
void Wait(Stream stream) {
  Of(stream).Wait();
}

void Fill(void* memory, size_t bytes, uint64_t seed, Stream stream) {
  Of(stream).Queue([=] {
    auto* const words = static_cast<uint64_t*>(memory);
    for (size_t i = 0; i < bytes / 8; ++i) words[i] = Word(seed, i);
  });
}

void Spin(int ms, Stream stream) {
  Of(stream).Queue([ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); });
}

void Increment(uint64_t* word, int ms, Stream stream) {
  Of(stream).Queue([=] {
    const auto end = Clock::now() + std::chrono::milliseconds(ms);
    while (Clock::now() < end) __atomic_add_fetch(word, 1, __ATOMIC_RELAXED);
  });
}

Content Look(const void* memory, size_t bytes, uint64_t seed) {
  const auto* const words = static_cast<const uint64_t*>(memory);
  Content content{.words = bytes / 8};
  for (size_t i = 0; i < content.words; ++i) {
    content.equal += words[i] == Word(seed, i);
    content.nonzero += words[i] != 0;
  }
  return content;
}

uint64_t ReadWord(const void* word) {
  return __atomic_load_n(static_cast<const uint64_t*>(word), __ATOMIC_RELAXED);
}

double CopyGigabytesPerSecond(void* to, const void* from, size_t bytes, int times) {
  std::memcpy(to, from, bytes);
  const auto start = Clock::now();
  for (int i = 0; i < times; ++i) std::memcpy(to, from, bytes);
  const std::chrono::duration<double> seconds = Clock::now() - start;
  return 2.0 * static_cast<double>(bytes) * times / seconds.count() / 1e9;
}

// Keeps the size in front of the memory.
constexpr size_t kPage = 4096;
void* Allocate(size_t bytes) {
  void* const memory = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw Error("mmap failed");
  std::memcpy(memory, &bytes, sizeof bytes);
  return static_cast<char*>(memory) + kPage;
}
void Release(void* memory) {
  void* const start = static_cast<char*>(memory) - kPage;
  size_t bytes = 0;
  std::memcpy(&bytes, start, sizeof bytes);
  munmap(start, bytes + kPage);
}

std::pair<uint64_t, uint64_t> FreeAndTotalBytes() {
  throw NeedsGpu("a GPU, for its free bytes");
}
std::string Crash() {
  throw NeedsGpu("a GPU, for an illegal address");
}
void BeginCapture(Stream /*stream*/, const std::string& /*mode*/) {
  throw NeedsGpu("a GPU, to capture a graph");
}
std::string EndCapture(Stream /*stream*/) {
  throw NeedsGpu("a GPU, to capture a graph");
}

}  // namespace work
