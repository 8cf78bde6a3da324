// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_C_THREAD_TEXT_H_
#define VRAMBROKER_CLIENT_C_THREAD_TEXT_H_

#include <pthread.h>

#include <cstdlib>
#include <cstring>

namespace vrambroker {

// A text of any length per thread, kept until the thread keeps another text or ends. Not thread_local: a destructor
// would need the C++ library, and on the main thread would run before PyTorch's last call. A single object per process,
// never destroyed. Thread-safe.
class ThreadText {
 public:
  ThreadText() noexcept : made_(pthread_key_create(&key_, &std::free) == 0) {}
  ThreadText(const ThreadText&) = delete;
  ThreadText& operator=(const ThreadText&) = delete;

  // Keeps and returns a copy. Null: no text is kept now, since `text` is null or memory ran out.
  const char* Keep(const char* text) {
    if (!made_) return nullptr;
    char* const copy = text == nullptr ? nullptr : ::strdup(text);
    std::free(pthread_getspecific(key_));
    if (pthread_setspecific(key_, copy) == 0) return copy;
    // Needs memory only for a thread's first text.
    std::free(copy);
    return nullptr;
  }

  // The text of this thread; null: none.
  const char* Get() const { return made_ ? static_cast<const char*>(pthread_getspecific(key_)) : nullptr; }

 private:
  pthread_key_t key_ = 0;
  bool made_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_CLIENT_C_THREAD_TEXT_H_
