// OwnPool: memory in pages that are mapped from the system, apart from the heap.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory_resource>
#include <new>

namespace fastcheck {

// Whole pages, for a pool that takes large pieces.
class OwnPages : public std::pmr::memory_resource {
 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* const pages =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return pages;
  }
  void do_deallocate(void* pages, std::size_t bytes, std::size_t) override { munmap(pages, bytes); }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }
};

// Memory for what is small and is kept while training goes on. In the heap it would lie between two
// of the tensors that training allocates and keep the allocator from making one large block of them
// again: the heap of a dumped step has grown to four times that of a plain one. Its owner's lock
// guards it.
class OwnPool {
 public:
  std::pmr::memory_resource* get() { return &pool_; }

 private:
  OwnPages pages_;
  std::pmr::unsynchronized_pool_resource pool_{&pages_};
};

}  // namespace fastcheck
