// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_C_THREAD_TEXT_H_
#define VRAMBROKER_CLIENT_C_THREAD_TEXT_H_

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace vrambroker {

// A text of any length that each thread keeps for itself, until it keeps another one or ends. Not thread_local: a
// destructor there needs the C++ library, and the main thread's would have run when PyTorch calls for the last time.
// One for the whole process: it is never destroyed. Safe to call from any thread.
class ThreadText {
 public:
  ThreadText() noexcept : made_(pthread_key_create(&key_, &std::free) == 0) {}
  ThreadText(const ThreadText&) = delete;
  ThreadText& operator=(const ThreadText&) = delete;

  // Keeps a copy, and returns it. Null: none is kept now, since `text` is null or there is no memory for it.
  const char* Keep(const char* text) {
    if (!made_) return nullptr;
    char* const copy = text == nullptr ? nullptr : ::strdup(text);
    std::free(pthread_getspecific(key_));
    if (pthread_setspecific(key_, copy) == 0) return copy;
    // It needs memory only where the thread has kept nothing so far.
    std::free(copy);
    return nullptr;
  }

  // What this thread keeps; null: nothing.
  const char* Get() const { return made_ ? static_cast<const char*>(pthread_getspecific(key_)) : nullptr; }

 private:
  pthread_key_t key_ = 0;
  bool made_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_CLIENT_C_THREAD_TEXT_H_
